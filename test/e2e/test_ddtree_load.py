"""Mixed load on DDTREE: nothing crashes, no KV slot leaks, greedy answers equal plain decoding's."""

import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.load import REQUESTS, schedule, serve
from support.models import write_models_for
from support.processes import run_engine

register_cpu_ci(est_time=90, suite="e2e")


class TestLoad(CustomTestCase):
    def test_mixed_load(self):
        _, target, drafter = write_models_for(type(self))
        plain = {"model_path": target, "skip_tokenizer_init": False, "grammar_backend": "xgrammar",
                 "max_total_tokens": 2500}  # fmt: skip
        tree = plain | {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": drafter}
        planned = schedule(5)
        expected, _ = run_engine(plain, serve, planned)
        self.assertGreater(len(expected), REQUESTS // 3)
        mixed = {"page_size": 16, "chunked_prefill_size": 32, "enable_mixed_chunk": True}
        for arguments in ({}, mixed, mixed | {"overlap": True}):
            with self.subTest(arguments):
                outputs, (before, after) = run_engine(tree | arguments, serve, planned)
                self.assertEqual(outputs, expected)
                self.assertEqual(before, after, "KV slots leaked")


if __name__ == "__main__":
    unittest.main()
