"""The guard's dispatch modes do not change what runs. Compiled regions stay compiled."""

import unittest

import torch
from sglang.srt.model_executor.graph_guard.differential import GraphDiff, _MatchedOps
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from sglang.srt.model_executor.graph_guard.race_detector import Recorder
from sglang.srt.model_executor.graph_guard.race_report import RaceReport
from sglang.srt.model_executor.graph_guard.stream_safe_capture import CudaStreams, StreamSafeCapture
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit")


class OneStream(CudaStreams):
    def current(self):
        return "main"

    def capturing(self, stream=None):
        return True

    def owns(self, tensor):
        return False


class CpuRecorder(Recorder):
    def owns(self, tensor):
        return False


def modes():
    yield StreamSafeCapture(device=OneStream())
    yield CpuRecorder(RaceReport())
    yield _MatchedOps(GraphDiff("aten::mm", None)._pattern, lambda *a: None, lambda out: None)


class CompiledRegionTest(unittest.TestCase):
    def test_a_region_runs_compiled_in_a_mode_and_after_it(self):
        for mode in modes():
            with self.subTest(mode=type(mode).__name__), torch.no_grad():
                torch._dynamo.reset()
                runs = []

                def backend(graph, inputs, runs=runs):
                    return lambda *args: runs.append(1) or graph(*args)

                gate = torch.compile(lambda x: torch.sigmoid(x) * x, dynamic=False, backend=backend)
                x = torch.ones(4)
                gate(x)
                with mode:
                    y = gate(x)
                gate(x)
                self.assertEqual(len(runs), 3)
                self.assertEqual(y.shape, x.shape)

    def test_a_higher_order_operator_passes_through(self):
        branches = (lambda x: (x + 1,), lambda x: (x,))
        for mode in modes():
            with self.subTest(mode=type(mode).__name__), torch.no_grad(), mode:
                (y,) = torch.ops.higher_order.cond(True, *branches, (torch.ones(2),))
            self.assertEqual(y.tolist(), [2.0, 2.0])

    def test_no_mode_is_left_on(self):
        for mode in modes():
            with self.assertRaises(ZeroDivisionError), mode:
                raise ZeroDivisionError
            self.assertEqual(GuardMode.on(), ())
        self.assertEqual(torch._C._len_torch_dispatch_stack(), 0)


class NestedTest(unittest.TestCase):
    def test_each_mode_sees_inside_a_python_op_exactly_once(self):
        seen = []

        class Named(GuardMode):
            def __init__(self, name):
                super().__init__()
                self.name = name

            def handle(self, func, args, kwargs):
                seen.append((self.name, func._schema.name))
                return self.call(func, args, kwargs)

        library = torch.library.Library("graph_guard_dispatch", "DEF")
        self.addCleanup(library._destroy)
        library.define("outer(Tensor x, int n=2) -> Tensor")
        library.define("inner(Tensor x) -> Tensor")
        library.impl(
            "outer", lambda x, n=2: torch.ops.graph_guard_dispatch.inner(x) * n, "CompositeExplicitAutograd"
        )
        library.impl("inner", lambda x: x + 1, "CPU")
        with torch.no_grad(), Named("outer mode"), Named("inner mode"):
            y = torch.ops.graph_guard_dispatch.outer(torch.ones(2))
        self.assertEqual(y.tolist(), [4.0, 4.0])
        names = (
            "aten::ones",
            "graph_guard_dispatch::outer",
            "graph_guard_dispatch::inner",
            "aten::add",
            "aten::mul",
        )
        self.assertEqual(seen, [(mode, name) for name in names for mode in ("inner mode", "outer mode")])
        self.assertEqual(torch._C._len_torch_dispatch_stack(), 0)

    def test_an_error_inside_a_python_op_leaves_no_mode_on(self):
        library = torch.library.Library("graph_guard_dispatch_error", "DEF")
        self.addCleanup(library._destroy)
        library.define("fails(Tensor x) -> Tensor")
        library.impl("fails", lambda x: 1 / 0, "CPU")
        with self.assertRaises(ZeroDivisionError), StreamSafeCapture(device=OneStream()):
            torch.ops.graph_guard_dispatch_error.fails(torch.ones(2))
        self.assertEqual(torch._C._len_torch_dispatch_stack(), 0)


if __name__ == "__main__":
    unittest.main()
