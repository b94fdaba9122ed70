"""The error of an argument that this distribution refuses, and how a server's command line shows it."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from types import TracebackType

COMMAND_LINE = "run_server"  # upstream's function that launch_server and `sglang serve` call


class ArgumentRefused(ValueError):
    """An argument has a value that we do not serve. The text names it, what was expected and what was given."""


@cache  # each plug-in asks for it
def show_refusals_without_traceback() -> None:
    """Let a server that refuses an argument end with the text of the refusal, instead of a traceback.

    A program that starts an engine itself still gets the traceback, because that shows which call was refused.
    """
    show_others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        functions = (frame.f_code.co_name for frame, _ in traceback.walk_tb(trace))
        if isinstance(error, ArgumentRefused) and COMMAND_LINE in functions:
            print(f"error: {error}", file=sys.stderr)
        else:
            show_others(kind, error, trace)

    sys.excepthook = show
