"""Commands that more than one tool runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.errors import ToolError

Command = Sequence[str | Path]


def run_checked(command: Command, environment: dict[str, str] | None = None, quiet: bool = False) -> None:
    """Run `command`.

    Args:
        command: the program and its arguments.
        environment: replaces this process's.
        quiet: whether to drop what it prints to stdout.

    Raises:
        ToolError: it failed. Its own output says why.
    """
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode:
        raise ToolError(f"{command[0]} failed (exit status {done.returncode}): see its output above.")


def pip_wheel(python: str | Path, out: Path) -> list[str | Path]:
    """Return the start of a command that builds a wheel of ours into `out` with the packages of `python`."""
    return [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out]
