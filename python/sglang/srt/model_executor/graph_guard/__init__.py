"""Graph guard: multi-stream overlap that is safe under CUDA graphs, and the instruments that prove it.

Each graph backend passes the forward that it is about to warm up and capture through ``guard_capture``. See
docs/graph_safety.md.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard import stream_order
from sglang.srt.model_executor.graph_guard.stream_order import (
    HostReadInCaptureError,
    StreamSafeCapture,
    enabled,
    order_after_reads,
    order_dropped_join,
)

__all__ = [
    "HostReadInCaptureError",
    "StreamSafeCapture",
    "enabled",
    "guard_capture",
    "order_after_reads",
    "order_dropped_join",
]

logger = logging.getLogger(__name__)

_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"

_race_report = None  # one of the process, over all its captures


def guard_capture(forward: Callable[[], Any], backend: Any, shape_key: Any) -> Callable[[], Any]:
    """What a graph backend is to warm up and capture in place of ``forward``.

    Args:
        forward: runs the model once on static inputs.
        backend: captures it; knows its runner where the instruments need one.
        shape_key: the graph's bucket.
    Returns:
        A function that does the same and, while a capture is open, keeps its memory safe across streams and feeds the
        instruments that are on. ``forward`` itself when all of it is off.
    """
    instruments = _instruments(backend, shape_key)
    if not enabled() and not instruments:
        return forward
    if enabled():
        stream_order.enable_record_stream_reuse()
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


def _instruments(backend: Any, shape_key: Any) -> list[Callable]:
    """Context managers, to be called with (forward, whether a capture is open), of the instruments that are on."""
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


def _race_detector(path: str, backend: Any, shape_key: Any) -> Callable:
    from contextlib import contextmanager

    from sglang.srt.model_executor.graph_guard.race_detector import RaceReport, detect_graph_races

    path = _path_of_rank(path)
    global _race_report
    _race_report = report = _race_report or RaceReport()

    @contextmanager
    def instrument(forward, capturing):
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
    """``path``, with replica and rank before its suffix where several processes would write to it."""
    stem, suffix = os.path.splitext(path)
    if (replica := _replica()) is not None:  # replicas have a world of their own
        stem += f".dp{replica}"
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        stem += f".rank{torch.distributed.get_rank()}"
    return stem + suffix


def _replica() -> int | None:
    from sglang.srt.runtime_context import get_parallel

    try:
        return get_parallel().dp_rank
    except RuntimeError:  # not published: no server runs in this process
        return None


def _runner_of(backend: Any) -> Any:
    return getattr(backend, "_cuda_graph_runner", backend)


def _model_of(backend: Any) -> torch.nn.Module | None:
    return getattr(getattr(_runner_of(backend), "model_runner", None), "model", None)


def _differential(pattern: str, backend: Any, shape_key: Any) -> Callable:
    from sglang.srt.model_executor.graph_guard.differential import GraphDiff

    probe = vars(backend).get("_graph_diff")
    if probe is None:
        probe = backend._graph_diff = GraphDiff(pattern, _model_of(backend))
        replay = backend.replay

        def replay_then_check(key, forward_batch, **kwargs):
            out = replay(key, forward_batch, **kwargs)
            size = getattr(key, "size", key)
            # A prefill graph counts tokens, the others requests.
            real = getattr(_runner_of(backend), "raw_num_tokens", None) or forward_batch.batch_size
            probe.check(key, size, real)
            return out

        backend.replay = replay_then_check

    def instrument(forward, capturing):
        return probe.capture(shape_key) if capturing else probe.warmup(shape_key, forward)

    return instrument


def _watch_pages(every: int, backend: Any) -> None:
    from sglang.srt.model_executor.graph_guard.canary import PageCanary, watched_pools
    from sglang.srt.runtime_context import get_server_args

    model_runner = getattr(_runner_of(backend), "model_runner", None)
    if model_runner is None:
        return  # a part of a forward that is watched as a whole
    # A draft model's own pool is small and its target's stores are the ones that requests share.
    if "_page_canary" in vars(model_runner) or getattr(model_runner, "is_draft_worker", False):
        return
    args = get_server_args()
    if args.enable_hierarchical_cache or args.enable_hisparse or args.disaggregation_mode != "null":
        raise ValueError(
            "--debug-graph-canary can't be used with --enable-hierarchical-cache, --enable-hisparse or "
            "--disaggregation-mode: they store to pages outside a forward, or to other pages than its slots name."
        )
    model_runner._page_canary = PageCanary(watched_pools(model_runner.token_to_kv_pool), every)
    model_runner._page_canary.watch(model_runner)
