"""Repairs upstream's known ordering faults: waits that are missing, and memory that two streams share.

``stream_safe_capture`` has the general rule for memory that is reused too early. Each function here is for one place.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode


def enabled() -> bool:
    """Whether the guard is on. It is, unless ``SGLANG_GRAPH_GUARD`` is 0 or false."""
    return os.environ.get("SGLANG_GRAPH_GUARD", "1").lower() not in ("0", "false")


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


def order_after_reads(allocating: torch.cuda.Stream, reading: torch.cuda.Stream) -> None:
    """Make later work of ``allocating`` start after the work that ``reading`` has queued so far.

    Needed for a tensor that was allocated on ``allocating`` and is dropped after its last read on ``reading``: the next
    allocation on ``allocating`` may reuse its memory.
    """
    if enabled():
        allocating.wait_stream(reading)


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
