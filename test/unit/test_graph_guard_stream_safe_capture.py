"""Stream-safe capture, with fake streams on the CPU."""

import unittest
from unittest import mock

import torch
from sglang.srt.model_executor.graph_guard import stream_safe_capture
from sglang.srt.model_executor.graph_guard.host_reads import HostReadInCaptureError
from sglang.srt.model_executor.graph_guard.stream_safe_capture import CudaStreams, StreamSafeCapture
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")


class FakeStreams(CudaStreams):
    """Streams are strings, and CPU tensors count as CUDA tensors unless they are in ``host``."""

    def __init__(self):
        self.stream = "main"
        self.in_capture = {"main"}
        self.host = set()  # data addresses of tensors in host memory
        self.recorded = []

    def current(self):
        return self.stream

    def capturing(self, stream=None):
        return (stream or self.stream) in self.in_capture

    def owns(self, tensor):
        return tensor.data_ptr() not in self.host

    def record(self, tensor, stream):
        self.recorded.append((tensor.untyped_storage().data_ptr(), stream))


class FakeEvent:
    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass


class StreamSafeCaptureTest(unittest.TestCase):
    def setUp(self):
        self.device = FakeStreams()
        patch = mock.patch.object(torch.cuda, "Event", FakeEvent)
        patch.start()
        self.addCleanup(patch.stop)

    def capture(self, **kwargs):
        return StreamSafeCapture(device=self.device, **kwargs)

    def join(self, stream, source="main"):
        event = torch.cuda.Event()
        event.record(source)
        self.device.in_capture.add(stream)
        event.wait(stream)

    def streams_of(self, tensor):
        return {s for address, s in self.device.recorded if address == tensor.untyped_storage().data_ptr()}

    def test_later_storages_are_recorded_on_all_streams(self):
        with self.capture():
            self.join("side")
            y = torch.ones(4) + 1
        self.assertEqual(self.streams_of(y), {"main", "side"})

    def test_live_storages_are_recorded_on_a_stream_that_joins_late(self):
        with self.capture() as capture:
            x = torch.ones(4)
            dead = torch.zeros(1 << 12)
            dead_address = dead.data_ptr()
            del dead
            self.assertEqual(self.streams_of(x), set())  # with a single stream there is nothing to record
            self.join("side")
            self.assertEqual(capture.streams, ("main", "side"))
        self.assertEqual(self.streams_of(x), {"main", "side"})
        self.assertNotIn((dead_address, "side"), self.device.recorded)

    def test_views_are_not_recorded_again(self):
        with self.capture():
            x = torch.ones(8)
            before = len(self.device.recorded)
            x[2:].view(2, 3).t()
        self.assertEqual(len(self.device.recorded), before)

    def test_a_resized_storage_has_a_new_block(self):
        with self.capture():
            self.join("side")
            x = torch.ones(4)
            before = x.data_ptr()
            x.resize_(1 << 16)
            self.assertNotEqual(x.data_ptr(), before)
        self.assertEqual(self.streams_of(x), {"main", "side"})

    def test_storage_first_seen_as_an_operand(self):
        """The result of a compiled region first shows up this way."""
        x = torch.ones(4)
        with self.capture():
            self.join("side")
            x.add_(1)
        self.assertEqual(self.streams_of(x), {"main", "side"})

    def test_streams_leave_at_the_end_of_a_segment(self):
        segment = 0
        with self.capture(segment=lambda: segment) as capture:
            self.join("side")
            torch.ones(4)
            segment = 1
            self.device.in_capture = {"main"}
            y = torch.ones(4)
            self.assertEqual(capture.streams, ("main",))
        self.assertEqual(self.streams_of(y), set())

    def test_eager_work_in_a_break_is_left_alone(self):
        with self.capture():
            self.device.in_capture = set()
            x = torch.ones(4)
            self.assertEqual(x[0].item(), 1.0)
        self.assertEqual(self.device.recorded, [])

    def test_a_break_that_leaves_a_fork_open(self):
        forks, segment = [], 0
        with self.capture(segment=lambda: segment, on_open_fork=forks.append):
            torch.ones(1)
            self.device.in_capture = set()
            for stream, source in (
                ("joined", "main"),
                ("open", "main"),
                ("nested", "open"),
                ("main", "joined"),
            ):
                event = torch.cuda.Event()
                event.record(source)
                event.wait(stream)
            segment = 1
            self.device.in_capture = {"main"}
            torch.ones(1)
            self.assertEqual(forks, ["open", "nested"])
            torch.ones(1)
        self.assertEqual(forks, ["open", "nested"])

    def test_a_break_that_captures_a_graph_of_its_own(self):
        """Nemotron-H's shared experts do this. External events order that graph, and a wait would end its overlap."""
        forks, segment = [], 0
        with self.capture(segment=lambda: segment, on_open_fork=forks.append):
            event = torch.cuda.Event()
            event.record("main")
            self.device.in_capture, self.device.stream = {"shared"}, "shared"
            event.wait("shared")
            torch.ones(1)
            self.device.in_capture, self.device.stream = {"main"}, "main"
            segment = 1
            torch.ones(1)
        self.assertEqual(forks, [])

    def test_event_methods_are_restored(self):
        record, wait = FakeEvent.record, FakeEvent.wait
        with self.assertRaises(ZeroDivisionError), self.capture():
            raise ZeroDivisionError
        self.assertIs(FakeEvent.record, record)
        self.assertIs(FakeEvent.wait, wait)

    def test_a_validation_hook_that_reads_a_value_is_named(self):
        def check_finite(module, args, out):
            if out.isnan().any().item():
                raise ValueError

        layer = torch.nn.Linear(2, 2)
        layer.register_forward_hook(check_finite)
        with torch.no_grad(), self.capture(), self.assertRaises(HostReadInCaptureError) as refusal:
            layer(torch.ones(1, 2))
        text = str(refusal.exception)
        self.assertIn("check_finite", text)
        self.assertIn(f"{__file__}:", text)
        self.assertIn("Tensor.item()", text)

    def test_other_host_reads(self):
        x, host = torch.ones(3), torch.zeros(3)
        self.device.host.add(host.data_ptr())
        reads = {
            "a scalar": lambda: bool(x[0] > 0),
            "Tensor.nonzero": lambda: x.nonzero(),
            "indexing with a mask": lambda: x[x > 0],
            "masked_select": lambda: x.masked_select(x > 0),
            "torch.equal": lambda: torch.equal(x, x),
            "torch.allclose": lambda: torch.allclose(x, x),
            r"torch.unique\(": lambda: x.unique(),
            "torch.unique_consecutive": lambda: x.unique_consecutive(),
            "a blocking copy": lambda: x.to("cpu", copy=True),
            r"test_other_host_reads.*a blocking copy": lambda: host.copy_(x),
        }
        for text, read in reads.items():
            with self.capture(), self.assertRaisesRegex(HostReadInCaptureError, text):
                read()

    def test_operations_that_read_no_value_are_not_refused(self):
        x, host = torch.ones(3), torch.zeros(3)
        self.device.host.add(host.data_ptr())
        with self.capture():
            x.to("cpu", copy=True, non_blocking=True)  # an asynchronous copy to the host can be captured
            host.copy_(x, non_blocking=True)
            x.copy_(host)
            x[:0].to("cpu", copy=True)
            x[torch.tensor([0, 2])]
            x[x > 0] = 1.0  # a masked fill
            x.to(torch.float64)

    def test_operations_inside_a_custom_op_written_in_python_are_seen(self):
        seen = []

        def overlapped(x):
            self.join("side")
            temporary = x + 1
            seen.append(temporary)
            return temporary * 2

        library = torch.library.Library("graph_guard_stream_safe_capture", "DEF")
        self.addCleanup(library._destroy)
        library.define("overlapped(Tensor x) -> Tensor")
        library.impl("overlapped", overlapped, "CPU")
        with self.capture() as capture:
            x = torch.ones(4)
            y = torch.ops.graph_guard_stream_safe_capture.overlapped(x)
            self.assertEqual(capture.streams, ("main", "side"))
        for tensor in (x, seen[0], y):
            self.assertEqual(self.streams_of(tensor), {"main", "side"})
        self.assertEqual(y.tolist(), [4.0] * 4)


class ReuseFlagTest(unittest.TestCase):
    def setUp(self):
        stream_safe_capture.enable_record_stream_reuse.cache_clear()
        self.addCleanup(stream_safe_capture.enable_record_stream_reuse.cache_clear)

    def settle(self, environment, effect=None):
        with (
            mock.patch.dict("os.environ", environment, clear=True),
            mock.patch.object(stream_safe_capture, "_set_allocator_settings", side_effect=effect) as settings,
        ):
            return stream_safe_capture.enable_record_stream_reuse(), settings

    def test_allocator_settings_of_the_environment_are_kept(self):
        on, settings = self.settle({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
        self.assertTrue(on)
        settings.assert_called_once_with("expandable_segments:True,graph_capture_record_stream_reuse:True")

    def test_a_torch_without_the_setting_is_logged(self):
        with self.assertLogs(stream_safe_capture.logger, "WARNING") as log:
            on, _ = self.settle({}, RuntimeError("Unrecognized key"))
        self.assertFalse(on)
        self.assertIn("graph_capture_record_stream_reuse", log.output[0])

    def test_switched_off_by_the_environment(self):
        with self.assertLogs(stream_safe_capture.logger, "WARNING"):
            on, settings = self.settle({"PYTORCH_ALLOC_CONF": "graph_capture_record_stream_reuse:False"})
        self.assertFalse(on)
        settings.assert_not_called()


if __name__ == "__main__":
    unittest.main()
