"""The page canary, on pools in CPU memory."""

import types
import unittest

import torch
from sglang.srt.model_executor.graph_guard.canary import (
    LOG_ROWS,
    PageCanary,
    WatchedPool,
    hash_pages,
    page_words,
    watched_pools,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

PAGE = 64


def pool(pages=16, layers=2, words=33):
    torch.manual_seed(0)
    return WatchedPool(
        "C4 KV", [torch.randint(-9, 9, (pages, words), dtype=torch.int32) for _ in range(layers)], PAGE
    )


class CanaryTest(unittest.TestCase):
    def step(self, canary, *locations):
        canary.expect(torch.tensor(locations, dtype=torch.int64))
        canary.check()

    def test_expected_stores_are_silent(self):
        p = pool()
        canary = PageCanary([p], 1)
        p.buffers[0][3] += 1
        p.buffers[1][5] += 1
        self.step(canary, 3 * PAGE + 7, 5 * PAGE)
        self.step(canary, 9 * PAGE)
        self.assertEqual(canary.violations, [])

    def test_a_stray_write_is_reported_once_with_step_page_and_owner(self):
        p = pool()
        canary = PageCanary([p], 1)
        self.step(canary, 2 * PAGE)
        p.buffers[1][7, 32] ^= 1
        self.step(canary, 6 * PAGE)
        self.step(canary, 6 * PAGE)
        (found,) = canary.violations
        self.assertEqual((found.step, found.page, found.owner), (2, 7, "C4 KV layer 1"))
        self.assertEqual(
            str(found), "step 2: page 7 of C4 KV layer 1 changed since step 1, but no step stored to it"
        )

    def test_padding_rows_store_to_page_zero(self):
        p = pool()
        canary = PageCanary([p], 1)
        p.buffers[0][0] += 1
        self.step(canary, 5 * PAGE)
        self.assertEqual(canary.violations, [])

    def test_sampling_finds_a_write_within_its_interval(self):
        p = pool(pages=18)
        canary = PageCanary([p], 4)
        p.buffers[0][13] += 1
        p.buffers[0][14] += 1
        canary.expect(torch.tensor([14 * PAGE]))  # the next step does not check this page
        for _ in range(4):
            self.step(canary, 2 * PAGE)
        self.assertEqual([(v.step, v.page) for v in canary.violations], [(1, 13)])

    def test_more_violations_than_the_log_holds(self):
        p = pool(pages=LOG_ROWS + 9, layers=1)
        canary = PageCanary([p], 1)
        p.buffers[0][1:] += 1
        with self.assertLogs("sglang.srt.model_executor.graph_guard.canary", "ERROR"):
            self.step(canary, 1 * PAGE)
        self.assertEqual(len(canary.violations), LOG_ROWS)

    def test_watch_wraps_forward_and_moves(self):
        p = pool(layers=1)
        kv = types.SimpleNamespace(move_kv_cache=lambda tgt, src: p.buffers[0][4].fill_(1))

        def forward(batch):
            p.buffers[0][batch.page] += 1
            return "logits"

        runner = types.SimpleNamespace(forward=forward, token_to_kv_pool=kv)
        canary = PageCanary([p], 1)
        canary.watch(runner)
        batch = types.SimpleNamespace(out_cache_loc=torch.tensor([3 * PAGE]), page=3)
        self.assertEqual(runner.forward(batch), "logits")
        kv.move_kv_cache(torch.tensor([4 * PAGE]), torch.tensor([0]))
        runner.forward(batch)
        self.assertEqual(canary.violations, [])
        batch.page = 8
        runner.forward(batch)
        self.assertEqual([v.page for v in canary.violations], [8])


class PoolTest(unittest.TestCase):
    def test_every_single_word_change_changes_the_hash(self):
        words = torch.randint(-(2**31), 2**31, (2, 50), dtype=torch.int64).to(torch.int32)
        before = hash_pages(words)
        for i in range(50):
            changed = words.clone()
            changed[0, i] ^= 1 << (i % 31)
            after = hash_pages(changed)
            self.assertNotEqual(after[0], before[0])
            self.assertEqual(after[1], before[1])
        swapped = words[:, [1, 0, *range(2, 50)]]
        self.assertFalse(torch.equal(hash_pages(swapped), before))

    def test_pools_of_dsa_and_deepseek_v4(self):
        u8 = lambda *s: torch.zeros(*s, dtype=torch.uint8)  # noqa: E731
        dsa = types.SimpleNamespace(page_size=64, index_k_with_scale_buffer=[u8(4, 8448), u8(0, 8448)])
        (found,) = watched_pools(dsa)
        self.assertEqual(
            (found.owner, len(found.buffers), tuple(found.buffers[0].shape)), ("DSA index-K", 1, (4, 2112))
        )
        sub = types.SimpleNamespace(kv_buffer=[u8(4, 64 * 584)])
        index = types.SimpleNamespace(index_k_with_scale_buffer=[u8(4, 64 * 132)])
        v4 = types.SimpleNamespace(page_size=256, kv_pools={4: sub, 128: sub}, index_pools={4: index})
        self.assertEqual([p.owner for p in watched_pools(v4)], ["C4 KV", "C128 KV", "C4 index-K"])
        self.assertEqual(watched_pools(types.SimpleNamespace(page_size=1)), [])

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "got one that has none"):
            PageCanary([], 1)
        with self.assertRaisesRegex(ValueError, "got 33 bytes per page"):
            page_words(torch.zeros(2, 33, dtype=torch.uint8))
        with self.assertRaisesRegex(ValueError, "layer 1: expected contiguous int32"):
            WatchedPool("x", [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)], PAGE)


if __name__ == "__main__":
    unittest.main()
