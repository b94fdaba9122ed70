"""DDTREE's memory on a CUDA device: bounded for sampling, one prefix per request for graph buffers.

A careless implementation would copy bs * N * vocabulary logits several times to sample, and would hold bs * N
prefixes in graph buffers.
"""

import itertools
import unittest

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.cuda import CUDA
from support.models import write_models_for
from support.processes import run_engine

register_cuda_ci(est_time=60, suite="gpu")

BS, NUM_NODES, VOCABULARY = 48, 32, 151936
CASES = {
    "temperature": dict(),
    "top-p, top-k, min-p": dict(need_top_p_sampling=True, need_top_k_sampling=True, need_min_p_sampling=True),
}


def sampling_info(**needs):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def each(value, dtype=torch.float32):
        return torch.full((BS,), value, dtype=dtype, device="cuda")

    return SamplingBatchInfo(
        temperatures=each(1.3)[:, None], top_ps=each(0.9), top_ks=each(1000, torch.int32), min_ps=each(0.01),
        is_all_greedy=False, is_any_greedy=True, vocab_size=VOCABULARY,
        **dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), False) | needs,
    )  # fmt: skip


def peaks(engine):
    """Measure sampling and the graph buffers.

    Returns:
        The bytes that sampling takes in addition to the logits, by case, by the number of greedy requests, and by whether
        the logits are kept. Then the sizes of the slot buffers that the graphs of target and drafter read, in units of the slots
        of one request.
    """
    from sglang.srt.speculative.ddtree.sampling import target_tokens

    worker = engine.scheduler.draft_worker
    sampler = worker.model_runner.sampler
    positions = torch.arange(BS * NUM_NODES, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    found = {}
    for name, needs in CASES.items():
        for greedy, keep in itertools.product((0, BS // 2), (True, False)):
            logits = torch.randn(BS * NUM_NODES, VOCABULARY, device="cuda", generator=generator) * 3
            info, sampled = sampling_info(**needs), list(range(greedy, BS))
            best = logits[: greedy * NUM_NODES].argmax(-1)
            for _ in range(2):  # the first compiles kernels
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.set_sync_debug_mode("error")
                tokens = target_tokens(logits.clone() if greedy else logits, info, sampler, positions, sampled=sampled,
                                       keep_logits=keep)  # fmt: skip
                torch.cuda.set_sync_debug_mode("default")
            copy = logits.nbytes if greedy else 0
            found[name, greedy, keep] = torch.cuda.max_memory_allocated() - before - copy
            assert torch.equal(tokens[: greedy * NUM_NODES], best)
            assert 0 <= int(tokens.min()) and int(tokens.max()) < VOCABULARY
            del logits, tokens, best
            torch.cuda.empty_cache()
    row = worker.model_runner.req_to_token_pool.req_to_token.shape[1]
    backends = worker.model_runner.attn_backend, worker.draft_model_runner.attn_backend
    return found, [backend.cuda_graph_kv_indices.numel() / row for backend in backends]


class TestMemory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        _, target, drafter = write_models_for(cls)
        cls.sampling, cls.slots = run_engine(
            CUDA
            | dict(model_path=target, speculative_algorithm="DDTREE", speculative_draft_model_path=drafter,
                   speculative_num_draft_tokens=NUM_NODES, mem_fraction_static=0.5),
            peaks,
        )  # fmt: skip

    def test_sampling_takes_little_more_than_the_logits(self):
        whole = BS * NUM_NODES * VOCABULARY * 4
        for case, taken in self.sampling.items():
            print(f"{case}: {taken / 1e6:.0f} MB in addition to logits of {whole / 1e6:.0f} MB")
            self.assertLess(taken, 900e6, case)

    def test_graphs_hold_one_prefix_per_request(self):
        self.assertEqual(self.slots, [8, 8])  # cuda_graph_max_bs_decode


if __name__ == "__main__":
    unittest.main()
