"""What DDTREE reports: acceptance at /metrics, and the largest difference of a validating verify."""

import unittest

import torch
from sglang.srt.speculative.ddtree.metrics import DDTreeMetrics, Difference
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")


class TestMetrics(CustomTestCase):
    def test_accept_lengths_and_depths(self):
        """With F = 4, a step emits 1 to 4 tokens and accepts nodes of depths 1 to 3."""
        from prometheus_client import REGISTRY

        labels = {"model_name": "tiny"}
        metrics = DDTreeMetrics(num_nodes=8, block_size=4, labels=labels, enabled=True)
        metrics.count([0, 1, 3])
        metrics.count([3])

        def value(name, **more):
            return REGISTRY.get_sample_value(f"sglang:ddtree_{name}", labels | more)

        self.assertEqual(value("tree_nodes"), 8)
        self.assertEqual((value("accept_length_count"), value("accept_length_sum")), (4, 1 + 2 + 4 + 4))
        self.assertEqual(
            [value("accept_length_bucket", le=f"{length}.0") for length in range(1, 5)], [1, 2, 2, 4]
        )
        self.assertIsNone(value("accept_length_bucket", le="5.0"))
        self.assertEqual([value("accepted_nodes_total", depth=str(d)) for d in (1, 2, 3)], [3, 2, 2])
        self.assertIsNone(value("accepted_nodes_total", depth="4"))


class TestDifference(CustomTestCase):
    def test_names_layer_and_request_and_skips_padding(self):
        table = torch.zeros(3, 5)
        table[1, 0] = 9.0  # upstream pads a graph's batch with pool row 0
        table[2, 4] = 0.5
        found = Difference(table, {4: "request-a"})
        self.assertEqual((found.value, found.layer, found.request), (0.5, 2, "request-a"))


if __name__ == "__main__":
    unittest.main()
