"""How every tool fails: with one line, from one exception or from a wrong argument."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class ToolError(Exception):
    """An error that the user can act on. Its text is one sentence that says what to do."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser that prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help.\n")


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
