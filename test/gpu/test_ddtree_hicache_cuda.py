"""DDTREE with the hierarchical cache: KV of the target and of the drafter comes back from the host as it was."""

from __future__ import annotations

import unittest
from typing import Any, NamedTuple

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.cases import CudaCase
from support.engine import Engine, Greedy
from support.processes import run_engine
from support.prompts import TOKENS, patterned_prompts

register_cuda_ci(est_time=90, suite="gpu")

PROMPTS = patterned_prompts((900, 901, 902))  # the pool holds two of them with their answers
HOST = dict(enable_hierarchical_cache=True, hicache_ratio=4.0, max_total_tokens=2048)


class Asked(NamedTuple):
    """What the second request of each prompt found.

    Attributes:
        found: answers to all requests.
        cached: tokens of each prompt that were in the cache.
        same: whether each prompt's KV of the target, and of the drafter, is what the first request computed.
    """

    found: Greedy
    cached: list[int]
    same: list[tuple[bool, bool]]


def ask_twice(engine: Engine) -> Asked:
    """Ask for each prompt twice, one request at a time. In between, other prompts take its slots."""
    worker = engine.scheduler.draft_worker
    pools = [runner.token_to_kv_pool for runner in (worker.model_runner, worker.draft_model_runner)]
    table = worker.model_runner.req_to_token_pool.req_to_token
    forward, after_prefill = worker.forward_batch_generation, []

    def watched(batch: Any, *args: Any, **options: Any) -> Any:
        result = forward(batch, *args, **options)
        if batch.forward_mode.is_extend():
            torch.cuda.synchronize()
            slots = table[batch.req_pool_indices[0], : len(batch.reqs[0].origin_input_ids)].long()
            after_prefill.append(
                [torch.stack([buffer[slots] for buffer in pool.k_buffer + pool.v_buffer]) for pool in pools]
            )
        return result

    worker.forward_batch_generation = watched
    free, requests = engine.free_slots(), []
    for prompt in PROMPTS * 2:
        requests += engine.generate([prompt], temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    cached = [request.cached_tokens for request in requests[len(PROMPTS) :]]
    first, second = after_prefill[: len(PROMPTS)], after_prefill[len(PROMPTS) :]
    same = [
        tuple(torch.equal(a[:, :tokens], b[:, :tokens]) for a, b in zip(before, after, strict=True))
        for before, after, tokens in zip(first, second, cached, strict=True)
    ]
    found = Greedy(
        [list(request.output_ids)[:TOKENS] for request in requests],
        sum(request.spec_verify_ct for request in requests),
        sum(request.spec_num_correct_drafts for request in requests),
        (free, engine.free_slots()),
    )
    return Asked(found, cached, same)


def judge(engine: Engine, answers: list[list[int]]) -> dict[str, list[list[float]]]:
    """Gaps of the answers, and of plain decoding's own (see support.answers)."""
    own = engine.greedy(PROMPTS * 2, TOKENS).outputs
    return {name: engine.gaps(PROMPTS * 2, outputs) for name, outputs in (("tree", answers), ("plain", own))}


class TestHierarchicalCache(CudaCase):
    def test_kv_comes_back_from_the_host(self):
        asked = run_engine(self.tree | HOST | dict(speculative_num_draft_tokens=32), ask_twice)
        print(
            f"{asked.cached} tokens were cached; {asked.found.accepted} accepted in {asked.found.steps} steps"
        )
        self.assertEqual(asked.cached, [len(prompt) - 1 for prompt in PROMPTS])
        self.assertEqual(asked.same, [(True, True)] * len(PROMPTS), "(target, drafter)")
        gaps = run_engine(self.plain, judge, asked.found.outputs)
        assert_first_choices(self, "tree", asked.found, gaps, least_accepted=50)


if __name__ == "__main__":
    unittest.main(verbosity=2)
