"""Checks environment variables for values that break or slow down a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sglang.srt.environment_check.report import OK, WARN, Row

# Source: NCCL's user guide, "Environment Variables". The numbers are its legacy levels.
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4", "5")
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE")

Rule = Callable[[str], str | None]  # value -> what is wrong with it


def _file(value: str) -> str | None:
    if not value:
        return "expected a file, got an empty value; unset it"
    return None if Path(value).is_file() else f"expected a file, got {value}, which does not exist"


def _one_of(*names: str) -> Rule:
    def rule(value: str) -> str | None:
        return None if value in names else f"expected one of {', '.join(names)}, got {value!r}"

    return rule


def _number(value: str) -> str | None:
    return None if value.lstrip("-").isdigit() else f"expected a number, got {value!r}"


def _visible_devices(value: str) -> str | None:
    return None if value.strip() else "it is empty, which hides every card; unset it"


def _launch_blocking(value: str) -> str | None:
    return None if value in ("", "0") else "kernels run one at a time, which is slow; unset it"


def _toolkit(value: str) -> str | None:
    return (
        None
        if Path(value, "bin", "nvcc").is_file()
        else f"expected a CUDA toolkit, got {value!r} without bin/nvcc"
    )


PREFIXES = ("NCCL_", "CUDA_", "SGLANG_DDTREE_", "SGLANG_GRAPH_GUARD")
RULES: dict[str, Rule] = {
    "NCCL_GRAPH_FILE": _file,
    "NCCL_TOPO_FILE": _file,
    "NCCL_CONF_FILE": _file,
    "NCCL_P2P_LEVEL": _one_of(*LEVELS),
    "NCCL_NET_GDR_LEVEL": _one_of(*LEVELS),
    "NCCL_P2P_DISABLE": _number,
    "NCCL_SHM_DISABLE": _number,
    "NCCL_IB_DISABLE": _number,
    "NCCL_CUMEM_ENABLE": _number,
    "NCCL_NVLS_ENABLE": _number,
    "NCCL_DEBUG": lambda value: _one_of(*DEBUG_LEVELS)(value.upper()),
    "CUDA_VISIBLE_DEVICES": _visible_devices,
    "CUDA_LAUNCH_BLOCKING": _launch_blocking,
    "CUDA_HOME": _toolkit,
    # These are ours. Any other value is ignored without a message.
    "SGLANG_DDTREE_DEBUG": _one_of("0", "1"),
    "SGLANG_DDTREE_FP8": _one_of("exact"),
    "SGLANG_DDTREE_SM90": _one_of("0", "1"),
    "SGLANG_GRAPH_GUARD": lambda value: _one_of("0", "1", "false", "true")(value.lower()),
}


def variables() -> list[Row]:
    """One warning per variable with an odd value, or one row that lists those of NCCL, CUDA and ours that are set."""
    present = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    rows = [
        Row(f"variable {name}", WARN, problem, {name: present[name]})
        for name, rule in RULES.items()
        if name in present and (problem := rule(present[name])) is not None
    ]
    shown = ", ".join(sorted(present)) or "none"
    return rows or [Row("variables", OK, f"set for NCCL, CUDA and this distribution: {shown}", present)]
