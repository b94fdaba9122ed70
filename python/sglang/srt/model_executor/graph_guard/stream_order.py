"""Stream-safe capture: a block of the graph pool is reused only after every stream has finished with it.

The caching allocator keeps one free list per stream. It frees a block when the last Python reference drops, even if
other streams still have work queued on it. Eager code often gets away with that. A captured graph repeats the mistake
at every replay.

Stream-safe capture therefore calls ``Tensor.record_stream`` for every storage of a capture, on every stream of that
capture. With the allocator setting ``graph_capture_record_stream_reuse``, a recorded block becomes free once all those
streams have passed the point where it was dropped. Without the setting it becomes free when the capture ends.

A storage is recorded because it exists, not because an operation uses it. Kernels that bypass the dispatcher (Triton,
DeepGEMM, JIT) are therefore covered as well. What this rule can't repair is a missing wait between two uses of live
memory. ``order_after_break`` and ``order_dropped_join`` add such waits for the breakable backend, and
``separate_flashinfer_workspaces`` keeps two streams from sharing scratch memory.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from torch._ops import OpOverload

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
    """The host tried to read a CUDA tensor during a capture."""


class CudaStreams:
    """The CUDA calls that stream-safe capture makes. CPU tests replace them."""

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
    """Let the allocator reuse recorded blocks within a capture. Takes effect once per process.

    Returns:
        Whether the setting is on. Without it captures are just as safe, but their graphs hold more memory. The log
        says so.
    Source:
        PyTorch pull requests 158352 and 162186.
    """
    # The allocator resets every setting that a call leaves out, so pass the settings of the environment again.
    present = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if f"{REUSE_SETTING}:False" in present:
        logger.warning(
            "Graph guard: the environment turns %s off, so graphs hold more memory.", REUSE_SETTING
        )
        return False
    try:
        _set_allocator_settings(",".join(filter(None, (present, f"{REUSE_SETTING}:True"))))
    except (AttributeError, RuntimeError, ValueError) as e:
        logger.warning(
            "Graph guard: torch %s does not support %s (%s). Blocks shared by streams are reused only after the "
            "capture ends, so graphs hold more memory.",
            torch.__version__,
            REUSE_SETTING,
            e,
        )
        return False
    return True


def caller_site(skip: tuple[str, ...] = ()) -> str:
    """``function (file:line)`` of the innermost frame outside torch, this package and ``skip``, or ""."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__), *skip)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(inside):
            return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


@functools.cache
def _plan_of(func: OpOverload) -> tuple[bool, str | None, Callable | None]:
    """How a capture treats ``func``.

    Returns:
        (whether it only makes a view, what it always reads on the host, the function that decides this from its
        arguments).
    """
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


def refuse_host_read(func: OpOverload, args: tuple, kwargs: dict, device: CudaStreams) -> None:
    """Raise if ``func`` would make the host wait for the value of a CUDA tensor.

    Raises:
        HostReadInCaptureError: names the calling function. CUDA would only report cudaErrorStreamCaptureInvalidated.
    """
    _, what, by_arguments = _plan_of(func)
    if args[0].numel() == 0:
        return  # an empty tensor has no value to wait for
    if by_arguments is not None:
        what = by_arguments(args, kwargs, device.owns)
    elif not device.owns(args[0]):
        return
    if what is None:
        return
    raise HostReadInCaptureError(
        f"{caller_site()} reads {what} on the host during CUDA graph capture. No values exist during a capture. "
        "Read it after a replay, or skip it while torch.cuda.is_current_stream_capturing()."
    )


class StreamSafeCapture(GuardMode):
    """Record every storage of a capture on every stream of that capture.

    Enter it inside the capture, on the capture's stream. A stream joins the capture when it waits for an event of the
    capture. All storages that are still alive are then recorded on it. Eager work in a graph break is left alone,
    except that ``on_open_fork`` is called.

    Args:
        segment: returns the number of the open segment, or of the last one during a break. When it changes, the streams
            of the previous segment have left the capture.
        on_open_fork: called with each stream that an eager break forked off the capture's stream and did not join.
        device: replaces CUDA in tests.
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
        # StorageImpl -> data address. A weak reference keeps each StorageImpl from being reused for another storage.
        self._live: dict[int, int] = {}
        self._open_forks: dict[torch.cuda.Stream, None] = {}
        self._thread = threading.get_ident()
        self._observers = ExitStack()

    def __enter__(self) -> StreamSafeCapture:
        self._main = self._device.current()
        self._streams = [self._main]
        self._entered = self._segment() if self._segment else 0
        self._observers.enter_context(observe_events(self._after_record, self._after_wait))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self._observers.close()
            self._close_break()
            self._forget_storages()

    # Hot path: runs for every operation of a capture and makes up the whole cost of the guard.
    def handle(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
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
        # Track operands too. The result of a compiled region first shows up as an operand of the next operation.
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
        """The streams of the open segment. The capture's own stream comes first."""
        return tuple(self._streams)

    def _track_all(self, values: Iterable[Any]) -> None:
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
        self._live[key] = address  # a resize moves a storage to a new block, which must be recorded too
        if len(self._streams) > 1:
            for stream in self._streams:
                self._device.record(tensor, stream)

    def _join(self, stream: torch.cuda.Stream) -> None:
        """Record all live storages on ``stream``, and on the capture's own stream if this is the first to join."""
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
        # Kept on the event, not in a weak dictionary: torch 2.11 frees events without clearing weak references.
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
                return  # the break captures a separate graph and orders it with its own events
        source: Any = getattr(event, "_graph_guard_source", None)
        if stream == self._main:
            self._open_forks.pop(source, None)
        elif source == self._main or source in self._open_forks:
            self._open_forks[stream] = None


@contextmanager
def observe_events(on_record: Callable, on_wait: Callable) -> Iterator[None]:
    """Call ``on_record`` after each torch.cuda.Event.record and ``on_wait`` after each wait, with (event, stream).

    ``Stream.wait_stream`` and ``Stream.wait_event`` call these methods, so replacements of those still work.
    """
    event_class: Any = torch.cuda.Event
    record, wait = event_class.record, event_class.wait

    def observed_record(self: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        record(self, stream)
        on_record(self, stream)

    def observed_wait(self: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        wait(self, stream)
        on_wait(self, stream)

    event_class.record, event_class.wait = observed_record, observed_wait
    try:
        yield
    finally:
        event_class.record, event_class.wait = record, wait


def order_after_break(
    graph: Any, stream: torch.cuda.Stream, current_stream: Callable = torch.cuda.current_stream
) -> None:
    """Make the segment under capture start after the work that the preceding eager break left on ``stream``.

    Captured work can't wait for eager work. Each replay therefore waits between the break and the segment.

    Args:
        graph: a BreakableCUDAGraph that is being captured.
        stream: the side stream that the break did not join.
        current_stream: returns the stream that launches a replay.
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

        def run_break_then_join() -> Any:
            output = run_break()
            join()
            return output

        breaks[-1] = run_break_then_join
        return

    # The first segment has no break before it. The work was queued before the replay, so the replay waits first.
    replay = graph.replay

    def join_then_replay() -> None:
        join()
        replay()

    graph.replay = join_then_replay


def order_dropped_join(capture: Any, stream: torch.cuda.Stream) -> None:
    """Preserve a join that a breakable capture drops because ``stream`` is not part of the capture.

    Args:
        capture: the open BreakableCUDAGraphCapture, or None.
        stream: the stream that the join should have waited for.
    """
    if capture is not None and enabled():
        order_after_break(capture.cuda_graph, stream)


@contextmanager
def keep_expert_inputs(model: torch.nn.Module | None) -> Iterator[int]:
    """Give routed experts their own output where a shared expert may read their input on another stream.

    DeepSeek's dual-stream MoE runs the routed experts and the shared expert on two streams, from the same hidden
    states. The Triton path of the routed experts writes its result over those hidden states, and nothing orders that
    write after the shared expert's read. Only captured forwards use two streams, so eager ones keep writing in place.

    Returns:
        The number of layers changed for the block.
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
    """Make later work of ``allocating`` start after the work that ``reading`` has queued so far.

    Needed for a tensor that was allocated on ``allocating`` and is dropped after its last read on ``reading``: the next
    allocation on ``allocating`` may reuse its memory.
    """
    if enabled():
        allocating.wait_stream(reading)


def separate_flashinfer_workspaces() -> bool:
    """Give each stream its own FlashInfer scratch buffers. FlashInfer caches them by name and device only.

    Two NVFP4 GEMMs on two streams would otherwise share the scratch of ``mm_fp4``. This also replaces the function in
    modules that imported it by name.

    Returns:
        Whether FlashInfer is loaded. If so, its buffers are per stream from now on.
    Source:
        flashinfer.utils._get_cache_buf.
    """
    utils: Any = sys.modules.get("flashinfer.utils")
    shared: Any = getattr(utils, "_get_cache_buf", None)
    if shared is None:
        return False
    if hasattr(shared, "_graph_guard_shared"):
        shared = shared._graph_guard_shared

    @functools.wraps(shared)
    def per_stream(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        return shared(f"{name}@{torch.cuda.current_stream().cuda_stream:#x}", *args, **kwargs)

    vars(per_stream)["_graph_guard_shared"] = shared
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".", 1)[0] == "flashinfer":
            if getattr(module, "_get_cache_buf", None) is shared:
                vars(module)["_get_cache_buf"] = per_stream
    return True


def enabled() -> bool:
    """Whether the guard is on. It is, unless ``SGLANG_GRAPH_GUARD`` is 0 or false."""
    return os.environ.get("SGLANG_GRAPH_GUARD", "1").lower() not in ("0", "false")
