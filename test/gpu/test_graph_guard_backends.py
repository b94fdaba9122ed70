"""Graph guard through upstream's graph backends: memory reuse, dropped joins, refusals, and no extra kernels."""

import os
import tempfile
import unittest
from unittest import mock

import torch
from cuda.bindings import runtime as cudart
from sglang.srt.model_executor.graph_guard import HostReadInCaptureError
from sglang.srt.model_executor.graph_guard.happens_before import DROPPED_WAIT, LIVE, REUSE
from sglang.srt.model_executor.graph_guard.race_detector import detect_graph_races
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import break_graph, eager_on_graph
from sglang.test.ci.ci_register import register_cuda_ci
from support.graph_guard import Overlap, backend

register_cuda_ci(est_time=20, suite="gpu")

KINDS = ("full", "breakable")


class ReuseTest(unittest.TestCase):
    def test_patterns(self):
        for kind in KINDS:
            for pattern in ("a", "b"):
                with self.subTest(kind=kind, pattern=pattern):
                    work = Overlap(pattern)
                    with backend(kind, guard=False) as capture:
                        replay = capture(8, work)
                        self.assertEqual(
                            work.reused, 24, "precondition: the next allocation takes the dropped block"
                        )
                        self.assertEqual(work.wrong_layers(replay, 3), 24)
                    with backend(kind, guard=True) as capture:
                        replay = capture(8, work)
                        self.assertEqual(work.reused, 0)
                        self.assertEqual(work.wrong_layers(replay, 100), 0)

    def test_pattern_across_segments(self):
        for pattern in ("a", "b"):
            work = Overlap(pattern, layers=4)

            def forward(work=work):
                for out in work.outs:
                    getattr(work, f"layer_{work.pattern}")(out)
                    break_graph()
                return work.expected

            for guard, wrong in ((False, 4), (True, 0)):
                with backend("breakable", guard=guard) as capture:
                    replay = capture(8, forward)
                    self.assertEqual(work.wrong_layers(replay, 20), wrong)

    def test_pattern_inside_a_custom_op_written_in_python(self):
        """DeepSeek's dual-stream MoE has this form in breakable graphs."""
        work = Overlap("a")
        library = torch.library.Library("graph_guard_test", "DEF")
        self.addCleanup(library._destroy)
        library.define("overlapped(Tensor(a!) out) -> ()")
        library.impl("overlapped", work.layer_a, "CUDA")

        def forward():
            for out in work.outs:
                torch.ops.graph_guard_test.overlapped(out)
            return work.expected

        for kind in KINDS:
            for guard, wrong in ((False, 24), (True, 0)):
                with torch.no_grad(), backend(kind, guard=guard) as capture:
                    replay = capture(8, forward)
                    self.assertEqual(work.wrong_layers(replay, 20), wrong)

    def test_detector(self):
        for pattern in ("a", "b"):
            work = Overlap(pattern)
            stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with detect_graph_races() as report, torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
            self.assertEqual({r.kind for r in report.races}, {REUSE})
            self.assertEqual(len({r.second.index for r in report.races}), 24)
            race = report.races[0]
            self.assertIn("layer_" + pattern, race.second.info["stack"][0])
            self.assertEqual(race.allocations[0][0], work.expected.nbytes)
        work = Overlap("safe")
        graph = torch.cuda.CUDAGraph()
        with detect_graph_races() as report, torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            work()
        self.assertEqual(report.races, [])
        self.assertGreater(report.engine.operations, 70)

    def test_detector_through_the_backend(self):
        from sglang.srt.model_executor import graph_guard

        for guard, wrong in ((False, 24), (True, 0)):
            graph_guard._race_report = None
            path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "races.json")
            with backend("full", guard=guard, debug_graph_races=path) as capture:
                if wrong:
                    with self.assertLogs("sglang.srt.model_executor.graph_guard", "ERROR"):
                        capture(8, Overlap("a"))
                else:
                    capture(8, Overlap("a"))
            self.assertEqual(len(graph_guard._race_report.races), wrong)
            self.assertTrue(os.path.exists(path))

    def test_both_streams_are_busy_at_once(self):
        work = Overlap("a", layers=4)
        work.x @ work.w
        main_work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

        def forward():
            main = torch.cuda.current_stream()
            work.side.wait_stream(main)
            with torch.cuda.stream(work.side):
                torch.cuda._sleep(2_000_000)
            for _ in range(4):
                main_work @ main_work
            main.wait_stream(work.side)
            return work.expected

        with backend("full") as capture:
            replay = capture(8, forward)
            replay()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                replay()
                torch.cuda.synchronize()
        spans = {}
        for event in profile.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
                spans.setdefault(event.device_resource_id(), []).append(
                    (event.start_ns(), event.start_ns() + event.duration_ns())
                )
        self.assertGreaterEqual(len(spans), 2, "kernels on two streams")
        (a, b), *_ = [(x, y) for x in spans for y in spans if x < y]
        together = sum(max(0, min(e, f) - max(s, t)) for s, e in spans[a] for t, f in spans[b])
        self.assertGreater(together, 0)


class DroppedJoinTest(unittest.TestCase):
    """A graph break leaves work on a side stream, and the next segment needs its result."""

    def forward(self, x, buffer, out, side, fork_again):
        @eager_on_graph
        def leave_work(x, buffer):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                buffer.copy_(x)

        def run():
            y = x + 0
            leave_work(y, buffer)
            main = torch.cuda.current_stream()
            if fork_again:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    out.copy_(buffer)
                main.wait_stream(side)
            else:
                main.wait_stream(side)
                out.copy_(buffer)
            return x

        return run

    def stale(self, guard, fork_again):
        x, buffer, out = (torch.zeros(8, 1024, device="cuda") for _ in range(3))
        side = torch.cuda.Stream()
        with backend("breakable", guard=guard) as capture:
            replay = capture(8, self.forward(x, buffer, out, side, fork_again))
            wrong = 0
            for value in range(1, 6):
                torch.cuda.synchronize()
                x.fill_(value)
                replay()
                wrong += not bool((out == value).all())
            torch.cuda.synchronize()
        return wrong

    def test_a_join_in_the_next_segment(self):
        self.assertEqual(self.stale(guard=False, fork_again=False), 5)
        self.assertEqual(self.stale(guard=True, fork_again=False), 0)

    def test_a_new_fork_of_the_same_side_stream_in_the_next_segment(self):
        self.assertEqual(self.stale(guard=False, fork_again=True), 5)
        self.assertEqual(self.stale(guard=True, fork_again=True), 0)

    def test_detector_names_the_dropped_wait(self):
        from sglang.srt.model_executor import graph_guard

        x, buffer, out = (torch.zeros(8, 1024, device="cuda") for _ in range(3))
        graph_guard._race_report = None
        path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "races.json")
        forward = self.forward(x, buffer, out, torch.cuda.Stream(), False)
        with backend("breakable", guard=False, debug_graph_races=path) as capture:
            capture(8, forward)
        kinds = [r.kind for r in graph_guard._race_report.races]
        self.assertIn(DROPPED_WAIT, kinds)
        self.assertIn(LIVE, kinds)

    def test_detector_knows_the_guards_own_order(self):
        from sglang.srt.model_executor import graph_guard

        for fork_again in (False, True):
            x, buffer, out = (torch.zeros(8, 1024, device="cuda") for _ in range(3))
            graph_guard._race_report = None
            path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "races.json")
            forward = self.forward(x, buffer, out, torch.cuda.Stream(), fork_again)
            with backend("breakable", debug_graph_races=path) as capture:
                capture(8, forward)
            self.assertEqual(graph_guard._race_report.races, [])

    def test_a_break_that_launches_a_graph_of_its_own_keeps_its_overlap(self):
        """Nemotron-H's shared experts do this: external events order the graph, and a later segment joins it."""
        side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        x, out = torch.zeros(8, 1024, device="cuda"), torch.zeros(8, 1024, device="cuda")

        class Call:
            def __init__(self):
                self.ready, self.done = torch.cuda.Event(external=True), torch.cuda.Event(external=True)
                self.graph = None

        def work(call):
            call.ready.wait()
            out.copy_(x + 1)
            call.done.record()

        def record(call):
            call.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(call.graph, pool=pool, stream=side):
                work(call)

        @eager_on_graph(capture_stub=record)
        def launch(call):
            with torch.cuda.stream(side):
                work(call) if call.graph is None else call.graph.replay()

        def forward():
            y = x * 2
            for _ in range(3):
                call = Call()
                call.ready.record()
                launch(call)
                y = y + 1
                call.done.wait()
            return out + y

        with backend("breakable") as capture:
            replay = capture(8, forward)
            (graph,) = capture.backend._graphs.values()
            self.assertEqual(len(graph._break_fns), 3)
            self.assertNotIn("_graph_guard_ordered", vars(graph))
            for value in (1.0, 2.0):
                x.fill_(value)
                self.assertEqual(replay()[0, 0].item(), value + 1 + 2 * value + 3)


class CaptureTest(unittest.TestCase):
    def test_a_validation_hook_is_refused_by_name_and_the_next_capture_works(self):
        x = torch.ones(8, 8, device="cuda")

        def check_finite(y):
            if y.isnan().any().item():
                raise ValueError

        def forward():
            y = x * 2
            check_finite(y)
            return y

        for kind in KINDS:
            with (
                backend(kind) as capture,
                self.assertRaisesRegex(HostReadInCaptureError, r"check_finite.*Tensor\.item"),
            ):
                capture(8, forward)
            with backend(kind) as capture:
                replay = capture(8, lambda: x * 3)
                self.assertEqual(replay()[0, 0].item(), 3.0)

    def nodes(self, forward, guard):
        """The number of nodes in the graph that the full backend captures."""
        plain = torch.cuda.CUDAGraph

        def kept():
            return plain(keep_graph=True)

        with mock.patch.object(torch.cuda, "CUDAGraph", kept), backend("full", guard=guard) as capture:
            capture(8, forward)
            (graph,) = capture.backend._graphs.values()
            error, _, count = cudart.cudaGraphGetNodes(graph.raw_cuda_graph(), 0)
            self.assertEqual(int(error), 0)
            return count

    def test_not_one_extra_kernel(self):
        counts = {guard: self.nodes(Overlap("safe"), guard) for guard in (False, True)}
        self.assertGreater(counts[False], 70)
        self.assertEqual(counts[True], counts[False])

    @torch.no_grad()
    def test_a_compiled_region_stays_compiled(self):
        def eager(x):
            return torch.sigmoid(x) * x + torch.tanh(x)

        compiled = torch.compile(eager, dynamic=False)
        x = torch.randn(64, 64, device="cuda")
        self.assertEqual(self.nodes(lambda: compiled(x), guard=True), 1)
        self.assertEqual(self.nodes(lambda: compiled(x), guard=False), 1)
        self.assertEqual(self.nodes(lambda: eager(x), guard=True), 4)

    def test_compiled_region(self):
        """Its allocations bypass the dispatcher. Its result is recorded at the next use."""

        @torch.compile(dynamic=False)
        def gate(x):
            return torch.sigmoid(x) * x

        x = torch.randn(64, 64, device="cuda")
        side = torch.cuda.Stream()
        out = torch.zeros_like(x)

        def forward():
            main = torch.cuda.current_stream()
            y = gate(x)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                out.copy_(y)
            del y
            z = torch.zeros_like(x)
            main.wait_stream(side)
            return z

        with torch.no_grad(), backend("full") as capture:
            replay = capture(8, forward)
            for value in (1.0, 2.0):
                x.fill_(value)
                replay()
                torch.testing.assert_close(out, torch.sigmoid(x) * x)


if __name__ == "__main__":
    unittest.main()
