"""DDTREE with the hierarchical cache: KV of target and drafter comes back from the host, or a file, as it was."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path
from typing import NamedTuple

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.cases import CudaCase
from support.cuda import SECONDS
from support.engine import Engine, Greedy
from support.processes import EngineProcess, run_engine
from support.prompts import TOKENS
from support.storage import (
    HOST,
    PROMPTS,
    STORAGE,
    STORED_FILES,
    WHOLE_PAGES,
    ask,
    ask_storage,
    fill_storage,
    watch_prefills,
)

register_cuda_ci(est_time=180, suite="gpu")


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
    after_prefill = watch_prefills(engine)
    found, cached = ask(engine, PROMPTS * 2)
    cached = cached[len(PROMPTS) :]
    first, second = after_prefill[: len(PROMPTS)], after_prefill[len(PROMPTS) :]
    same = [
        tuple(torch.equal(a[:, :tokens], b[:, :tokens]) for a, b in zip(before, after, strict=True))
        for before, after, tokens in zip(first, second, cached, strict=True)
    ]
    return Asked(found, cached, same)


def judge(engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, list[list[float]]]:
    """Gaps of the answers, and of plain decoding's own (see support.answers)."""
    own = engine.greedy(prompts, TOKENS).outputs
    return {name: engine.gaps(prompts, outputs) for name, outputs in (("tree", answers), ("plain", own))}


class TestHierarchicalCache(CudaCase):
    def test_kv_comes_back_from_the_host(self):
        asked = run_engine(self.tree | HOST | dict(speculative_num_draft_tokens=32), ask_twice)
        print(
            f"{asked.cached} tokens were cached; {asked.found.accepted} accepted in {asked.found.steps} steps"
        )
        self.assertEqual(asked.cached, [len(prompt) - 1 for prompt in PROMPTS])
        self.assertEqual(asked.same, [(True, True)] * len(PROMPTS), "(target, drafter)")
        gaps = run_engine(self.plain, judge, PROMPTS * 2, asked.found.outputs)
        assert_first_choices(self, "tree", asked.found, gaps, least_accepted=50)

    def test_kv_comes_back_from_files(self):
        """Two servers, of which the second has nothing but the files of the first."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        storage = (
            HOST
            | STORAGE
            | dict(
                hicache_storage_backend_extra_config=json.dumps({"file_storage_path": folder}),
                speculative_num_draft_tokens=32,
            )
        )
        jobs = [EngineProcess(self.tree | storage, job, folder) for job in (fill_storage, ask_storage)]
        first, (found, cached, second) = [job.result(SECONDS) for job in jobs]
        files = len(list(Path(folder).glob("*.bin")))
        print(
            f"{files} files; {cached} tokens were cached; {found.accepted} accepted in {found.steps} steps; same: "
            f"{[[a == b for a, b in zip(x, y)] for x, y in zip(first, second)]}"
        )
        self.assertGreaterEqual(files, STORED_FILES)
        self.assertEqual(cached, [WHOLE_PAGES] * len(PROMPTS))
        self.assertEqual(second, first, "(target, drafter) of each prompt")
        gaps = run_engine(self.plain, judge, PROMPTS, found.outputs)
        assert_first_choices(self, "tree", found, gaps, least_accepted=25)


if __name__ == "__main__":
    unittest.main(verbosity=2)
