"""Heads that know the path: DDTREE emits what plain decoding emits, whatever the drafter's head says."""

import tempfile
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.cases import DDTreeCase
from support.head_models import HEADS, write_head
from support.jobs import greedy
from support.models import write_models
from support.processes import run_engine, run_ranks
from support.prompts import PROMPTS, TOKENS
from support.sampling import SamplingCheck

register_cpu_ci(est_time=200, suite="e2e")


class TestHeads(SamplingCheck, DDTreeCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = Path(cls.target).parent
        drafter = cls.tree["speculative_draft_model_path"]
        cls.trees = {
            head: cls.tree | dict(speculative_draft_model_path=write_head(drafter, folder / head, head))
            for head in HEADS
        }
        cls.expected = run_engine(cls.plain, greedy).outputs

    def check_greedy(self, head, least_accepted, **arguments):
        found = run_engine(self.trees[head] | dict(speculative_num_draft_tokens=24) | arguments, greedy)
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertGreater(found.accepted, least_accepted)
        self.assertLess(found.steps, len(PROMPTS) * TOKENS)

    def test_selector(self):
        self.check_greedy("selector", 20)

    def test_domino(self):
        self.check_greedy("domino", 20)

    def test_lilicorr(self):
        self.check_greedy("lilicorr", 20)

    def test_a_selector_with_few_candidates_and_the_top1_path(self):
        self.check_greedy("selector", 10, speculative_eagle_topk=2, speculative_ddtree_top1_path="keep")

    def test_domino_with_more_nodes_than_its_beam(self):
        self.check_greedy("domino", 30, speculative_num_draft_tokens=130, speculative_eagle_topk=12)

    def test_temperature_1(self):
        exact = self.exact()
        for head in HEADS:
            with self.subTest(head):
                answers = self.answers(self.trees[head], temperature=1.0)
                self.assertLess(self.statistic(answers, exact), 1.0)


class TestTensorParallel(CustomTestCase):
    """Two ranks over gloo. The vocabulary is large enough to be split: each rank holds 64 tokens."""

    def test_two_ranks(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        target, drafter = write_models(Path(folder.name), vocabulary=128)
        expected = run_engine({"model_path": target}, greedy).outputs
        arguments = dict(
            model_path=target,
            speculative_algorithm="DDTREE",
            speculative_num_draft_tokens=48,
            tp_size=2,
        )
        for head in HEADS:
            with self.subTest(head):
                own = write_head(drafter, Path(folder.name, head), head)
                first, second = run_ranks(arguments | dict(speculative_draft_model_path=own), greedy)
                self.assertEqual(first, second)
                self.assertEqual(first.outputs, expected)
                self.assertGreater(first.accepted, 0)


if __name__ == "__main__":
    unittest.main()
