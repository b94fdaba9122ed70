"""The attention backend's part of bfloat16 index keys, on upstream's own flow of an indexer layer and a pool on the CPU."""

import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.layers.attention.dsv4 import bf16_index_keys
from sglang.srt.layers.attention.dsv4.bf16_index_keys import key_pages, with_bf16_index_keys
from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin
from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

HEADS, HEAD_DIM, ROPE_DIM, PAGE, TOPK = 8, 128, 64, 64, 16
LAYER, SCALE = 2, 0.125
PAGES_PER_REQUEST, REQUESTS = 3, 2
SEQ_LENS = (396, 520)  # tokens, this step's included. Both complete a key


def rotate(x, positions, freqs):
    """Rotate the last 64 elements in neighbouring pairs. x: [rows, ..., 128]."""
    plain, tail = x[..., :-ROPE_DIM].float(), x[..., -ROPE_DIM:].float().contiguous()
    angles = freqs[positions].view(-1, *[1] * (x.dim() - 2), ROPE_DIM // 2)
    turned = torch.view_as_real(torch.view_as_complex(tail.view(*tail.shape[:-1], -1, 2)) * angles).flatten(
        -2
    )
    return torch.cat([plain, turned], -1)


def rope_inplace(q, k, freqs, positions):
    padded = torch.cat([torch.zeros(*q.shape[:-1], HEAD_DIM - ROPE_DIM, dtype=q.dtype), q], -1)
    q.copy_(rotate(padded, positions.long(), freqs)[..., -ROPE_DIM:])


class DecodePlan(tuple):
    """CompressorDecodePlan as far as it is read: [1] is [rows, 16] uint8, whose first 4 bytes are the length."""

    is_decode = True

    def __new__(cls, seq_lens):
        rows = torch.zeros(len(seq_lens), 4, dtype=torch.int32)
        rows[:, 0] = torch.tensor(seq_lens)
        return super().__new__(cls, (4, rows.view(torch.uint8)))


class Pool:
    """One layer's index keys in a pool of upstream's form."""

    uniform_fp8 = False
    layer_mapping = {LAYER: SimpleNamespace(compress_layer_id=0)}

    def __init__(self, generator):
        pages = REQUESTS * PAGES_PER_REQUEST + 1
        self.buffer = torch.zeros(pages, PAGE * HEAD_DIM * 2, dtype=torch.uint8)
        self.keys = key_pages(self.buffer, PAGE, HEAD_DIM)
        self.keys.copy_(torch.randn(self.keys.shape, generator=generator))

    def get_index_k_page_size(self, ratio):
        return PAGE

    def get_index_k_with_scale_buffer(self, layer_id):
        return self.buffer


class Backend(C4IndexerBackendMixin, CompressorBackendMixin):
    """Upstream's two mixins of an indexer layer, without the rest of its backend."""

    enable_deepseek_v4_fp4_indexer = False

    def __init__(self, pool, metadata):
        super().__init__()
        self.token_to_kv_pool, self.forward_metadata = pool, metadata
        self.dsa_topk_backend = DSATopKBackend.TORCH
        with_bf16_index_keys(self)


class TestStep(CustomTestCase):
    """One decode step of two requests: the key of this step is stored, then the best keys are selected."""

    def setUp(self):
        generator = torch.Generator().manual_seed(3)
        random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.pool = Pool(generator)
        self.freqs = torch.polar(torch.ones(1024, ROPE_DIM // 2), random(1024, ROPE_DIM // 2))
        self.x, self.q_lora = random(REQUESTS, 32), random(REQUESTS, 48)
        self.compressed, self.norm = random(REQUESTS, HEAD_DIM), 1 + 0.1 * random(HEAD_DIM)
        self.project = random(48, HEADS * HEAD_DIM) / 7
        self.head_weights = random(REQUESTS, HEADS)
        self.indexer = SimpleNamespace(
            layer_id=LAYER,
            head_dim=HEAD_DIM,
            rope_head_dim=ROPE_DIM,
            n_local_heads=HEADS,
            weight_scale=SCALE,
            freqs_cis=self.freqs,
            wq_b=lambda q: ((q @ self.project).to(torch.bfloat16), None),
            compute_weights=lambda x, skip_scale: self.head_weights,
            compressor=SimpleNamespace(
                ratio=4,
                is_in_indexer=True,
                rotate=True,
                head_dim=HEAD_DIM,
                ape=torch.zeros(4, 2 * HEAD_DIM),
                norm=SimpleNamespace(weight=self.norm, variance_epsilon=1e-6),
                freqs_cis=self.freqs,
                compute_kv_score=lambda x, batch: x,
                get_state_pool=lambda backend: SimpleNamespace(
                    kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(8, 4 * HEAD_DIM))
                ),
            ),
        )
        self.page_table = (
            (1 + torch.randperm(REQUESTS * PAGES_PER_REQUEST, generator=generator))
            .view(REQUESTS, PAGES_PER_REQUEST)
            .int()
        )
        self.lengths = torch.tensor([n // 4 for n in SEQ_LENS], dtype=torch.int32)
        last = [n // 4 - 1 for n in SEQ_LENS]
        self.slots = torch.tensor([
            int(self.page_table[r, t // PAGE]) * PAGE + t % PAGE for r, t in enumerate(last)
        ])  # fmt: skip
        self.core = SimpleNamespace(
            positions=torch.tensor(SEQ_LENS) - 1,
            c4_out_loc=self.slots,
            c4_sparse_page_indices=torch.full((REQUESTS, TOPK), -7, dtype=torch.int32),
            c4_sparse_raw_indices=torch.full((REQUESTS, TOPK), -7, dtype=torch.int32),
        )
        self.metadata = SimpleNamespace(
            page_table=self.page_table,
            compressed_seq_lens=self.lengths,
            compressed_page_size=PAGE,
            max_compressed_seq_len=PAGES_PER_REQUEST * PAGE,
            rows_per_chunk=None,
            topk_metadata_chunks=None,
        )
        self.plan = DecodePlan(SEQ_LENS)
        self.enterContext(mock.patch.object(bf16_index_keys, "fused_rope_inplace", rope_inplace))
        self.compress = self.enterContext(
            mock.patch.object(bf16_index_keys, "compress_forward", return_value=self.compressed)
        )

    def step(self, **changes):
        backend = Backend(
            self.pool,
            SimpleNamespace(
                core_metadata=self.core, indexer_metadata=self.metadata, c4_compress_metadata=self.plan
            ),
        )
        for name, value in changes.items():
            setattr(backend, name, value)
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=REQUESTS)
        backend.forward_c4_indexer(self.x, self.q_lora, self.indexer, batch)
        return backend

    def expected_keys(self):
        """[requests, 128] float32, this step's keys before they are rounded."""
        x = self.compressed.double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm
        return rotate(x, torch.tensor(SEQ_LENS) - 4, self.freqs)

    def expected_selection(self):
        q = (self.q_lora @ self.project).to(torch.bfloat16).view(REQUESTS, HEADS, HEAD_DIM)
        q = rotate(q, torch.tensor(SEQ_LENS) - 1, self.freqs).to(torch.bfloat16).double()
        best = []
        for r, length in enumerate(self.lengths.tolist()):
            keys = self.pool.keys[self.page_table[r].long()].flatten(0, 1)[:length].double()
            scores = (q[r] @ keys.T).relu().mul(self.head_weights[r, :, None] * SCALE).sum(0)
            best.append(set(scores.topk(TOPK).indices.tolist()))
        return best

    def test_keys_are_stored_where_the_step_says(self):
        before = self.pool.keys.clone()
        self.step()
        flat = self.pool.keys.view(-1, HEAD_DIM)
        torch.testing.assert_close(flat[self.slots].float(), self.expected_keys(), rtol=2**-8, atol=2**-8)
        others = torch.ones(len(flat), dtype=torch.bool)
        others[self.slots] = False
        self.assertTrue(torch.equal(flat[others], before.view(-1, HEAD_DIM)[others]))

    def test_a_token_between_two_keys_stores_nothing(self):
        before = self.pool.keys.clone()
        self.plan = DecodePlan((SEQ_LENS[0] - 1, SEQ_LENS[1]))
        self.step()
        flat, before = self.pool.keys.view(-1, HEAD_DIM), before.view(-1, HEAD_DIM)
        self.assertTrue(torch.equal(flat[self.slots[0]], before[self.slots[0]]))
        self.assertFalse(torch.equal(flat[self.slots[1]], before[self.slots[1]]))

    def test_the_best_keys_are_selected(self):
        self.step()
        selected = [set(row.tolist()) for row in self.core.c4_sparse_raw_indices]
        self.assertEqual(selected, self.expected_selection())
        for r, raw in enumerate(self.core.c4_sparse_raw_indices.tolist()):
            slots = [int(self.page_table[r, t // PAGE]) * PAGE + t % PAGE for t in raw]
            self.assertEqual(self.core.c4_sparse_page_indices[r].tolist(), slots)

    def test_chunks_of_rows_select_the_same(self):
        self.step()
        whole = self.core.c4_sparse_raw_indices.clone()
        self.core.c4_sparse_raw_indices.fill_(-7)
        self.metadata.rows_per_chunk = 1
        self.step()
        self.assertTrue(torch.equal(self.core.c4_sparse_raw_indices, whole))

    def test_each_chunk_has_its_own_plan_of_the_topk_kernel(self):
        self.metadata.rows_per_chunk = 1
        self.metadata.topk_metadata_chunks = ["first", "second"]
        with mock.patch.object(bf16_index_keys, "topk_transform_paged_from_metadata") as select:
            self.step(dsa_topk_backend=DSATopKBackend.SGL_KERNEL)
        self.assertEqual(
            [(call.kwargs["rows"], call.kwargs["topk_metadata"]) for call in select.call_args_list],
            [(slice(0, 1), "first"), (slice(1, 2), "second")],
        )

    def test_a_padded_batch_selects_for_its_real_rows(self):
        """Metadata of a captured graph has more rows than a smaller batch."""
        self.step()
        whole = self.core.c4_sparse_raw_indices.clone()
        self.core.c4_sparse_raw_indices.fill_(-7)
        self.plan = DecodePlan(SEQ_LENS[:1])
        self.core.c4_out_loc, self.compress.return_value = self.slots[:1], self.compressed[:1]
        self.x, self.q_lora, self.head_weights = self.x[:1], self.q_lora[:1], self.head_weights[:1]
        self.step()
        self.assertTrue(torch.equal(self.core.c4_sparse_raw_indices[0], whole[0]))
        self.assertEqual(self.core.c4_sparse_raw_indices[1].unique().tolist(), [-7])

    def test_the_capturer_gets_raw_indices(self):
        capturer = mock.Mock()
        self.core.c4_sparse_raw_indices = None
        with mock.patch.object(bf16_index_keys, "get_global_indexer_capturer", lambda: capturer):
            self.step()
        (layer, raw), _ = capturer.capture.call_args
        self.assertEqual(layer, 0)
        self.assertEqual([set(row.tolist()) for row in raw], self.expected_selection())

    def test_an_idle_rank_does_nothing(self):
        backend = Backend(self.pool, None)
        batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
        backend.forward_c4_indexer(self.x[:0], self.q_lora[:0], self.indexer, batch)
        self.compress.assert_not_called()

    def test_keys_that_are_stored_already_are_not_stored_again(self):
        backend = Backend(self.pool, SimpleNamespace(core_metadata=self.core, indexer_metadata=self.metadata))
        before = self.pool.keys.clone()
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=REQUESTS)
        backend.forward_c4_indexer(self.x, self.q_lora, self.indexer, batch, skip_compressor=True)
        self.assertTrue(torch.equal(self.pool.keys, before))
        self.assertEqual(
            [set(row.tolist()) for row in self.core.c4_sparse_raw_indices], self.expected_selection()
        )


class TestScore(CustomTestCase):
    def test_rows_that_share_pages_score_the_same(self):
        generator = torch.Generator().manual_seed(5)
        keys = Pool(generator).keys
        rows = 7
        q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
        weights = torch.randn(rows, HEADS, generator=generator)
        lengths = torch.arange(100, 100 + rows, dtype=torch.int32)
        table = torch.tensor([3, 1, 5], dtype=torch.int32).repeat(rows, 1)
        alone, shared = (torch.zeros(rows, 3 * PAGE) for _ in range(2))
        bf16_index_keys.score(q, keys, weights, lengths, table, alone, 1)
        with mock.patch.object(bf16_index_keys, "index_logits", wraps=bf16_index_keys.index_logits) as op:
            bf16_index_keys.score(q, keys, weights, lengths, table, shared, 4)
        self.assertEqual([len(call.args[4]) for call in op.call_args_list], [1, 3])
        torch.testing.assert_close(shared, alone)


class TestOtherCompressors(CustomTestCase):
    def test_latents_stay_upstreams(self):
        """A C4 or C128 layer compresses its latents by the same function."""
        with mock.patch.object(CompressorBackendMixin, "_forward_compress_all_in_one") as upstreams:
            Backend(None, None)._forward_compress_all_in_one(is_indexer=False, head_dim=512)
        upstreams.assert_called_once_with(is_indexer=False, head_dim=512)


if __name__ == "__main__":
    unittest.main()
