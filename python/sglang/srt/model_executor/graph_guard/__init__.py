"""Graph guard: keeps multi-stream overlap safe under CUDA graphs, and provides the instruments that check it.

Before a graph backend warms up and captures a forward, it passes the forward through ``guard_capture``. See
docs/graph_safety.md.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.graph_guard import stream_order
from sglang.srt.model_executor.graph_guard.arguments import refuse_canary
from sglang.srt.model_executor.graph_guard.host_reads import HostReadInCaptureError
from sglang.srt.model_executor.graph_guard.stream_order import enabled, order_after_reads, order_dropped_join
from sglang.srt.model_executor.graph_guard.stream_safe_capture import (
    StreamSafeCapture,
    enable_record_stream_reuse,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.graph_guard.race_report import RaceReport

__all__ = [
    "HostReadInCaptureError",
    "StreamSafeCapture",
    "enabled",
    "guard_capture",
    "order_after_reads",
    "order_dropped_join",
]

# The table of server arguments imports this package, so upstream's runtime_context is imported inside functions. So are
# the instruments: a server that uses none of them does not load them.

logger = logging.getLogger(__name__)

_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"

Instrument = Callable[[Callable[[], Any], bool], AbstractContextManager[None]]

_race_report: RaceReport | None = None  # one per process, shared by all its captures


def guard_capture(forward: Callable[[], Any], backend: Any, shape_key: Any) -> Callable[[], Any]:
    """Wrap the forward that a graph backend is about to warm up and capture.

    Args:
        forward: runs the model once on static inputs.
        backend: the graph backend. The instruments reach the model through its runner.
        shape_key: the bucket of the graph.
    Returns:
        A function that runs ``forward``. During a capture it also keeps memory safe across streams and feeds the
        enabled instruments. Returns ``forward`` itself when the guard and all instruments are off.
    """
    instruments = _instruments(backend, shape_key)
    if not enabled() and not instruments:
        return forward
    if enabled():
        enable_record_stream_reuse()
        stream_order.separate_flashinfer_workspaces()

    def guarded() -> Any:
        capturing = torch.cuda.is_current_stream_capturing()
        with ExitStack() as stack:
            for instrument in instruments:
                stack.enter_context(instrument(forward, capturing))
            if enabled():
                stack.enter_context(stream_order.keep_expert_inputs(_model_of(backend)))
                if capturing:
                    stack.enter_context(_stream_safe_capture())
            return forward()

    return guarded


def _stream_safe_capture() -> StreamSafeCapture:
    module = sys.modules.get(_BREAKABLE)
    capture = module and module._current_capture_var.get()
    if capture is None:
        return StreamSafeCapture()
    graph = capture.cuda_graph
    return StreamSafeCapture(
        segment=lambda: len(graph._break_fns),
        on_open_fork=lambda stream: stream_order.order_after_break(graph, stream),
    )


def _instruments(backend: Any, shape_key: Any) -> list[Instrument]:
    """The enabled instruments. Each takes (forward, whether a capture is open) and returns a context manager."""
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().graph
    instruments = []
    if flags.debug_graph_diff and hasattr(backend, "replay"):
        instruments.append(_differential(flags.debug_graph_diff, backend, shape_key))
    if flags.debug_graph_canary is not None:
        _watch_pages(flags.debug_graph_canary, backend)
    if flags.debug_graph_races:
        instruments.append(_race_detector(flags.debug_graph_races, backend, shape_key))
    return instruments


def _race_detector(path: str, backend: Any, shape_key: Any) -> Instrument:
    from sglang.srt.model_executor.graph_guard.race_detector import detect_graph_races
    from sglang.srt.model_executor.graph_guard.race_report import RaceReport

    path = _path_of_rank(path)
    global _race_report
    _race_report = report = _race_report or RaceReport()

    @contextmanager
    def instrument(forward: Callable[[], Any], capturing: bool) -> Iterator[None]:
        if not capturing:
            yield
            return
        before = len(report.races)
        with detect_graph_races(report, label=f"{type(backend).__name__} {shape_key}"):
            yield
        report.write(path)
        if len(report.races) > before:
            logger.error(
                "Graph races in %s of %s, written to %s:\n%s", shape_key, type(backend).__name__, path, report
            )

    return instrument


def _path_of_rank(path: str) -> str:
    """Insert the data-parallel replica and the rank before the suffix if several processes would write ``path``."""
    stem, suffix = os.path.splitext(path)
    if (replica := _replica()) is not None:  # ranks count from 0 in every replica
        stem += f".dp{replica}"
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        stem += f".rank{torch.distributed.get_rank()}"
    return stem + suffix


def _replica() -> int | None:
    from sglang.srt.runtime_context import get_parallel

    try:
        return get_parallel().dp_rank
    except RuntimeError:  # no server runs in this process
        return None


def _runner_of(backend: Any) -> Any:
    return getattr(backend, "_cuda_graph_runner", backend)


def _model_of(backend: Any) -> torch.nn.Module | None:
    return getattr(getattr(_runner_of(backend), "model_runner", None), "model", None)


def _differential(pattern: str, backend: Any, shape_key: Any) -> Instrument:
    from sglang.srt.model_executor.graph_guard.differential import GraphDiff

    probe = vars(backend).get("_graph_diff")
    if probe is None:
        probe = backend._graph_diff = GraphDiff(pattern, _model_of(backend))
        replay = backend.replay

        def replay_then_check(key: Any, forward_batch: Any, **kwargs: Any) -> Any:
            out = replay(key, forward_batch, **kwargs)
            size = getattr(key, "size", key)
            # The size of a prefill graph counts tokens, that of all others counts requests.
            real = getattr(_runner_of(backend), "raw_num_tokens", None) or forward_batch.batch_size
            probe.check(key, size, real)
            return out

        backend.replay = replay_then_check

    def instrument(forward: Callable[[], Any], capturing: bool) -> AbstractContextManager[None]:
        return probe.capture(shape_key) if capturing else probe.warmup(shape_key, forward)

    return instrument


def _watch_pages(every: int, backend: Any) -> None:
    from sglang.srt.model_executor.graph_guard.canary import PageCanary, watched_pools
    from sglang.srt.runtime_context import get_server_args

    model_runner = getattr(_runner_of(backend), "model_runner", None)
    if model_runner is None:
        return  # captures part of a forward, and the whole forward is already watched
    # Requests share the pools of the target model. A draft model has a small pool of its own.
    if "_page_canary" in vars(model_runner) or getattr(model_runner, "is_draft_worker", False):
        return
    refuse_canary(every, get_server_args())  # again: SGLANG_PLUGINS can turn off the check at startup
    model_runner._page_canary = PageCanary(watched_pools(model_runner.token_to_kv_pool), every)
    model_runner._page_canary.watch(model_runner)
