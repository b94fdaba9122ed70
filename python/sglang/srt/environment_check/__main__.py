"""Runs the checks and ends with a table and an exit status: 0 if none failed, else 1."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

from sglang.srt.environment_check import cubins, device, installation, toolchain
from sglang.srt.environment_check.report import FAIL, Row, failed, show

CHECKS: list[Callable[[], list[Row]]] = [
    installation.versions,
    installation.caches,
    installation.sboms,
    installation.left_out,
    toolchain.compiler,
    cubins.libraries,
    cubins.kernels,
    installation.imports,
    device.driver,
    device.cards,
    device.shared_memory,
    device.kernels,
    device.all_reduce,
]


def run(checks: list[Callable[[], list[Row]]]) -> list[Row]:
    """Returns the rows of all checks; one that raises is a failed row, and the others still run."""
    rows = []
    for check in checks:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the report's
                rows += check()
        except Exception as error:
            name = f"{check.__module__.rpartition('.')[2]} {check.__name__.replace('_', ' ')}"
            rows.append(Row(name, FAIL, f"{type(error).__name__}: {error}"))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.environment_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the report as JSON, with each check's data")
    arguments = parser.parse_args(argv)
    rows = run(CHECKS)
    show(rows, arguments.json)
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
