"""The error of an argument that this distribution refuses, and how a server's command line shows it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

COMMAND_LINE = "run_server"  # upstream's function that launch_server and `sglang serve` call


class ArgumentRefused(ValueError):
    """An argument has a value that we do not serve. The text names it, what was expected and what was given."""


def flag_of(field: str) -> str:
    """Return the flag that sets a field of ServerArgs."""
    return "--" + field.replace("_", "-")


def refuse_others(feature: str, args: Any, served: Iterable[tuple[str, object, str]]) -> None:
    """Refuse arguments that a feature cannot be combined with.

    Args:
        feature: the flag of the feature.
        args: the server's arguments.
        served: for each field of ServerArgs: its name, the only value that is served, and why no other is.

    Raises:
        ArgumentRefused: an argument has another value.
    """
    for field, value, reason in served:
        given = getattr(args, field)
        if given != value:
            raise ArgumentRefused(
                f"{feature}: {flag_of(field)}: expected {value!r}, got {given!r}: {reason}."
            )


def refuse_file(argument: str, path: str) -> None:
    """Refuse a file that cannot be written. It is not opened yet, because another argument may be refused.

    Args:
        argument: the flag that names the file, as the error should show it.
        path: the path of the file.

    Raises:
        ArgumentRefused: the folder does not exist, the path is a folder, or this user may not write the file.
    """
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ArgumentRefused(f"{argument}: expected a file in a folder that exists, got {path!r}.")
    if file.is_dir():
        raise ArgumentRefused(f"{argument}: expected a file, got the folder {path!r}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentRefused(f"{argument}: expected a file that this user may write, got {path!r}.")


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
