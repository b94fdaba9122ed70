"""Chooses SGLang's CPU engine by itself when the device can only be, or is asked to be, the CPU.

Upstream decides it from the environment variable SGLANG_USE_CPU_ENGINE, which many modules read while they are
imported; so this runs first of all in `sglang/__init__.py`, before torch is imported. A value that the user set wins.
"""

import ctypes
import os
import sys
from importlib.metadata import PackageNotFoundError, version

ENVIRONMENT_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def select_cpu_engine(argv: list[str] | None = None) -> bool:
    """Sets SGLANG_USE_CPU_ENGINE=1 when the server will run on the CPU.

    That is when the command line says `--device cpu`, or names no device and this host can only serve on the CPU. Child processes
    inherit the variable.

    Args:
        argv: the command line without the program; sys.argv[1:] by default.

    Returns:
        Whether the CPU engine is on.
    """
    if ENVIRONMENT_VARIABLE not in os.environ:
        device = _device_argument(sys.argv[1:] if argv is None else argv)
        if device == "cpu" or (device is None and _can_only_be_cpu()):
            os.environ[ENVIRONMENT_VARIABLE] = "1"
    return os.environ.get(ENVIRONMENT_VARIABLE) == "1"


def _device_argument(argv: list[str]) -> str | None:
    device = None
    for position, argument in enumerate(argv):
        if argument == "--device" and position + 1 < len(argv):
            device = argv[position + 1]
        elif argument.startswith("--device="):
            device = argument.partition("=")[2]
    return device  # the last one counts, as in argparse


def _can_only_be_cpu() -> bool:
    """Whether no accelerator can serve: torch's build has none, or is a CUDA build on a Linux host without a driver."""
    try:
        build = version("torch").partition("+")[
            2
        ]  # "" (the index's default build, CUDA), "cu130", "cpu", "rocm6.4", ...
    except PackageNotFoundError:
        return False
    if build == "cpu":
        return True
    return sys.platform == "linux" and (build == "" or build.startswith("cu")) and not _has_cuda_driver()


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
