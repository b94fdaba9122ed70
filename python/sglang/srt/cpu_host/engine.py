"""Selects SGLang's CPU engine when the server runs on the CPU.

Upstream reads the choice from the environment variable SGLANG_USE_CPU_ENGINE, in many modules and while they are
imported. ``sglang/__init__.py`` therefore calls this first, before torch is imported. A value that the user set wins.
"""

import ctypes
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from sglang.srt.cpu_host.threads import choose_threads, option_value

ENVIRONMENT_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def select_cpu_engine(argv: list[str] | None = None) -> bool:
    """Set SGLANG_USE_CPU_ENGINE=1 if the server will run on the CPU. Child processes inherit the variable.

    The server runs on the CPU if the command line says ``--device cpu``, or if it names no device and this host can
    serve only on the CPU.

    Args:
        argv: the command line without the program. Defaults to sys.argv[1:].
    Returns:
        Whether the CPU engine is selected.
    """
    argv = sys.argv[1:] if argv is None else argv
    if ENVIRONMENT_VARIABLE not in os.environ:
        device = option_value(argv, "--device")
        if device == "cpu" or (device is None and _can_only_be_cpu()):
            os.environ[ENVIRONMENT_VARIABLE] = "1"
    selected = os.environ.get(ENVIRONMENT_VARIABLE) == "1"
    if selected:
        choose_threads(argv)
    return selected


def _can_only_be_cpu() -> bool:
    """Whether torch is a CPU build, or a CUDA build on a Linux host without a driver."""
    try:
        # The local version: "" (the package index's default, a CUDA build), "cu130", "cpu", "rocm6.4", ...
        build = version("torch").partition("+")[2]
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
