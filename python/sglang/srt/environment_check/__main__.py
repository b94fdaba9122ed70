"""Runs the checks and prints a table. The exit status is 1 if a check failed, else 0."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

from sglang.srt.environment_check import cubins, device, installation, toolchain, variables
from sglang.srt.environment_check.report import FAIL, Row, failed, show

CHECKS: list[Callable[[], list[Row]]] = [
    installation.versions,
    variables.variables,
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
    """Run all checks and return their rows. A check that raises becomes a failed row, and the others still run.

    For this reason the checks import torch and NVML inside functions: a broken library fails only its own checks.
    """
    rows = []
    for check in checks:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for the report
                rows += check()
        except Exception as error:
            name = f"{check.__module__.rpartition('.')[2]} {check.__name__.replace('_', ' ')}"
            rows.append(Row(name, FAIL, f"{type(error).__name__}: {error}"))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.environment_check", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, with the data of each check"
    )
    arguments = parser.parse_args(argv)
    rows = run(CHECKS)
    show(rows, arguments.json)
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
