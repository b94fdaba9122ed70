"""Which KV pools DDTREE accepts, and how it finds and moves KV in the pool of window layers."""

import unittest
from types import SimpleNamespace

import torch
from sgl_kernel.ddtree import Accepted
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.ddtree.kv_pool import (
    commit_kv,
    describe_pools,
    kv_groups,
    refuse_layers,
    window_slots,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")

SLOTS, WINDOW_SLOTS = 40, 24


def pool(name, **fields):
    """A pool of a class of this name."""
    return type(name, (), fields)()


def window_pool():
    """Layer 1 keeps everything, with two KV heads of size 4. Layers 0 and 2 keep windows, with one head of size 8."""
    made = SWAKVPool(
        SLOTS, WINDOW_SLOTS, 1, torch.float32, 2, 4, [0, 2], [1], "cpu", swa_head_num=1, swa_head_dim=8,
        swa_v_head_dim=8, v_head_dim=4,
    )  # fmt: skip
    mapping = torch.zeros(SLOTS + 2, dtype=torch.int64)
    mapping[SLOTS - WINDOW_SLOTS + 1 : SLOTS + 1] = torch.arange(WINDOW_SLOTS, 0, -1)
    mapping[-1] = -1
    made.register_mapping(mapping)
    return made


class TestKVGroups(CustomTestCase):
    def test_buffers_of_all_layers(self):
        layers = [torch.zeros(5, 2, 4)] * 2
        mha = pool("MHATokenToKVPool", k_buffer=layers, v_buffer=layers, is_quantized_kv_cache=False, size=4)
        (group,) = kv_groups(mha)
        self.assertEqual(group.buffers.table.shape, (4, 3))
        self.assertEqual((group.num_slots, group.slot_of), (4, None))
        (group,) = kv_groups(pool("MLATokenToKVPool", kv_buffer=layers, size=4))
        self.assertEqual(group.buffers.table.shape, (2, 3))

    def test_window_layers_are_a_group(self):
        pools = window_pool()
        full, windows = kv_groups(pools)
        self.assertEqual(full.buffers.table[:, 1].tolist(), [2 * 4 * 4] * 2)
        self.assertEqual(windows.buffers.table[:, 1].tolist(), [8 * 4] * 4)
        self.assertIsNone(full.slot_of)
        self.assertIs(windows.slot_of, pools.full_to_swa_index_mapping)

    def test_a_pool_of_windows_only(self):
        only = SWAKVPool(8, 8, 1, torch.float32, 1, 8, [0, 1], [], "cpu")
        only.register_mapping(torch.arange(9))
        (group,) = kv_groups(only)
        self.assertEqual(group.buffers.table.shape, (4, 3))
        self.assertIsNotNone(group.slot_of)

    def test_packed_numbers_are_refused(self):
        """Their scales are in separate buffers."""
        packed = pool(
            "MHATokenToKVPool",
            is_quantized_kv_cache=True,
            quant_method=SimpleNamespace(name="fp4_mx_block16"),
        )
        windows = window_pool()
        windows.swa_kv_pool = packed
        for refused in (packed, windows):
            with self.assertRaisesRegex(ValueError, "^DDTREE: --kv-cache-dtype: .*fp4_mx_block16"):
                kv_groups(refused)

    def test_other_layouts_are_refused(self):
        """A row of such a buffer is a page, in which a slot's numbers are not contiguous."""
        with self.assertRaisesRegex(ValueError, "^DDTREE: KV pool: expected the layout 'nhd'.*'hnd'"):
            kv_groups(pool("MHATokenToKVPool", kv_cache_layout="hnd"))

    def test_other_pools_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: KV pool: expected .* got DSATokenToKVPool, .*without DDTREE"
        ):
            kv_groups(pool("DSATokenToKVPool"))

    def test_the_gain_is_described(self):
        """40 slots of 64 bytes, 24 of 128, and 40 of the drafter's 8: one pool has room for 29 of 200 bytes."""
        groups = kv_groups(window_pool())
        text = describe_pools(groups, draft_bytes=SLOTS * 8)
        self.assertIn("hold 40 tokens of context, and 24 tokens in the layers with a sliding window", text)
        self.assertIn("would hold 29 in", text)
        self.assertIsNone(describe_pools(groups[:1], draft_bytes=0))


class TestLayers(CustomTestCase):
    def layer(self, layer_id, heads, size, window=-1):
        return RadixAttention(2, size, 1.0, num_kv_heads=heads, layer_id=layer_id, sliding_window_size=window)

    def test_shapes_of_their_pool(self):
        fitting = [self.layer(0, 1, 8, 5), self.layer(1, 2, 4), self.layer(2, 1, 8, 5)]
        refuse_layers(window_pool(), fitting)
        with self.assertRaisesRegex(
            ValueError,
            r"^DDTREE: target model: .* \(2, 4, 4\), got \(1, 8, 8\) in layer 1: .*--disable-hybrid-swa-memory",
        ):
            refuse_layers(window_pool(), [self.layer(1, 1, 8)])
        alone = MHATokenToKVPool(8, 1, torch.float32, 2, 4, 2, "cpu", False)
        with self.assertRaisesRegex(ValueError, r"^DDTREE: target model: .* got \(4, 4, 4\) in layer 1"):
            refuse_layers(alone, [self.layer(0, 2, 4, 5), self.layer(1, 4, 4)])

    def test_a_layer_without_a_window_in_the_pool_of_windows_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: target model: expected a sliding window in layer 2"
        ):
            refuse_layers(window_pool(), [self.layer(2, 1, 8)])


class TestWindowSlots(CustomTestCase):
    def test_slots_of_the_window(self):
        """Requests that are longer than the window, shorter, and without a prefix."""
        pools, window, lens = window_pool(), 6, [30, 4, 0]
        generator = torch.Generator().manual_seed(0)
        table = torch.stack([torch.randperm(SLOTS, generator=generator)[:34] for _ in range(5)]).int()
        rows = torch.tensor([3, 0, 4])
        tree = table[rows][:, :2].flatten().long()
        found = window_slots(pools, table, rows, torch.tensor(lens), tree, window)
        self.assertEqual(found.prefix_lens.tolist(), [6, 4, 0])
        self.assertEqual((found.prefix_lens.dtype, found.kv_indptr.dtype), (torch.int32, torch.int32))
        slot_of = pools.full_to_swa_index_mapping
        for r, (row, length) in enumerate(zip(rows.tolist(), lens)):
            start = int(found.kv_indptr[r])
            own = found.kv_indices[start : start + int(found.prefix_lens[r])]
            expected = slot_of[table[row, max(0, length - window) : length].long()]
            self.assertEqual(own.tolist(), expected.tolist())
        self.assertEqual(found.tree_slots.tolist(), slot_of[tree].tolist())

    def test_a_window_that_is_wider_than_the_slot_table(self):
        pools, table = window_pool(), torch.arange(20, 30, dtype=torch.int32)[None]
        found = window_slots(pools, table, torch.tensor([0]), torch.tensor([7]), torch.tensor([28]), 4096)
        self.assertEqual(found.kv_indptr.tolist(), [0, 10])
        expected = pools.full_to_swa_index_mapping[20:27]
        self.assertEqual(found.kv_indices[:7].tolist(), expected.tolist())

    def test_commit(self):
        """The path moves in both pools, each in slots of its own, and the hidden states move once."""
        pools = window_pool()
        slots = torch.tensor([[33, 21, 38, 26]])
        own = pools.full_to_swa_index_mapping[slots[0]]
        full, windows = pools.full_kv_pool.k_buffer[0], pools.swa_kv_pool.v_buffer[1]
        full.copy_(torch.arange(full.numel()).view(full.shape))
        windows.copy_(torch.arange(windows.numel()).view(windows.shape))
        before = full.clone(), windows.clone()
        accepted = Accepted.allocate(1, 3, "cpu")
        accepted.path.copy_(torch.tensor([[0, 2, 3]]))
        accepted.lengths.fill_(3)
        hidden, out = torch.arange(8.0).view(4, 2), torch.zeros(1, 3, 2)
        commit_kv(kv_groups(pools), accepted, slots, hidden, out)
        for buffer, old, where in ((full, before[0], slots[0]), (windows, before[1], own)):
            expected = old.clone()
            expected[where[:3]] = old[where[[0, 2, 3]]]
            self.assertTrue(torch.equal(buffer, expected))
        self.assertEqual(out.tolist(), hidden[[0, 2, 3]][None].tolist())


if __name__ == "__main__":
    unittest.main()
