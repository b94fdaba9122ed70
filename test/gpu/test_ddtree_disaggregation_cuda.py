"""A pair of engines on one CUDA device, of which one prefills and the other decodes with DDTREE.

Both run with overlap scheduling, and the decoding one with graphs. Only Mooncake's transfer engine is replaced (see
support.transfer).
"""

from __future__ import annotations

import unittest
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.cases import CudaCase
from support.disaggregation import kv_of_prompts, run_pair
from support.engine import Engine, Greedy
from support.jobs import greedy
from support.processes import run_engine
from support.prompts import PROMPTS

register_cuda_ci(est_time=120, suite="gpu")


def judge(engine: Engine, answers: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
    """Gaps of the answers, and of plain decoding's own (see support.answers)."""
    return {
        name: engine.gaps(PROMPTS, outputs)
        for name, outputs in (answers | {"plain": greedy(engine).outputs}).items()
    }


def greedy_and_retractions(engine: Engine) -> tuple[Greedy, int]:
    """Greedy answers to PROMPTS, and how many requests were retracted."""
    batches, retracted = type(engine.scheduler.running_batch), []
    retract = batches.retract_decode

    def watched(batch: Any) -> Any:
        result = retract(batch)
        retracted.extend(result[0])
        return result

    batches.retract_decode = watched
    return greedy(engine), len(retracted)


class TestDisaggregationCuda(CudaCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        tree = cls.tree | dict(
            speculative_num_draft_tokens=32, max_total_tokens=4096, mem_fraction_static=0.3
        )
        # Upstream admits no request before the pool has room for its reserved tokens.
        small = dict(max_total_tokens=512, num_reserved_decode_tokens=8)
        pairs = {
            "fixed": partial(run_pair, tree, greedy),
            "auto": partial(run_pair, tree | dict(speculative_ddtree_budget="auto"), greedy),
            "kv": partial(run_pair, tree, kv_of_prompts),
            "retraction": partial(run_pair, tree, greedy_and_retractions, decode=small),
        }
        with ThreadPoolExecutor(len(pairs)) as pool:
            running = {name: pool.submit(pair) for name, pair in pairs.items()}
        cls.results = {name: future.exception() or future.result() for name, future in running.items()}
        cls.answers = {
            name: (result[1][0] if name == "retraction" else result[1])
            for name, result in cls.results.items()
            if name != "kv" and not isinstance(result, BaseException)
        }
        cls.gaps = run_engine(cls.plain, judge, {name: found.outputs for name, found in cls.answers.items()})

    def result(self, name: str) -> Any:
        """What the pair's engines returned."""
        if isinstance(self.results[name], BaseException):
            self.fail(f"{name}: {self.results[name]}")
        return self.results[name]

    def check(self, name: str, least_accepted: int = 50) -> None:
        self.result(name)
        assert_first_choices(self, name, self.answers[name], self.gaps, least_accepted)

    def test_fixed_width(self) -> None:
        self.check("fixed")

    def test_budget(self) -> None:
        self.check("auto", least_accepted=0)  # width 1 may be the fastest

    def test_kv(self) -> None:
        """The KV of target and drafter arrives as it was computed."""
        sent, received = self.result("kv")
        self.assertEqual(received, sent)
        self.assertEqual(len({kv for pair in sent for kv in pair}), 2 * len(PROMPTS))

    def test_retraction(self) -> None:
        """A retracted request gets its KV back from the host."""
        _, (_, retracted) = self.result("retraction")
        self.assertGreater(retracted, 0)
        self.check("retraction")


if __name__ == "__main__":
    unittest.main(verbosity=2)
