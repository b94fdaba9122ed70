"""Results files: what a measurement ran on, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path


def origin(args) -> dict:
    """Where the numbers of a results file come from.

    Args:
        args: of a measurement: `device`, and `commit` of this repository (None: git's).

    Returns:
        `gpu` or, on a CPU, `host`; torch's version, the commit and the command.
    """
    import torch  # late: bench_steps.py starts its servers first

    on = {"gpu": torch.cuda.get_device_name()} if args.device == "cuda" else {"host": host_name()}
    commit = args.commit or subprocess.check_output(
        ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], text=True
    )
    return on | dict(torch=torch.__version__, commit=commit.strip(), command=" ".join(sys.argv))


def host_name() -> str:
    """The CPU's model name and how many of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()}, {os.cpu_count()} cores"


def save(result: dict, output: Path) -> None:
    """Writes a results file, and its folder where there is none."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1))
