"""Results files: where their numbers come from, and how they are written."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def origin(args: argparse.Namespace) -> dict[str, str]:
    """Say where the numbers of a results file come from.

    Args:
        args: parsed arguments of a measurement, with `device` and `commit` (None: ask git).

    Returns:
        `gpu` (on a CPU `host`), `torch`, `commit` and `command`.
    """
    on = {"gpu": torch.cuda.get_device_name()} if args.device == "cuda" else {"host": host_name()}
    commit = args.commit or subprocess.check_output(
        ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], text=True
    )
    spec = sys.modules["__main__"].__spec__
    command = ["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *sys.argv[1:]]
    return on | dict(torch=torch.__version__, commit=commit.strip(), command=" ".join(command))


def host_name() -> str:
    """The CPU's model name and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()}, {os.cpu_count()} cores"


def gpu_clocks(device: str) -> dict[str, str] | None:
    """Return clocks and power of the first visible GPU as nvidia-smi reports them now; None on a CPU."""
    if device != "cuda":
        return None
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", visible, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    values = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split(", ")
    return dict(zip(fields, values))


def save(result: dict, output: Path) -> None:
    """Write a results file and create its folder if necessary. A command that is killed leaves a whole file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1))
    temporary.replace(output)
