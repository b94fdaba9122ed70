"""The attention of the verify pass on a CPU: masks, graph buffers, and what the tree ops get."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sgl_kernel.ddtree import ancestor_mask, ancestor_words, pack_ancestors
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.ddtree_backend import (
    TorchNativeTreeVerify,
    TreeVerifyMixin,
    TritonDraftBackend,
    TritonTreeVerify,
    WindowMask,
    block_ancestors,
)
from sglang.srt.layers.attention.ddtree_wrap import with_block_attention, with_tree_verify
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ddtree.coverage import not_covered
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")


class TestBlockMask(CustomTestCase):
    def test_block_ancestors(self):
        for num_nodes in (1, 5, 64, 65, 130):
            for causal in (True, False):
                words = block_ancestors(num_nodes, causal, "cpu")
                self.assertEqual(words.shape, (num_nodes, ancestor_words(num_nodes)))
                seen = ancestor_mask(words, num_nodes).long()
                expected = torch.ones(num_nodes, num_nodes, dtype=torch.int64)
                self.assertTrue(torch.equal(seen, expected.tril() if causal else expected))


class TestFullMask(CustomTestCase):
    """The base backend's mask, also if requests have passed the context and the host does not know yet."""

    num_nodes, context = 70, 100

    def setUp(self):
        class Base(AttentionBackend):
            use_sliding_window_kv_pool = False

            def init_cuda_graph_state(self, max_bs, max_num_tokens):
                self._verify_mask = maybe_create_verify_mask(
                    is_draft_runner=False, skip_prefill=False, max_bs=max_bs, num_draft_tokens=TestFullMask.num_nodes,
                    max_context_len=TestFullMask.context, device="cpu", is_read=True, dtype=torch.uint8,
                )  # fmt: skip

            def init_forward_metadata(self, forward_batch):
                pass

            def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
                pass

        generator = torch.Generator().manual_seed(3)
        self.bits = torch.randint(2, (2 * self.num_nodes, self.num_nodes), generator=generator)
        self.words = pack_ancestors(self.bits.bool())
        self.backend = type("Backend", (TreeVerifyMixin, Base), {})()
        runner = SimpleNamespace(
            device="cpu", model=torch.nn.Module(),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, self.context + 141)),
        )  # fmt: skip
        self.graph_words = torch.zeros(2, self.num_nodes, 2, dtype=torch.int64)
        self.backend._init_tree(
            runner=runner, mode="triton", num_nodes=self.num_nodes, graph_ancestors=self.graph_words
        )

    def batch(self, prefix_lens):
        bs = len(prefix_lens)
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(
                ancestors=self.words[: bs * self.num_nodes], draft_token_num=self.num_nodes, custom_mask=None
            ),
            batch_size=bs,
            seq_lens=torch.tensor(prefix_lens),
            req_pool_indices=torch.arange(bs),
        )

    def check(self, mask, prefix_lens):
        start = 0
        for i, prefix in enumerate(prefix_lens):
            cells = self.num_nodes * (prefix + self.num_nodes)
            tree = mask[start : start + cells].view(self.num_nodes, -1)[:, prefix:]
            self.assertTrue(
                torch.equal(tree.long(), self.bits[i * self.num_nodes : (i + 1) * self.num_nodes])
            )
            start += cells

    def test_without_a_graph(self):
        for prefix_lens in ([7, 31], [self.context + self.num_nodes] * 2):
            batch = self.batch(prefix_lens)
            self.backend.init_forward_metadata(batch)
            self.check(batch.spec_info.custom_mask, prefix_lens)

    def test_in_a_graph(self):
        self.backend.init_cuda_graph_state(2, 2 * self.num_nodes)
        for prefix_lens in ([self.context + self.num_nodes] * 2, [7, 31], [5]):
            batch = self.batch(prefix_lens)
            self.graph_words[: len(prefix_lens)] = batch.spec_info.ancestors.view(-1, self.num_nodes, 2)
            self.backend.init_forward_metadata_out_graph(batch)
            self.check(self.backend._verify_mask.buffer, prefix_lens)


class TestWindowMask(CustomTestCase):
    """Each cell against the positions that a node and what it sees have."""

    num_nodes, window, held = 10, 4, 6  # held: of a wider window of another layer

    def trees(self, bs):
        """[bs, N, N] bool: random trees."""
        generator = torch.Generator().manual_seed(5)
        seen = torch.eye(self.num_nodes, dtype=torch.bool).repeat(bs, 1, 1)
        for tree in seen:
            for node in range(1, self.num_nodes):
                parent = int(torch.randint(max(0, node - 3), node, (), generator=generator))
                tree[node] |= tree[parent]
        return seen

    def test_cells(self):
        mask = WindowMask(self.window, self.held, 3, self.num_nodes, "cpu")
        for prefix_lens in ([0, 3, 50], [6, 7], [100]):  # a replay may have fewer requests
            trees = self.trees(len(prefix_lens))
            mask.write(trees, torch.tensor(prefix_lens, dtype=torch.int32))
            for i, (tree, prefix) in enumerate(zip(trees.tolist(), prefix_lens)):
                held = min(prefix, self.held)
                cells = mask.cells[mask.indptr[i] : mask.indptr[i + 1]].view(
                    self.num_nodes, held + self.num_nodes
                )
                positions = [prefix + sum(row) - 1 for row in tree]
                for node, row in enumerate(tree):
                    expected = [positions[node] - (prefix - held + j) <= self.window for j in range(held)]
                    expected += [
                        sees and positions[node] - positions[other] <= self.window
                        for other, sees in enumerate(row)
                    ]
                    self.assertEqual(cells[node].bool().tolist(), expected)


class TritonCase(CustomTestCase):
    """Wrapped backends on upstream's Triton backend. The class is upstream's; no device is needed."""

    context, requests, window = 1000, 4, 32

    def backend(self, *, num_nodes=None, mode="native", layers=(), draft_window=None, **attributes):
        """The target's wrapped backend for trees of `num_nodes` nodes, or the drafter's if None."""
        backend = TritonAttnBackend.__new__(TritonAttnBackend)
        backend.__dict__ |= dict(
            device="cpu", dllm_attention=None, num_head=2, max_kv_splits=8, v_head_dim=64, swa_v_head_dim=None,
            lean_total_programs=1, lean_block_m=16, max_context_len=self.context, num_draft_tokens=num_nodes,
            is_draft_runner=num_nodes is None, skip_prefill=False, sliding_window_size=self.window,
            use_sliding_window_kv_pool=False, target_verify_num_tokens_per_req=num_nodes,
        ) | attributes  # fmt: skip
        for name in ("kv_indptr", "window_kv_indptr", "qo_indptr", "mask_indptr"):
            setattr(backend, name, torch.zeros(self.requests + 1, dtype=torch.int64))
        table = torch.zeros(self.requests + 1, self.context + 2 * (num_nodes or 0) + 1, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu", model=torch.nn.ModuleList(layers), dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16,
            req_to_token_pool=SimpleNamespace(req_to_token=table), prefill_attention_backend_str="triton",
            model_config=SimpleNamespace(num_hidden_layers=2),
        )  # fmt: skip
        if num_nodes is None:
            return with_block_attention(backend, runner, block_size=8, draft_window=draft_window)
        words = torch.zeros(self.requests, num_nodes, ancestor_words(num_nodes), dtype=torch.int64)
        return with_tree_verify(backend, runner, mode=mode, num_nodes=num_nodes, graph_ancestors=words)

    def layer(self, *, causal, window=-1, size=64):
        """A layer of a drafter."""
        attention = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
        return RadixAttention(
            2, size, 1.0, num_kv_heads=1, layer_id=0, sliding_window_size=window, attn_type=attention
        )


class TestGraphBuffers(TritonCase):
    """What graphs reserve."""

    def reserved(self, num_nodes, **options):
        """Bytes of the buffers that init_cuda_graph_state makes."""
        backend = self.backend(num_nodes=num_nodes, **options)
        before = set(backend.__dict__)
        backend.init_cuda_graph_state(self.requests, self.requests * (num_nodes or 8))
        made = [value for name, value in backend.__dict__.items() if name not in before]
        return sum(value.nbytes for value in made if isinstance(value, torch.Tensor))

    def test_nodes_do_not_multiply_them(self):
        """A node only lengthens the longest prefix of each request."""
        few, many = self.reserved(8), self.reserved(64)
        slots = (
            self.requests * 2 * (64 - 8) * 8
        )  # two trees more per request, int64; and again for the window
        self.assertEqual(many - few, 2 * slots)
        self.assertLess(many, 4 * self.requests * self.context * 8)

    def test_the_drafter_has_them_per_request(self):
        for layers in ((), (self.layer(causal=True, size=80),)):  # on the tree ops, and on Triton
            self.assertLess(self.reserved(None, layers=layers), 4 * self.requests * self.context * 8)

    def test_native_has_no_mask(self):
        for mode, expected in (("native", False), ("triton", True), ("validate", True)):
            backend = self.backend(num_nodes=8, mode=mode)
            backend.init_cuda_graph_state(self.requests, self.requests * 8)
            self.assertEqual(backend._verify_mask is not None, expected)
            self.assertEqual(backend.num_draft_tokens, 8)

    def test_the_longest_prefixes_fit(self):
        """Also if requests have passed the context, and the host does not know yet that they have ended."""
        num_nodes = 8
        backend = self.backend(num_nodes=num_nodes)
        backend.init_cuda_graph_state(self.requests, self.requests * num_nodes)
        lens = torch.full((self.requests,), self.context + num_nodes)

        class Translator:
            def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out):
                for r, length in enumerate(seq_lens.tolist()):
                    out[indptr[r] : indptr[r + 1]] = torch.arange(length) + 10_000 * r

        backend.kv_index_translator = Translator()
        backend.token_to_kv_pool = None
        spec_info = SimpleNamespace(custom_mask=None, num_tokens_per_req=num_nodes)
        window = None, None, None, torch.zeros(self.requests, dtype=torch.int32)
        with patch.object(triton_backend, "update_sliding_window_buffer", lambda *args, **options: window):
            backend._update_target_verify_buffers(
                None, self.requests, lens, spec_info, torch.arange(self.requests)
            )
        indptr, slots = backend.kv_indptr, backend.cuda_graph_kv_indices
        for r in range(self.requests):
            own = slots[indptr[r] : indptr[r + 1]]
            self.assertEqual(own.tolist(), list(range(10_000 * r, 10_000 * r + self.context + num_nodes)))


class TestDraftBlock(TritonCase):
    def test_which_draft_blocks_run_on_the_tree_ops(self):
        for layer, expected in (
            (self.layer(causal=True), TritonTreeVerify),
            (self.layer(causal=False), TritonTreeVerify),
            (self.layer(causal=True, window=16), TritonTreeVerify),
            (self.layer(causal=False, window=16), TritonDraftBackend),
            (self.layer(causal=False, size=80), TritonDraftBackend),
        ):
            with self.subTest(causal=layer.attn_type, window=layer.sliding_window_size):
                self.assertIs(type(self.backend(layers=[layer])), expected)

    def test_a_draft_block_hides_nothing_but_what_is_not_causal(self):
        for causal in (True, False):
            backend = self.backend(layers=[self.layer(causal=causal)])
            words = backend.ancestors_of((self.requests + 1) * 8, causal=causal)
            self.assertEqual(len(words), (self.requests + 1) * 8)
            for block in words.view(-1, 8, 1):
                self.assertTrue(torch.equal(block, block_ancestors(8, causal, "cpu")))
            self.assertEqual(len(backend.ancestors_of(8, causal=causal)), 8)


class TestInGraphMetadata(TritonCase):
    """A captured graph finds prefix lengths and slots itself, from the static buffers of its batch."""

    def test_it_reads_lengths_and_slots_of_the_batch(self):
        bs, num_nodes = 3, 8
        backend = self.backend(num_nodes=num_nodes)
        backend.kv_indptr = torch.zeros(self.requests + 1, dtype=torch.int32)
        backend.init_cuda_graph_state(self.requests, self.requests * num_nodes)
        packed = []

        class Translator:
            def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, num_token_blocks):
                packed.append(num_token_blocks)
                for r, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
                    out[indptr[r] : indptr[r + 1]] = torch.arange(length) + 10_000 * row

        backend.kv_index_translator = Translator()
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            batch_size=bs,
            seq_lens=torch.ones(bs, dtype=torch.int64),
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            kv_loc_plan=None,
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        captured = backend.tree_prefix_lens, *backend._prefix_slots(), backend.tree_qo_indptr
        for lengths, rows in (([5, 0, 7], [2, 1, 3]), ([1, self.context, 1], [3, 2, 1])):
            batch.seq_lens.copy_(torch.tensor(lengths))
            batch.req_pool_indices.copy_(torch.tensor(rows))
            backend.init_forward_metadata_out_graph(batch)  # before a replay: nothing is left to do
            backend.init_forward_metadata_in_graph(batch)
            prefix_lens, indptr, indices, qo_indptr = captured
            self.assertEqual(prefix_lens.tolist(), lengths)
            self.assertEqual(qo_indptr.tolist(), [0, 8, 16, 24])
            for r, (row, length) in enumerate(zip(rows, lengths)):
                own = indices[indptr[r] : indptr[r + 1]]
                self.assertEqual(own.tolist(), list(range(10_000 * row, 10_000 * row + length)))
        self.assertEqual(packed, [1, 1])


class TestWindowPoolInGraph(TritonCase):
    """The window layers' slots, in a graph that the host does not touch between two replays."""

    def test_slots_follow_the_batch(self):
        bs, num_nodes = 2, 4
        layer = self.layer(causal=True, window=8)
        pool = SimpleNamespace(full_to_swa_index_mapping=torch.arange(5000).flip(0))
        backend = self.backend(
            num_nodes=num_nodes, layers=[layer], use_sliding_window_kv_pool=True, token_to_kv_pool=pool
        )
        backend.kv_indptr = torch.zeros(self.requests + 1, dtype=torch.int32)
        backend.kv_index_translator = SimpleNamespace(pack_read_stream=lambda *args, **options: None)
        backend.init_cuda_graph_state(self.requests, self.requests * num_nodes)
        # What upstream's kernels write in the other modes, a slot per node.
        self.assertEqual(backend.cuda_graph_swa_out_cache_loc.numel(), self.requests * num_nodes)
        table = backend.tree_runner.req_to_token_pool.req_to_token
        table.copy_(torch.arange(table.numel()).view(table.shape) % 4999)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            batch_size=bs,
            seq_lens=torch.ones(bs, dtype=torch.int64),
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            out_cache_loc=torch.zeros(bs * num_nodes, dtype=torch.int64),
            kv_loc_plan=None,
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for lengths, rows in (([50, 3], [2, 1]), ([9, 8], [3, 4])):
            batch.seq_lens.copy_(torch.tensor(lengths))
            batch.req_pool_indices.copy_(torch.tensor(rows))
            batch.out_cache_loc.copy_(torch.arange(bs * num_nodes) + 10 * lengths[0])
            backend.init_forward_metadata_in_graph(batch)
            found = backend.tree_window_slots
            self.assertEqual(found.prefix_lens.tolist(), [min(length, 8) for length in lengths])
            self.assertEqual(found.tree_slots.tolist(), (4999 - batch.out_cache_loc).tolist())
            for r, (row, length) in enumerate(zip(rows, lengths)):
                own = found.kv_indices[found.kv_indptr[r] :][: min(length, 8)]
                self.assertEqual(own.tolist(), (4999 - table[row, max(0, length - 8) : length]).tolist())


class TestDraftWindow(TritonCase):
    """The slots that a drafter with --speculative-draft-window-size reads."""

    def test_slots_follow_the_batch(self):
        bs, width = 2, 8
        layers = [self.layer(causal=False)]
        backend = self.backend(layers=layers, draft_window=6, token_to_kv_pool=None, kv_index_translator=None)
        backend.init_cuda_graph_state(self.requests, self.requests * width)
        table = backend.tree_runner.req_to_token_pool.req_to_token
        table.copy_(torch.arange(table.numel()).view(table.shape))
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            seq_lens=torch.ones(bs, dtype=torch.int64),
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            out_cache_loc=torch.arange(bs * width),
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for lengths, rows in (([50, 3], [2, 1]), ([6, 1000], [3, 4])):
            batch.seq_lens.copy_(torch.tensor(lengths))
            batch.req_pool_indices.copy_(torch.tensor(rows))
            backend.init_forward_metadata_in_graph(batch)
            found = backend._slots_of(layers[0], batch)
            self.assertEqual(found.prefix_lens.tolist(), [min(length, 6) for length in lengths])
            self.assertEqual(found.tree_slots.tolist(), list(range(bs * width)))
            for r, (row, length) in enumerate(zip(rows, lengths)):
                own = found.kv_indices[found.kv_indptr[r] :][: min(length, 6)]
                self.assertEqual(own.tolist(), table[row, max(0, length - 6) : length].tolist())

    def test_a_drafter_on_triton_is_refused(self):
        for layer, gap in (
            (self.layer(causal=True, size=80), r"\(h_q, h_kv, d_qk, d_v\) = \(2, 1, 80, 80\)"),
            (self.layer(causal=False, window=16), "sliding windows in a draft block that is not causal"),
        ):
            with self.assertRaisesRegex(
                ValueError, f"^DDTREE: --speculative-draft-window-size: .* got .*{gap}"
            ):
                self.backend(layers=[layer], draft_window=6)


class TestWindowPool(CustomTestCase):
    """A layer of gpt-oss on a CPU: sinks, and a window whose KV is in a pool of its own. Freed slots hold NaN."""

    num_nodes, prefix, window = 6, 40, 9

    def test_a_layer_reads_its_own_pool(self):
        heads, kv_heads, d = 4, 2, 64
        end = self.prefix + self.num_nodes
        pool = SWAKVPool(end, 2 * self.window, 1, torch.float32, kv_heads, d, [0], [1], "cpu")
        mapping = torch.zeros(end + 2, dtype=torch.int64)
        alive = torch.arange(self.prefix - self.window, end)  # slots are positions + 1
        mapping[alive + 1] = torch.randperm(2 * self.window)[: len(alive)] + 1
        pool.register_mapping(mapping)
        for buffer in (*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer):
            buffer.fill_(float("nan"))
        layer = RadixAttention(
            heads, d, d**-0.5, num_kv_heads=kv_heads, layer_id=0, sliding_window_size=self.window
        )
        table = torch.arange(1, end + 1, dtype=torch.int32)[None]
        runner = SimpleNamespace(
            device="cpu", model=torch.nn.ModuleList([layer]), dtype=torch.float32, kv_cache_dtype=torch.float32,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )  # fmt: skip
        backend = TorchNativeTreeVerify.__new__(TorchNativeTreeVerify)
        backend.__dict__ |= dict(
            token_to_kv_pool=pool, use_sliding_window_kv_pool=True, req_to_token_pool=runner.req_to_token_pool
        )
        backend._init_tree(runner=runner, mode="native", num_nodes=self.num_nodes)
        q, k, v = (torch.randn(end, h, d) for h in (heads, kv_heads, kv_heads))
        nodes = slice(self.prefix, end)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, seq_lens=torch.tensor([self.prefix]),
            req_pool_indices=torch.tensor([0]), out_cache_loc=table[0, nodes].long(),
            spec_info=SimpleNamespace(
                draft_token_num=self.num_nodes, ancestors=block_ancestors(self.num_nodes, True, "cpu")
            ),
        )  # fmt: skip
        with get_parallel().override(dcp_enabled=False):
            before = table[0, self.prefix - self.window : self.prefix].long()
            pool.set_kv_buffer(layer, KVWriteLoc(before, mapping[before]), k[before - 1], v[before - 1])
            backend.init_forward_metadata(batch)
            sinks = torch.tensor([0.5, 2.0, -1.0, 4.0], dtype=torch.bfloat16)
            o = backend.forward_extend(q[nodes].flatten(1), k[nodes], v[nodes], layer, batch, sinks=sinks)
        keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        logits = torch.einsum("thd,shd->ths", q[nodes], keys) * d**-0.5
        position, other = torch.arange(self.prefix, end)[:, None], torch.arange(end)
        seen = (other <= position) & (other >= position - self.window)
        logits = logits.masked_fill(~seen[:, None], -float("inf"))
        logits = torch.cat([logits, sinks.float()[None, :, None].expand(self.num_nodes, -1, 1)], -1)
        expected = torch.einsum("ths,shd->thd", logits.softmax(-1)[..., :end], values)
        torch.testing.assert_close(o.view(expected.shape), expected, atol=1e-4, rtol=1e-4)


class TestTreeAttention(CustomTestCase):
    """What the wrapper passes to the ops, on a CPU: GQA with 4 and 2 heads, or MLA with 2 query heads."""

    num_nodes, prefix = 5, 7

    def check(self, *, mla=False, sinks=None, store=torch.float32, scales=None, page_size=1, skip=0):
        """Write KV and attend to it as a layer does, and compare with softmax attention.

        Args:
            page_size: the page size of the server.
            skip: slots left out in the middle of the prefix.
            store: dtype of the KV cache.
            scales: the scales of K and V, as in a layer of an FP8 checkpoint.
        """
        heads, kv_heads, d_qk, d_v = (2, 1, 576, 512) if mla else (4, 2, 64, 64)
        end = self.prefix + self.num_nodes
        slot_of = torch.arange(end)
        slot_of[self.prefix // 2 :] += skip
        common = dict(
            size=end + skip, page_size=1, dtype=store, layer_num=1, device="cpu", enable_memory_saver=False
        )
        pool = (
            MLATokenToKVPool(**common, kv_lora_rank=512, qk_rope_head_dim=64)
            if mla
            else MHATokenToKVPool(**common, head_num=kv_heads, head_dim=d_qk)
        )
        layer = RadixAttention(heads, d_qk, d_qk**-0.5, num_kv_heads=kv_heads, layer_id=0, v_head_dim=d_v)
        if scales is not None:
            layer.k_scale, layer.v_scale = (torch.tensor(scale) for scale in scales)
            layer.k_scale_float, layer.v_scale_float = scales
        generator = torch.Generator().manual_seed(5)
        q, k, v = (
            torch.randn(n, h, d, generator=generator)
            for n, h, d in ((self.num_nodes, heads, d_qk), (end, kv_heads, d_qk), (end, kv_heads, d_v))
        )
        if mla:
            v = k[..., :d_v]
        runner = SimpleNamespace(
            device="cpu",
            model=torch.nn.ModuleList([layer]),
            dtype=torch.float32,
            kv_cache_dtype=store,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, end)),
            page_size=page_size,
        )
        self.assertEqual(not_covered(runner), [])
        backend = TorchNativeTreeVerify.__new__(TorchNativeTreeVerify)
        backend.use_sliding_window_kv_pool = False
        backend._init_tree(runner=runner, mode="native", num_nodes=self.num_nodes)
        backend.token_to_kv_pool = pool
        backend.tree_ancestors = block_ancestors(self.num_nodes, True, "cpu")
        backend.tree_prefix_lens = torch.tensor([self.prefix], dtype=torch.int32)
        backend.tree_qo_indptr = torch.tensor([0, self.num_nodes], dtype=torch.int32)
        backend.tree_kv_indptr = torch.tensor([0, self.prefix], dtype=torch.int32)
        backend.tree_kv_indices = slot_of[: self.prefix]
        batch = SimpleNamespace(spec_info=SimpleNamespace(draft_token_num=self.num_nodes))
        for tokens in (torch.arange(self.prefix), torch.arange(self.prefix, end)):  # the nodes' own last
            batch.out_cache_loc = slot_of[tokens]
            with get_parallel().override(dcp_enabled=False):
                backend._write_kv(k[tokens].clone(), v[tokens].clone(), layer, batch)
        options = {} if sinks is None else dict(sinks=sinks)
        o = backend._tree_attention(q, layer, batch, **options).view(self.num_nodes, heads, d_v)

        group = heads // kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("thd,shd->ths", q, keys) * d_qk**-0.5
        seen = torch.ones(self.num_nodes, end, dtype=torch.bool).tril(self.prefix)
        logits = logits.masked_fill(~seen[:, None], -float("inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[None, :, None].expand(self.num_nodes, -1, 1)], -1)
        expected = torch.einsum("ths,shd->thd", logits.softmax(-1)[..., :end], values)
        # float8 has three bits of mantissa: an error of at most 6% in K and V, which the softmax averages.
        tolerance = dict(atol=0.15, rtol=0) if store == torch.float8_e4m3fn else dict(atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(o, expected, **tolerance)

    def test_plain(self):
        for mla in (False, True):
            self.check(mla=mla)

    def test_the_ops_learn_the_page_size(self):
        """The op on the CPU refuses a prefix that leaves a page in its middle."""
        for mla in (False, True):
            self.check(mla=mla, page_size=16)
            self.check(mla=mla, page_size=1, skip=2)
            with self.assertRaisesRegex(ValueError, r"kv_indices\[3\]: expected 3, .*page_size = 16"):
                self.check(mla=mla, page_size=16, skip=2)

    def test_sinks_in_bfloat16(self):
        """gpt-oss keeps them in bfloat16, and the op takes float32."""
        self.check(sinks=torch.tensor([0.5, 2.0, -1.0, 4.0], dtype=torch.bfloat16))

    def test_scales_of_an_fp8_checkpoint(self):
        """Scales of 1 work with every cache. Other scales work if the pool divides by them."""
        for mla in (False, True):
            for store in (torch.float32, torch.float8_e4m3fn):
                with self.subTest(mla=mla, store=store):
                    self.check(mla=mla, store=store, scales=(1.0, 1.0))
        self.check(store=torch.float8_e4m3fn, scales=(0.5, 0.25))


class TestWithTreeVerify(CustomTestCase):
    def test_it_shares_the_state_of_the_backend(self):
        """Upstream may hold the backend from before, and checks its type."""
        backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
        runner = SimpleNamespace(
            prefill_attention_backend_str="fa3", model=torch.nn.Module(), device="cpu",
            dtype=torch.float32, kv_cache_dtype=torch.float32,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 1)),
        )  # fmt: skip
        wrapped = with_tree_verify(backend, runner, mode="native", num_nodes=8)
        self.assertIsInstance(wrapped, TorchNativeAttnBackend)
        wrapped.forward_metadata = "new"
        self.assertEqual(backend.forward_metadata, "new")

    def test_what_torch_cannot_prefill_is_refused(self):
        layer = RadixAttention(4, 64, 1.0, num_kv_heads=2, layer_id=0, logit_cap=50.0)
        runner = SimpleNamespace(
            use_mla_backend=True, prefill_attention_backend_str="torch_native", kv_cache_dtype=torch.float32,
            model=torch.nn.ModuleList([layer]), device="cpu", is_hybrid_swa=True,
            model_config=SimpleNamespace(has_attention_sinks=True),
        )  # fmt: skip
        with self.assertRaisesRegex(
            ValueError,
            "^DDTREE: --prefill-attention-backend: .* MLA and attention sinks and capped attention logits, .* got "
            "'torch_native'",
        ):
            with_tree_verify(None, runner, mode="native", num_nodes=8)

    def test_a_split_backend_that_cannot_be_wrapped_is_refused(self):
        """Upstream's HybridAttnBackend, with an unknown decoding half."""
        split = HybridAttnBackend.__new__(HybridAttnBackend)
        split.decode_backend = SimpleNamespace()
        runner = SimpleNamespace(
            prefill_attention_backend_str="fa3", model=torch.nn.Module(), device="cpu",
            dtype=torch.float32, kv_cache_dtype=torch.float32,
        )  # fmt: skip
        with self.assertRaisesRegex(ValueError, "^DDTREE: target model: .* SimpleNamespace"):
            with_tree_verify(split, runner, mode="native", num_nodes=8)


if __name__ == "__main__":
    unittest.main()
