"""Heads that know the path: DDTREE emits what plain decoding emits, whatever the drafter's head says."""

import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.head_models import HEADS, write_head
from support.jobs import greedy
from support.models import write_models_for
from support.processes import run_engine
from support.prompts import PROMPTS, TOKENS

register_cpu_ci(est_time=120, suite="e2e")


class TestHeads(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder, target, cls.drafter = write_models_for(cls)
        cls.plain = {"model_path": target}
        cls.tree = cls.plain | {"speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": 24}
        cls.drafters = {head: write_head(cls.drafter, folder / head, head) for head in HEADS}
        cls.expected = run_engine(cls.plain, greedy).outputs

    def test_greedy(self):
        for head, drafter in self.drafters.items():
            with self.subTest(head):
                found = run_engine(self.tree | dict(speculative_draft_model_path=drafter), greedy)
                print(head, found.accepted, found.steps)
                self.assertEqual(found.outputs, self.expected)
                self.assertEqual(*found.free_slots, "KV slots leaked")
                self.assertGreater(found.accepted, 20)
                self.assertLess(found.steps, len(PROMPTS) * TOKENS)


if __name__ == "__main__":
    unittest.main()
