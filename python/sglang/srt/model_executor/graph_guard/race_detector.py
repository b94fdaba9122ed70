"""Race detector for code on several CUDA streams, captured or eager: ``with detect_graph_races() as report: ...``.

A recorder turns the running program into a trace, and ``happens_before`` finds the races in it. Allocations, frees,
event records, waits and host synchronizations come from ``torch.cuda._gpu_trace``, which also reports them during a
capture. Operations and their operands come from the dispatcher, from Triton launches and from tvm-ffi modules (SGLang's
JIT kernels). The recorder launches no kernel, so the captured graph is the same with and without it.

The recorder misses kernels that are launched through other bindings, unless the dispatcher sees their operands. It also
misses stream ordering by raw driver calls.

``python -m sglang.srt.model_executor.graph_guard.race_detector REPORT.json`` prints a report. The exit status is 0 for
no races, 1 for races, and 2 if the report can't be read.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from sglang.srt.model_executor.graph_guard.happens_before import Region
from sglang.srt.model_executor.graph_guard.race_report import RaceReport, render
from sglang.srt.model_executor.graph_guard.triton_stores import written_parameters
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

logger = logging.getLogger(__name__)

_FRAMES = 16  # stack frames kept per operation
# These ops take only the shape and dtype of their operands.
_NO_READS = frozenset(
    "aten::" + name
    for name in "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full".split()
)
_UNSEEN = 512  # bytes, the allocator's smallest block. Stands for the size of an allocation until a tensor shows it.
_NO_LAUNCH = frozenset(
    "aten::" + name
    for name in "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh record_stream "
    "set_ resize_ _unsafe_view is_pinned _has_same_storage_numel sym_size sym_stride sym_numel".split()
)
# Ops whose schema declares a new tensor although they return an operand. test_graph_guard_ops.py compares these lists
# with the ops of sglang-kernel 0.4.10.
ALIAS_ONLY = frozenset({"sgl_kernel::weak_ref_tensor"})  # no kernel, no access
RETURNS_OPERANDS = frozenset({"sgl_kernel::dense_decode_fwd", "sgl_kernel::sparse_decode_fwd"})


def region_of(tensor: torch.Tensor) -> Region:
    """The bytes of ``tensor``: a pitched region if its outer stride leaves gaps between rows, else a dense one."""
    size = tensor.element_size()
    dims = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    if tensor.numel() == 0:
        return Region(tensor.data_ptr(), 0)
    extent = (1 + sum((n - 1) * s for n, s in dims)) * size
    if len(dims) > 1:
        rows, stride = max(dims, key=lambda d: d[1])
        pitch, width = stride * size, extent - (rows - 1) * stride * size
        if width < pitch:
            return Region(tensor.data_ptr(), extent, pitch, width)
    return Region(tensor.data_ptr(), extent)


@dataclass(frozen=True)
class _Effects:
    """What an op does to memory, from its schema.

    Args:
        written: positions and names of the arguments that it writes.
        launches: whether it launches a kernel.
        new_results: positions of the results that the schema declares as new tensors.
        unmarked: whether it must write an argument, because it returns nothing, but the schema marks none. Many ops of
            sglang-kernel do (moe_sum_reduce, shuffle_rows, transfer_kv_*).
    """

    written: frozenset[int | str]
    launches: bool
    new_results: tuple[int, ...]
    unmarked: bool


@functools.cache
def _effects_of(func: OpOverload) -> _Effects:
    schema = func._schema
    written: set[int | str] = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {i, argument.name}
    launches = not (func.is_view or schema.name in _NO_LAUNCH or schema.name in ALIAS_ONLY)
    new_results = tuple(i for i, result in enumerate(schema.returns) if result.alias_info is None)
    unmarked = launches and not schema.returns and not written
    return _Effects(frozenset(written), launches, () if schema.name in ALIAS_ONLY else new_results, unmarked)


class _Layers:
    """Tracks the running module through global module hooks."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._handles: list = []

    def __enter__(self) -> _Layers:
        self._handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        layer = getattr(module, "layer_id", None)
        name = type(module).__name__
        self._stack.append(f"{layer}.{name}" if isinstance(layer, int) else name)

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def current(self) -> str | None:
        """The innermost module with a layer number, and the innermost module if it is another one."""
        if not self._stack:
            return None
        numbered = next((n for n in reversed(self._stack) if n[0].isdigit()), None)
        last = self._stack[-1]
        return last if numbered in (None, last) else f"{numbered} > {last}"


def _stack() -> list[str]:
    """The caller's frames outside torch and this package, innermost first."""
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_INSIDE):
            frames.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return frames


_INSIDE = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


class Recorder(GuardMode):
    """Feeds one ``HappensBefore`` engine from the current thread. Use it through ``detect_graph_races``."""

    def __init__(self, report: RaceReport) -> None:
        super().__init__()
        self.report = report
        self.engine = report.engine
        self.layers = _Layers()
        self._thread = threading.get_ident()
        self._written_blocks: set[int] = set()
        self._read_only: frozenset[int] = frozenset()  # by the schemas of the custom ops that are running
        self._waits = 0

    # Callbacks for torch.cuda._gpu_trace.
    def on_alloc(self, address: int) -> None:
        if self._mine():
            self._written_blocks.discard(address)
            self.engine.alloc(address, _UNSEEN, self.stream())

    def on_free(self, address: int) -> None:
        if self._mine():
            self.engine.free(address)

    def on_record(self, event: int, stream: int) -> None:
        if self._mine():
            self.engine.record(event, stream)

    def on_wait(self, event: int, stream: int) -> None:
        if self._mine():
            self._waits += 1
            self.engine.wait(event, stream)

    def on_synchronize_device(self) -> None:
        if self._mine():
            self.engine.synchronize()

    def on_synchronize_stream(self, stream: int) -> None:
        if self._mine():
            self.engine.synchronize(stream=stream)

    def on_synchronize_event(self, event: int) -> None:
        if self._mine():
            self.engine.synchronize(event=event)

    def capture_follows(self, stream: torch.cuda.Stream) -> None:
        self.engine.capture_follows(stream.cuda_stream)

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def handle(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        effects = _effects_of(func)
        with self._only_read(func, effects, args, kwargs):
            out = self.call(func, args, kwargs)
        results = self._new_results(func, effects, out, args, kwargs)
        for tensor in results:
            self.engine.resize(_base(tensor), tensor.untyped_storage().nbytes())
        if effects.unmarked:
            self.launch_opaque(str(func), self._operands((args, kwargs)))
        elif effects.launches:
            reads: list[torch.Tensor] = []
            writes = list(results)
            operands = () if func._schema.name in _NO_READS else (*enumerate(args), *kwargs.items())
            for key, value in operands:
                (writes if key in effects.written else reads).extend(self._operands(value))
            self.launch(str(func), reads, writes)
        return out

    @contextmanager
    def _only_read(self, func: OpOverload, effects: _Effects, args: tuple, kwargs: dict) -> Iterator[None]:
        """While a custom op runs, its schema tells which operands the launches inside of it can only read."""
        if func.namespace == "aten" or effects.unmarked or not effects.launches:
            yield
            return
        by_write: dict[bool, set[int]] = {True: set(), False: set()}
        for key, value in (*enumerate(args), *kwargs.items()):
            by_write[key in effects.written] |= {_base(t) for t in self._operands(value)}
        outer = self._read_only
        self._read_only = outer | (by_write[False] - by_write[True])
        try:
            yield
        finally:
            self._read_only = outer

    def _new_results(
        self, func: OpOverload, effects: _Effects, out: Any, args: tuple, kwargs: dict
    ) -> list[torch.Tensor]:
        """The results that are new tensors. Results that alias an operand against the schema are reported."""
        if not effects.new_results:
            return []
        returned = out if len(func._schema.returns) > 1 else (out,)
        results = self._operands([returned[i] for i in effects.new_results])
        if not results or not effects.launches:
            return results
        bases = {_base(t) for t in self._operands((args, kwargs))} - {0}  # 0: an empty tensor
        aliases = [t for t in results if _base(t) in bases]
        if not aliases:
            return results
        if func._schema.name in RETURNS_OPERANDS:
            return [t for t in results if _base(t) not in bases]
        self.report.undeclared_aliases.add(func._schema.name)
        return results

    def _operands(self, tree: Any) -> list[torch.Tensor]:
        return [value for value in tree_iter(tree) if self._is_operand(value)]

    def _is_operand(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self.owns(value)

    def launch(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Record one operation on the current stream with these operands."""
        if not (reads or writes):
            return
        for tensor in writes:
            self._written_blocks.add(_base(tensor))
        info = {
            "layer": self.layers.current(),
            "tensors": [f"writes {_describe(t)}" for t in writes] + [f"reads {_describe(t)}" for t in reads],
            "stack": _stack(),
        }
        self.engine.op(
            self.stream(), [region_of(t) for t in reads], [region_of(t) for t in writes], name, info
        )

    def launch_opaque(
        self, name: str, operands: list[torch.Tensor], written: frozenset[int] | None = None
    ) -> None:
        """Record an operation without a schema that tells what it writes.

        Args:
            written: positions of the operands that it writes. None if unknown: an operand then counts as written if
                its block was allocated in the trace and nothing has written to it yet, unless the schema of a custom
                op around the launch says that it is only read.
        """
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, tensor in enumerate(operands):
            if written is None:
                base = _base(tensor)
                fresh = self.engine.allocated(base) and base not in self._written_blocks
                result = fresh and base not in self._read_only
            else:
                result = i in written
            (writes if result else reads).append(tensor)
        self.launch(name, reads, writes)


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} ({tensor.numel() * tensor.element_size()} B)"


_active: Recorder | None = None
_trace_installed = False


def _install_trace() -> None:
    """Register with torch.cuda._gpu_trace, once per process. Its callbacks can't be unregistered."""
    global _trace_installed
    if _trace_installed:
        return
    import torch.cuda._gpu_trace as trace

    def forward(method: str) -> Callable:
        def callback(*args: int) -> None:
            if _active is not None:
                getattr(_active, method)(*args)

        return callback

    torch._C._activate_gpu_trace()
    trace.register_callback_for_memory_allocation(forward("on_alloc"))
    trace.register_callback_for_memory_deallocation(forward("on_free"))
    trace.register_callback_for_event_record(forward("on_record"))
    trace.register_callback_for_event_wait(forward("on_wait"))
    trace.register_callback_for_device_synchronization(forward("on_synchronize_device"))
    trace.register_callback_for_stream_synchronization(forward("on_synchronize_stream"))
    trace.register_callback_for_event_synchronization(forward("on_synchronize_event"))
    _trace_installed = True


@contextmanager
def _replaced(owner: Any, name: str, make: Callable) -> Iterator[None]:
    """Replace ``owner.name`` with ``make(owner.name)`` for the block."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


def _observe_captures(recorder: Recorder) -> AbstractContextManager:
    def begin(original: Callable) -> Callable:
        def capture_begin(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            recorder.engine.capture_begin(recorder.stream())

        return capture_begin

    def end(original: Callable) -> Callable:
        def capture_end(self: torch.cuda.CUDAGraph) -> None:
            recorder.engine.capture_end()
            original(self)

        return capture_end

    stack = ExitStack()
    stack.enter_context(_replaced(torch.cuda.CUDAGraph, "capture_begin", begin))
    stack.enter_context(_replaced(torch.cuda.CUDAGraph, "capture_end", end))
    return stack


def _observe_wait_stream(recorder: Recorder) -> AbstractContextManager:
    """Report a ``wait_stream`` that returns without waiting. Upstream's replacement of the method drops some waits."""

    def make(original: Callable) -> Callable:
        def wait_stream(self: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
            before = recorder._waits
            original(self, stream)
            if recorder._waits == before:
                recorder.engine.wait_dropped(self.cuda_stream, stream.cuda_stream, info={"stack": _stack()})

        return wait_stream

    return _replaced(torch.cuda.Stream, "wait_stream", make)


def _observe_triton(recorder: Recorder) -> AbstractContextManager:
    jit: Any = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return ExitStack()

    def make(original: Callable) -> Callable:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            result = original(self, *args, grid=grid, warmup=warmup, **kwargs)
            if not warmup:
                named = [(n, v) for n, v in (*zip(self.arg_names, args, strict=False), *kwargs.items())]
                operands = [(n, v) for n, v in named if recorder._is_operand(v)]
                stored = written_parameters(self.fn)
                written = (
                    None
                    if stored is None
                    else frozenset(i for i, (n, _) in enumerate(operands) if n in stored)
                )
                recorder.launch_opaque(f"triton::{self.fn.__name__}", [v for _, v in operands], written)
            return result

        return run

    return _replaced(jit.JITFunction, "run", make)


def _as_torch(value: Any) -> Any:
    """``value`` as a tensor of torch that shares its memory, if it is a tensor of another library."""
    return torch.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _observe_tvm_ffi(recorder: Recorder) -> AbstractContextManager:
    ffi: Any = sys.modules.get("tvm_ffi")
    if ffi is None:
        return ExitStack()

    def make(original: Callable) -> Callable:
        def getattribute(self: Any, name: str) -> Any:
            value = original(self, name)
            if name.startswith("_") or not isinstance(value, ffi.Function):
                return value

            def call(*args: Any) -> Any:
                result = value(*args)
                # A module may return tensors that it has allocated itself.
                made = [
                    _as_torch(r)
                    for r in (result if isinstance(result, tuple | list | ffi.Array) else (result,))
                ]
                operands = [a for a in (*args, *made) if recorder._is_operand(a)]
                recorder.launch_opaque(f"jit::{name}", operands)
                return result

            return call

        return getattribute

    return _replaced(ffi.Module, "__getattribute__", make)


@contextmanager
def detect_graph_races(report: RaceReport | None = None, label: str = "") -> Iterator[RaceReport]:
    """Record the operations of the block on all streams and report those that race.

    Args:
        report: the report of an earlier block to continue, such as the capture of another batch size.
        label: the name of the block in the report.
    Returns:
        The report. It is complete when the block ends.
    Raises:
        RuntimeError: the block is inside another such block.
    """
    global _active
    if _active is not None:
        raise RuntimeError("detect_graph_races() is already active; blocks can't be nested.")
    report = report or RaceReport()
    report.captures.append(label or time.strftime("%H:%M:%S"))
    _install_trace()
    recorder = Recorder(report)
    if torch.cuda.is_current_stream_capturing():
        recorder.engine.capture_begin(recorder.stream())
    _active = recorder
    try:
        with ExitStack() as stack:
            for observe in (_observe_captures, _observe_wait_stream, _observe_triton, _observe_tvm_ffi):
                stack.enter_context(observe(recorder))
            stack.enter_context(recorder.layers)
            stack.enter_context(recorder)
            yield report
    finally:
        _active = None
        report.engine.capture_end()
        # The recorder does not see what happens between two blocks, so it must not report races across that gap.
        report.engine.synchronize()


def main(argv: list[str] | None = None) -> int:
    """Print a report. Return the exit status: 0 for no races, 1 for races, 2 for an unreadable report."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        print("usage: race_detector REPORT.json", file=sys.stderr)
        return 2
    try:
        report = json.loads(Path(argv[0]).read_text())
        text = render(report)
    except (OSError, ValueError, KeyError, TypeError) as e:
        print(
            f"race_detector: REPORT: expected a file written by --debug-graph-races, got {argv[0]}: {e}",
            file=sys.stderr,
        )
        return 2
    print(text)
    return 1 if report["races"] else 0


if __name__ == "__main__":
    sys.exit(main())
