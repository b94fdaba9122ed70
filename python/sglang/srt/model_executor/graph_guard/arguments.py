"""The server arguments of the graph guard's instruments: types, help texts and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.arg_utils import A
from sglang.srt.arg_groups.argument_refused import (
    ArgumentRefused,
    flag_of,
    refuse_file,
    refuse_others,
    show_refusals_without_traceback,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

RaceReportPath = A[
    str | None,
    "Check every CUDA graph for operations that use the same memory on different streams with no ordering between "
    "them, and write the races to this JSON file. Only the capture becomes slower. The graphs do not change.",
]
DiffPattern = A[
    str | None,
    "After each replay, rerun eagerly the modules (by qualified name) and ops (as namespace::name) that match this "
    "regular expression, and report the layers whose captured outputs or inputs differ. Slow, and adds copies to the "
    "graphs.",
]
CanaryInterval = A[
    int | None,
    "Detect writes to pages that a step does not store to, in the index-K and compressed pools that --kv-canary does "
    "not cover. Each step checks one page out of this many. 1 checks every page in every step.",
]

# Each: a field of ServerArgs, the value that the canary is served with, and why no other is.
CANARY_REFUSALS = (
    ("enable_hierarchical_cache", False, "it writes pages outside a forward"),
    ("enable_hisparse", False, "it writes pages other than those of the forward's slots"),
    ("disaggregation_mode", "null", "the transfer of KV writes pages outside a forward"),
)


def register() -> None:
    """Entry point `sglang.srt.plugins`: check the arguments before a server loads its model."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    show_refusals_without_traceback()

    # A late step, so that all other arguments have their final values.
    @register_resolution_hook("handle_debug_utils")
    def check_args(args: ServerArgs, step: Callable[[ServerArgs], None]) -> None:
        from sglang.srt.arg_groups.overrides import resolving_view

        refuse_server_args(resolving_view(args))
        step(args)


def refuse_server_args(args: ServerArgs) -> None:
    """Refuse an instrument that could not run.

    Args:
        args: the server's arguments, with the device resolved.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    for field in ("debug_graph_races", "debug_graph_diff", "debug_graph_canary"):
        if getattr(args, field) is not None:
            refuse_without_graphs(flag_of(field), args)
    if args.debug_graph_races is not None:
        refuse_file("--debug-graph-races", args.debug_graph_races)
    if args.debug_graph_diff is not None:
        diff_pattern(args.debug_graph_diff)
    if args.debug_graph_canary is not None:
        refuse_canary(args.debug_graph_canary, args)


def refuse_without_graphs(instrument: str, args: ServerArgs) -> None:
    """Refuse an instrument on a server that captures no CUDA graph.

    Args:
        instrument: the flag of the instrument.
        args: the server's arguments, with the device and the graphs resolved.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend

    refuse_others(instrument, args, [("device", "cuda", "only CUDA graphs are checked")])
    graphs = args.cuda_graph_config
    if graphs.decode.backend == graphs.prefill.backend == Backend.DISABLED:
        raise ArgumentRefused(
            f"{instrument}: expected a server with CUDA graphs, got one whose graphs are disabled in both decode and "
            "prefill, for example by --disable-cuda-graph: only CUDA graphs are checked."
        )


def diff_pattern(text: str) -> re.Pattern[str]:
    """Compile the value of --debug-graph-diff.

    Raises:
        ArgumentRefused: it is not a regular expression.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentRefused(
            f"--debug-graph-diff: expected a regular expression, got {text!r}: {error}"
        ) from error


def refuse_canary(every: int, args: ServerArgs) -> None:
    """Refuse a canary that would check no page, or whose pages change in ways that it does not track.

    Args:
        every: the value of --debug-graph-canary.
        args: the server's arguments.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    if every < 1:
        raise ArgumentRefused(f"--debug-graph-canary: expected 1 or more, got {every}.")
    refuse_others("--debug-graph-canary", args, CANARY_REFUSALS)
