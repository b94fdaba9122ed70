"""How every tool fails: one exception, and one place that prints it and exits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ToolError(Exception):
    """An error that the user can act on. Its text is one sentence that says what to do."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn a ToolError or an OSError (a full disk, a read-only folder) into one line and exit status 1.

    Raises:
        SystemExit: the block failed. The sentence is on stderr, without a traceback.
    """
    try:
        yield
    except (ToolError, OSError) as error:
        text = str(error)
        print(f"error: {text}{'' if text.endswith('.') else '.'}", file=sys.stderr)
        raise SystemExit(1) from None
