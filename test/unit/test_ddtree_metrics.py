"""What DDTREE reports: acceptance at /metrics, and the largest difference of a validating verify."""

import json
import re
import unittest
from pathlib import Path

import torch
from sglang.srt.speculative.ddtree import metrics as metrics_module
from sglang.srt.speculative.ddtree.metrics import PHASES, TIME_EVERY, DDTreeMetrics, Difference, PhaseTimer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/ddtree.json"


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
        for nodes in (8, 1, 8):
            metrics.count_step(nodes, 0.25)
        metrics.time_phases({"draft": 0.002, "commit": 0.001})
        self.assertEqual([value("steps_total", nodes=nodes) for nodes in ("1", "8")], [1, 2])
        self.assertEqual(value("calibration_error"), 0.25)
        self.assertEqual(value("phase_seconds_sum", phase="draft"), 0.002)
        self.assertEqual(value("phase_seconds_count", phase="verify"), 0)


class TestDashboard(CustomTestCase):
    def test_it_asks_for_metrics_that_exist(self):
        dashboard = json.loads(DASHBOARD.read_text())
        source = Path(metrics_module.__file__).read_text()
        names = set(re.findall(r"sglang:(ddtree_\w+?)(?:_sum|_count|_total)?[{,]", json.dumps(dashboard)))
        self.assertEqual(len(names), 6)
        for name in names:
            self.assertIn(f'"sglang:{name}"', source)
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        self.assertEqual(len(set(places)), len(places))


class TestPhaseTimer(CustomTestCase):
    def test_it_times_one_step_in_many(self):
        timer, found = PhaseTimer(on_card=False), []
        for _ in range(3 * TIME_EVERY):
            found.append(timer.begin())
            for _phase in PHASES:
                timer.mark()
        timed = [step for step, seconds in enumerate(found) if seconds is not None]
        self.assertEqual(timed, [TIME_EVERY, 2 * TIME_EVERY])
        self.assertEqual(tuple(found[TIME_EVERY]), PHASES)
        self.assertTrue(all(seconds >= 0.0 for seconds in found[TIME_EVERY].values()))


class TestDifference(CustomTestCase):
    def test_names_layer_and_request_and_skips_padding(self):
        table = torch.zeros(3, 5)
        table[1, 0] = 9.0  # upstream pads a graph's batch with pool row 0
        table[2, 4] = 0.5
        found = Difference(table, {4: "request-a"})
        self.assertEqual((found.value, found.layer, found.request), (0.5, 2, "request-a"))


if __name__ == "__main__":
    unittest.main()
