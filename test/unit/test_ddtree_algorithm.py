"""DDTREE as the scheduler sees it: upstream's interface, and the widths of a verify."""

import unittest

from sglang.srt.runtime_context import publish
from sglang.srt.speculative.ddtree.algorithm import DDTreeAlgorithm
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import ArgumentsCase

register_cpu_ci(est_time=12, suite="unit")


class TestAlgorithm(ArgumentsCase):
    def test_it_has_every_method_of_a_builtin_algorithm(self):
        """The scheduler calls more than the is_* and supports_* that upstream's registration checks."""
        names = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_")}
        names -= {"from_string", "register", "get_platform_worker_cls"} | set(
            SpeculativeAlgorithm.__members__
        )
        self.assertEqual(set(), names - set(dir(DDTreeAlgorithm)))

    def test_verify_width(self):
        """The drafter's forwards are F wide, the target's N."""
        publish(self.resolve(speculative_num_draft_tokens=64), role="scheduler")
        algorithm = SpeculativeAlgorithm.from_string("DDTREE")
        self.assertEqual(algorithm.get_num_tokens_per_req_for_target_verify(64, True), 8)
        self.assertEqual(algorithm.get_num_tokens_per_req_for_target_verify(64, False), 64)


if __name__ == "__main__":
    unittest.main()
