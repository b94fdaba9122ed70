"""The verdicts of the differential probe.

There are no graphs on the CPU. A "captured" run is a run under ``capture``, in which ``Layer`` can misbehave.
"""

import unittest

import torch
from sglang.srt.model_executor.graph_guard.differential import (
    BOTH_WRONG,
    CAPTURED_WRONG,
    INPUT_WRONG,
    GraphDiff,
    difference,
    valid_rows,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")


class Layer(torch.nn.Module):
    def __init__(self, broken_rows=None):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.broken_rows = broken_rows
        self.capturing = False

    def forward(self, x, scale=1.0):
        y = self.linear(x) * scale
        if self.capturing and self.broken_rows is not None:
            y[self.broken_rows] += 1
        return y


class Model(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


class ProbeTest(unittest.TestCase):
    def probe(self, model, pattern, buckets=((4, 3),)):
        torch.manual_seed(0)
        probe = GraphDiff(pattern, model, capturing=lambda: True)
        inputs = {bucket: torch.randn(bucket, 8) for bucket, _ in buckets}
        found = {}
        with torch.no_grad():
            for bucket, x in inputs.items():
                forward = lambda x=x: model(x)  # noqa: E731
                with probe.warmup(bucket, forward):
                    forward()
                for layer in model.layers:
                    layer.capturing = True
                with probe.capture(bucket):
                    forward()
                for layer in model.layers:
                    layer.capturing = False
            for bucket, real in reversed(buckets):
                found[bucket] = probe.check(bucket, bucket, real)
        return probe, found

    def test_a_broken_kernel_is_blamed_but_its_consumer_is_not(self):
        model = Model(Layer(), Layer(broken_rows=1), Layer())
        _, found = self.probe(model, r"layers\.\d$")
        verdicts = [(f.site, f.verdict, f.rows) for f in found[4]]
        self.assertEqual(verdicts, [("layers.1", CAPTURED_WRONG, (1,)), ("layers.2", INPUT_WRONG, (1,))])
        self.assertAlmostEqual(found[4][0].difference, 1.0, places=5)
        self.assertIn("step 1, bucket 4, layers.1", str(found[4][0]))

    def test_a_broken_kernel_with_wrong_inputs(self):
        model = Model(Layer(broken_rows=0), Layer(broken_rows=0))
        _, found = self.probe(model, r"layers\.1$")
        self.assertEqual([f.verdict for f in found[4]], [BOTH_WRONG])

    def test_padding_rows_do_not_count(self):
        _, found = self.probe(Model(Layer(broken_rows=3)), r"layers\.\d$")
        self.assertEqual(found[4], [])

    def test_a_correct_graph_in_buckets_of_any_order(self):
        probe, found = self.probe(Model(Layer(), Layer()), "layers", ((2, 2), (8, 5), (4, 4)))
        self.assertEqual(found, {2: [], 8: [], 4: []})
        # inputs and outputs of 2 layers and their 2 linears, 14 rows in all, 8 floats per row
        self.assertEqual(probe.nbytes(), 2 * 2 * 2 * 14 * 8 * 4)

    def test_ops_by_name(self):
        model = Model(Layer(), Layer(broken_rows=2), Layer())
        _, found = self.probe(model, "aten::addmm")
        self.assertEqual([(f.site, f.verdict) for f in found[4]], [("aten::addmm", INPUT_WRONG)])

    def test_a_captured_call_of_another_shape_is_logged_and_skipped(self):
        model = Model(Layer())
        probe = GraphDiff("layers.0$", model, capturing=lambda: True)
        with torch.no_grad():
            with probe.warmup(4, lambda: model(torch.ones(4, 8))):
                model(torch.ones(4, 8))
            with self.assertLogs("sglang.srt.model_executor.graph_guard.differential", "WARNING") as log:
                with probe.capture(4):
                    model(torch.ones(5, 8))
        self.assertIn("layers.0", log.output[0])

    def test_an_op_that_returns_nothing_is_judged_by_the_arguments_it_writes(self):
        broken = []

        def scaled(out, x):
            out.copy_(x * (2 if broken else 3))

        library = torch.library.Library("graph_guard_differential", "DEF")
        self.addCleanup(library._destroy)
        library.define("scaled(Tensor(a!) out, Tensor x) -> ()")
        library.impl("scaled", scaled, "CPU")
        x, out = torch.ones(4, 8), torch.zeros(4, 8)
        probe = GraphDiff("scaled", None, capturing=lambda: True)
        forward = lambda: torch.ops.graph_guard_differential.scaled(out, x)  # noqa: E731
        with torch.no_grad():
            with probe.warmup(4, forward):
                forward()
            broken.append(True)
            with probe.capture(4):
                forward()
            broken.clear()
            (found,) = probe.check(4, 4, 4)
        self.assertEqual((found.verdict, found.difference), (CAPTURED_WRONG, 1.0))

    def test_eager_breaks_are_skipped(self):
        """A break copies into the buffers only during the capture, so later replays would be compared with old data."""
        model = Model(Layer(broken_rows=1))
        captured = [False]
        probe = GraphDiff("layers.0$", model, capturing=lambda: captured[0])
        x = torch.ones(4, 8)
        with torch.no_grad():
            with probe.warmup(4, lambda: model(x)):
                model(x)
            model.layers[0].capturing = True
            for captured[0], findings in ((False, 0), (True, 1)):
                with probe.capture(4):
                    model(x)
                model.layers[0].capturing = False
                self.assertEqual(len(probe.check(4, 4, 4)), findings)
                model.layers[0].capturing = True

    def test_bad_pattern(self):
        with self.assertRaisesRegex(
            ValueError, "--debug-graph-diff: expected a regular expression, got '\\('"
        ):
            GraphDiff("(", None)


class DifferenceTest(unittest.TestCase):
    def test_tolerance_is_in_units_in_the_last_place(self):
        want = torch.tensor([[1.0, 2.0], [4.0, 4.0]], dtype=torch.bfloat16)
        close, far = want.clone(), want.clone()
        close[0, 0] += 0.0078125
        far[1, 1] += 1
        self.assertEqual(difference(close, want, 4), ((), 0.0))
        self.assertEqual(difference(far, want, 4), ((1,), 1.0))

    def test_nan_equals_nan_only(self):
        nan, one = torch.tensor([[float("nan")]]), torch.tensor([[1.0]])
        self.assertEqual(difference(nan, nan, 4), ((), 0.0))
        self.assertEqual(difference(nan, one, 4)[1], float("inf"))

    def test_integers_and_fp8_are_compared_exactly(self):
        a = torch.tensor([[1], [2]])
        self.assertEqual(difference(a, a + torch.tensor([[0], [1]]), 4), ((1,), 1.0))
        b = torch.tensor([[1.0], [2.0]]).to(torch.float8_e4m3fn)
        self.assertEqual(difference(b, b.clone(), 4), ((), 0.0))

    def test_valid_rows(self):
        self.assertEqual(valid_rows(torch.zeros(8, 3), 4, 3).shape[0], 6)
        self.assertEqual(valid_rows(torch.zeros(5, 3), 4, 3).shape[0], 5)


if __name__ == "__main__":
    unittest.main()
