"""The missing wait in the DSA indexer, with the indexer's own code on small random weights."""

import os
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.model_executor import graph_guard
from sglang.srt.model_executor.graph_guard.happens_before import REUSE
from sglang.test.ci.ci_register import register_cuda_ci
from support.graph_guard import backend

register_cuda_ci(est_time=40, suite="gpu")

TOKENS, HIDDEN, Q_LORA, HEADS, DIM, ROPE = 4, 1024, 512, 64, 128, 64


def projection(n_in, n_out):
    weight = torch.randn(n_in, n_out, device="cuda").to(torch.bfloat16) / 32
    return lambda x: (x @ weight, None)


class Indexer:
    """The real methods of the fused path, with just the attributes that they read."""

    _fused_q_prepare_and_store = dsa_indexer.Indexer._fused_q_prepare_and_store
    _fused_k_prepare_and_store = dsa_indexer.Indexer._fused_k_prepare_and_store

    def __init__(self, alt_stream):
        self.alt_stream = alt_stream
        self.n_heads, self.head_dim, self.softmax_scale = HEADS, DIM, DIM**-0.5
        self.wq_b = projection(Q_LORA, HEADS * DIM)
        self.wk_weights_proj = projection(HIDDEN, DIM + HEADS)
        self._indexer_cos_sin_cache = torch.randn(256, ROPE, device="cuda")
        ones = torch.ones(DIM, device="cuda")
        self.k_norm = SimpleNamespace(weight=ones, bias=torch.zeros_like(ones), variance_epsilon=1e-6)


class IndexerTest(unittest.TestCase):
    def races(self, guard):
        """The report on a captured decode step of two MLA layers, from the indexer to q_b_proj on its side stream."""
        torch.manual_seed(0)
        alt = torch.cuda.Stream()
        indexer = Indexer(alt)
        q_b_proj = projection(Q_LORA, HEADS * DIM)
        x = torch.randn(TOKENS, HIDDEN, device="cuda").to(torch.bfloat16)
        q_lora = torch.randn(TOKENS, Q_LORA, device="cuda").to(torch.bfloat16)
        positions = torch.arange(TOKENS, device="cuda")
        batch = SimpleNamespace(out_cache_loc=torch.arange(64, 64 + TOKENS, device="cuda"))
        pages = torch.zeros(4, 64 * (DIM + 4), dtype=torch.uint8, device="cuda")
        pool = SimpleNamespace(index_page_size=64, get_index_k_with_scale_buffer=lambda layer_id: pages)

        def layer():
            main = torch.cuda.current_stream()
            alt.wait_stream(main)
            indexer._fused_q_prepare_and_store(x, q_lora, positions, batch, 0, None)
            with torch.cuda.stream(alt):
                q, _ = q_b_proj(q_lora)
            main.wait_stream(alt)
            return q

        graph_guard._race_report = None
        with (
            mock.patch.object(dsa_indexer, "get_token_to_kv_pool", lambda: pool),
            mock.patch.object(dsa_indexer, "get_kv_shard_pool", lambda pool: None),
            tempfile.TemporaryDirectory() as folder,
            backend("full", guard=guard, debug_graph_races=os.path.join(folder, "races.json")) as capture,
        ):
            capture(TOKENS, lambda: torch.cat([layer() for _ in range(2)]))
        return graph_guard._race_report

    def test_the_race_is_reported_without_the_wait_and_gone_with_it(self):
        report = self.races(guard=False)
        self.assertTrue(report.races)
        for race in report.races:
            self.assertEqual(race.kind, REUSE)
            self.assertIn("_fused_q_prepare_and_store", " ".join(race.first.info["stack"]))
        self.assertEqual(self.races(guard=True).races, [])


if __name__ == "__main__":
    unittest.main()
