"""Stream-safe capture: a block of the graph pool is reused only after every stream has finished with it.

The caching allocator keeps one free list per stream. It frees a block when the last Python reference drops, even if
other streams still have work queued on it. Eager code often gets away with that. A captured graph repeats the mistake
at every replay.

Stream-safe capture therefore calls ``Tensor.record_stream`` for every storage of a capture, on every stream of that
capture. With the allocator setting ``graph_capture_record_stream_reuse``, a recorded block becomes free once all those
streams have passed the point where it was dropped. Without the setting it becomes free when the capture ends.

A storage is recorded because it exists, not because an operation uses it. Kernels that bypass the dispatcher (Triton,
DeepGEMM, JIT) are therefore covered as well. What this rule can't repair is a missing wait between two uses of live
memory. ``stream_order`` repairs the known ones.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from sglang.srt.model_executor.graph_guard.host_reads import may_read_on_host, refuse_host_read
from torch._ops import OpOverload

logger = logging.getLogger(__name__)

REUSE_SETTING = "graph_capture_record_stream_reuse"


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
        if func.is_view:
            return self.call(func, args, kwargs)
        if may_read_on_host(func):
            refuse_host_read(func, args, kwargs, device.owns)
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
