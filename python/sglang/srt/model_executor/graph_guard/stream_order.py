"""Stream-safe capture: no block of the graph pool returns to its free list before every stream is done with it.

The caching allocator keys its free lists by stream and frees a block when the last Python reference drops, whatever
other streams still have queued on it. Eager code gets away with that often, a captured graph repeats it at every
replay. Here every storage that appears in a capture is recorded (``Tensor.record_stream``) on every stream of that
capture. With the allocator's ``graph_capture_record_stream_reuse`` a block then returns once its free is ordered after
the work of all those streams, which is the rule that a graph needs; without it the block waits for the capture's end.

The rule keys on creation, not on use, so it covers kernels that the dispatcher never sees (Triton, DeepGEMM, JIT).
It can't help where an order is missing between two live uses: ``order_after_break`` and ``order_dropped_join`` do that
for the breakable backend, ``separate_flashinfer_workspaces`` for scratch that two streams would share.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode

logger = logging.getLogger(__name__)

REUSE_SETTING = "graph_capture_record_stream_reuse"

_LENGTH = "the length of a data-dependent result"
_HOST_READS = {
    "aten::_local_scalar_dense": "a scalar of a CUDA tensor (Tensor.item(), bool(), int(), float())",
    "aten::equal": "whether two CUDA tensors are equal (torch.equal())",
    "aten::allclose": "whether two CUDA tensors are close (torch.allclose())",
    "aten::nonzero": f"{_LENGTH} (Tensor.nonzero())",
    "aten::masked_select": f"{_LENGTH} (torch.masked_select())",
    "aten::_unique2": f"{_LENGTH} (torch.unique())",
    "aten::unique_dim": f"{_LENGTH} (torch.unique())",
    "aten::unique_consecutive": f"{_LENGTH} (torch.unique_consecutive())",
    "aten::bincount": f"{_LENGTH} (torch.bincount())",
}
_COPY = "a CUDA tensor (a blocking copy to the CPU)"


class HostReadInCaptureError(RuntimeError):
    """A CUDA tensor was read on the host in the middle of a capture."""


class CudaStreams:
    """What stream-safe capture asks of CUDA; the CPU tests pass a stand-in."""

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def capturing(self, stream: torch.cuda.Stream | None = None) -> bool:
        if stream is None:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def record(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)


def _set_allocator_settings(text: str) -> None:
    accelerator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (accelerator or torch.cuda.memory._set_allocator_settings)(text)


@functools.cache
def enable_record_stream_reuse() -> bool:
    """Turn on the allocator's reuse of recorded blocks inside a capture, once a process.

    Returns:
        Whether it is on. Without it stream-safe capture is as safe and its graphs hold more memory, which the log says.
    Source:
        PyTorch pull requests 158352 and 162186.
    """
    # The parser resets what a call doesn't name, so what the environment asked for is passed again.
    present = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if f"{REUSE_SETTING}:False" in present:
        logger.warning(
            "Graph guard: %s is off by the environment; graphs will hold more memory.", REUSE_SETTING
        )
        return False
    try:
        _set_allocator_settings(",".join(filter(None, (present, f"{REUSE_SETTING}:True"))))
    except (AttributeError, RuntimeError, ValueError) as e:
        logger.warning(
            "Graph guard: torch %s has no %s (%s); blocks shared by streams stay reserved until a capture ends.",
            torch.__version__,
            REUSE_SETTING,
            e,
        )
        return False
    return True


def caller_site(skip: tuple[str, ...] = ()) -> str:
    """``function (file:line)`` of the innermost frame outside torch and this package; "" when there is none."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__), *skip)
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(inside):
            return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


@functools.cache
def _plan_of(func) -> tuple[bool, str | None, Callable | None]:
    """(whether ``func`` only makes views, what it reads on the host, what tells that from its arguments)."""
    name = func._schema.name
    return func.is_view, _HOST_READS.get(name), _READS_BY_ARGUMENTS.get(name)


def _read_by_conversion(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    return _COPY if to_host and owns(args[0]) and not kwargs.get("non_blocking") else None


def _read_by_copy(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    to, source, *rest = args
    waits = not (kwargs.get("non_blocking") or any(rest))
    return _COPY if waits and owns(source) and not owns(to) else None


def _read_by_index(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    masks = (torch.bool, torch.uint8)
    if any(i is not None and i.dtype in masks and owns(i) for i in args[1]):
        return f"{_LENGTH} (indexing with a mask)"
    return None


_READS_BY_ARGUMENTS = {
    "aten::_to_copy": _read_by_conversion,
    "aten::copy_": _read_by_copy,
    "aten::index": _read_by_index,
}


def refuse_host_read(func, args: tuple, kwargs: dict, device: CudaStreams) -> None:
    """Raise when ``func`` would make the host wait for a CUDA tensor's value.

    Raises:
        HostReadInCaptureError: naming the function that asked, in place of cudaErrorStreamCaptureInvalidated.
    """
    _, what, by_arguments = _plan_of(func)
    if args[0].numel() == 0:
        return  # nothing is read
    if by_arguments is not None:
        what = by_arguments(args, kwargs, device.owns)
    elif not device.owns(args[0]):
        return
    if what is None:
        return
    raise HostReadInCaptureError(
        f"{caller_site()} reads {what} on the host during CUDA graph capture. A graph that is being captured has no "
        "values yet: do it after a replay, or skip it while torch.cuda.is_current_stream_capturing()."
    )


class StreamSafeCapture(GuardMode):
    """Record every storage that appears in a capture on every stream of that capture.

    Enter it inside the capture, on the capture's stream. Streams are learned as they join, that is when they wait for
    an event of the capture; a stream that joins late is recorded on all storages still alive. Eager work in between
    (a graph break) passes untouched, apart from ``on_open_fork``.

    Args:
        segment: number of the captured segment now open, or last open during a break; when it changes, the streams of
            the last one have left.
        on_open_fork: called with a stream that an eager break forked off the capture's stream and did not join again.
        device: stands in for CUDA in tests.
    """

    def __init__(
        self,
        segment: Callable[[], int] | None = None,
        on_open_fork: Callable[[torch.cuda.Stream], None] | None = None,
        device: CudaStreams | None = None,
    ) -> None:
        super().__init__()
        self._segment = segment
        self._on_open_fork = on_open_fork
        self._device = device or CudaStreams()
        self._streams: list[torch.cuda.Stream] = []
        # Address of each storage seen; a weak reference holds it, so that the key stays its own.
        self._live: dict[int, int] = {}
        self._open_forks: dict[torch.cuda.Stream, None] = {}
        self._thread = threading.get_ident()
        self._patches = None

    def __enter__(self) -> StreamSafeCapture:
        self._main = self._device.current()
        self._streams = [self._main]
        self._entered = self._segment() if self._segment else 0
        self._patches = observe_events(self._after_record, self._after_wait)
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self._patches.__exit__(None, None, None)
            self._close_break()
            self._forget_storages()

    # This runs for every operation of a capture; what it costs is the guard's whole cost.
    def handle(self, func, args: tuple, kwargs: dict):
        device = self._device
        if not device.capturing():
            return self.call(func, args, kwargs)
        view, host_read, by_arguments = _plan_of(func)
        if view:
            return self.call(func, args, kwargs)
        if host_read or by_arguments:
            refuse_host_read(func, args, kwargs, device)
        if self._segment is not None:
            self._follow_segment()
        out = self.call(func, args, kwargs)
        # Operands too: what a compiled region allocated is first seen as the operand of the next operation.
        self._track_all(args)
        if kwargs:
            self._track_all(kwargs.values())
        if isinstance(out, torch.Tensor):
            self._track(out)
        elif isinstance(out, list | tuple):
            self._track_all(out)
        return out

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Streams of the open segment, the capture's own first."""
        return tuple(self._streams)

    def _track_all(self, values) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._track(value)
            elif isinstance(value, list | tuple):
                self._track_all(value)

    def _track(self, tensor: torch.Tensor) -> None:
        if not self._device.owns(tensor):
            return
        storage = tensor.untyped_storage()
        key, address = storage._cdata, storage.data_ptr()
        seen = self._live.get(key)
        if seen == address or address == 0:
            return
        if seen is None:
            storage._weak_ref()
        self._live[key] = address  # another one after a resize: that block is new
        if len(self._streams) > 1:
            for stream in self._streams:
                self._device.record(tensor, stream)

    def _join(self, stream: torch.cuda.Stream) -> None:
        """Record all storages alive on ``stream`` and, when it is the first to join, on the capture's own."""
        joined = [*self._streams, stream] if len(self._streams) == 1 else [stream]
        self._streams.append(stream)
        for key in list(self._live):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                del self._live[key]
                torch.UntypedStorage._free_weak_ref(key)
                continue
            handle = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for s in joined:
                self._device.record(handle, s)

    def _forget_storages(self) -> None:
        for key in self._live:
            torch.UntypedStorage._free_weak_ref(key)
        self._live.clear()

    def _follow_segment(self) -> None:
        if self._segment is not None and (segment := self._segment()) != self._entered:
            self._entered = segment
            self._streams = [self._main]
            self._close_break()

    def _close_break(self) -> None:
        for stream in self._open_forks:
            if self._on_open_fork is not None:
                self._on_open_fork(stream)
        self._open_forks.clear()

    def _after_record(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        # On the event itself: torch 2.11 frees an event without clearing its weak references.
        if threading.get_ident() == self._thread:
            event._graph_guard_source = stream or self._device.current()

    def _after_wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        if threading.get_ident() != self._thread:
            return
        stream = stream or self._device.current()
        with torch.utils._python_dispatch._disable_current_modes():
            if self._device.capturing(self._main):
                self._follow_segment()
                if stream not in self._streams and self._device.capturing(stream):
                    self._join(stream)
                return
            if self._device.capturing(stream):
                return  # a break captures a graph of its own, which is ordered by events of its own
        source = getattr(event, "_graph_guard_source", None)
        if stream == self._main:
            self._open_forks.pop(source, None)
        elif source == self._main or source in self._open_forks:
            self._open_forks[stream] = None


@contextmanager
def observe_events(on_record: Callable, on_wait: Callable) -> Iterator[None]:
    """Call ``on_record(event, stream)`` and ``on_wait(event, stream)`` after each such call of torch.cuda.Event.

    ``Stream.wait_stream`` and ``Stream.wait_event`` end there, so this chains with whoever replaced those.
    """
    event_class = torch.cuda.Event
    record, wait = event_class.record, event_class.wait

    def observed_record(self, stream=None):
        record(self, stream)
        on_record(self, stream)

    def observed_wait(self, stream=None):
        wait(self, stream)
        on_wait(self, stream)

    event_class.record, event_class.wait = observed_record, observed_wait
    try:
        yield
    finally:
        event_class.record, event_class.wait = record, wait


def order_after_break(
    graph, stream: torch.cuda.Stream, current_stream: Callable = torch.cuda.current_stream
) -> None:
    """Let the segment that is being captured start after ``stream``'s work of the eager break before it.

    Captured work can't wait for eager work, so the wait is made between the break and the segment, at every replay.

    Args:
        graph: a BreakableCUDAGraph in the middle of its capture.
        stream: the side stream that the break left unjoined.
        current_stream: the stream on which a replay is launched.
    """
    ordered = graph.__dict__.setdefault("_graph_guard_ordered", set())
    breaks = graph._break_fns
    place = (len(breaks), stream)
    if place in ordered:
        return
    ordered.add(place)
    for mode in GuardMode.on():
        mode.capture_follows(stream)

    def join() -> None:
        current_stream().wait_stream(stream)

    if breaks:
        run_break = breaks[-1]

        def run_break_then_join():
            output = run_break()
            join()
            return output

        breaks[-1] = run_break_then_join
        return

    # No break precedes the first segment: the work was queued before the replay.
    replay = graph.replay

    def join_then_replay() -> None:
        join()
        replay()

    graph.replay = join_then_replay


def order_dropped_join(capture, stream: torch.cuda.Stream) -> None:
    """Keep the order of a join that the breakable capture drops because ``stream`` isn't part of it.

    Args:
        capture: the BreakableCUDAGraphCapture that is open, or None.
        stream: the stream that should have been waited for.
    """
    if capture is not None and enabled():
        order_after_break(capture.cuda_graph, stream)


@contextmanager
def keep_expert_inputs(model: torch.nn.Module | None) -> Iterator[int]:
    """Let routed experts write to memory of their own where a shared expert may read their input on another stream.

    DeepSeek's dual-stream MoE forks before the routed experts and issues the shared expert after them, both on the
    same hidden states, while the routed experts' Triton path writes its result over them. Only captured forwards do
    so, so eager ones keep writing in place.

    Returns:
        How many layers are changed for the block.
    Source:
        sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward_normal_dual_stream, 0.5.23.
    """
    changed = []
    for module in model.modules() if model is not None else ():
        config = getattr(getattr(module, "experts", None), "moe_runner_config", None)
        if getattr(module, "alt_stream", None) is not None and config is not None and config.inplace:
            config.inplace = False
            changed.append(config)
    try:
        yield len(changed)
    finally:
        for config in changed:
            config.inplace = True


def order_after_reads(allocating: torch.cuda.Stream, reading: torch.cuda.Stream) -> None:
    """Let what ``allocating`` queues next start after what ``reading`` has queued so far.

    For a tensor allocated on ``allocating`` and dropped after its last read on ``reading``: the next allocation on
    ``allocating`` may take its memory.
    """
    if enabled():
        allocating.wait_stream(reading)


def separate_flashinfer_workspaces() -> bool:
    """Give each stream its own copy of FlashInfer's cached scratch, which is keyed by name and device alone.

    Two NVFP4 GEMMs on two streams would otherwise share ``mm_fp4``'s scratch. Modules that imported the function by
    name are changed too.

    Returns:
        Whether FlashInfer is loaded and now does so.
    Source:
        flashinfer.utils._get_cache_buf.
    """
    utils = sys.modules.get("flashinfer.utils")
    shared = getattr(utils, "_get_cache_buf", None)
    if shared is None:
        return False
    if hasattr(shared, "_graph_guard_shared"):
        shared = shared._graph_guard_shared

    @functools.wraps(shared)
    def per_stream(name, *args, **kwargs):
        return shared(f"{name}@{torch.cuda.current_stream().cuda_stream:#x}", *args, **kwargs)

    per_stream._graph_guard_shared = shared
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".", 1)[0] == "flashinfer":
            if getattr(module, "_get_cache_buf", None) is shared:
                module._get_cache_buf = per_stream
    return True


def enabled() -> bool:
    """Whether stream-safe capture is on: ``SGLANG_GRAPH_GUARD``, on unless it is 0."""
    return os.environ.get("SGLANG_GRAPH_GUARD", "1").lower() not in ("0", "false")
