"""Compiles our kernels for every architecture and prints what each of them needs from the card.

    .venv/bin/python -m tools.kernels [--report FILE]

Uses the installed CUDA toolkit (nvcc on PATH or under CUDA_HOME). If there is none, it uses NVIDIA's toolkit
wheels (requirements/cuda-toolkit.lock), unpacked into build/. TORCH_CUDA_ARCH_LIST chooses the architectures.
The exit status is that of sgl-kernel/tools/kernel_report.py: not 0 if a hot kernel spills or needs more
shared memory than sm_120 has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools.commands import Command, run_checked
from tools.errors import ArgumentParser, exit_on_error
from tools.upstream import ROOT

BUILD = ROOT / "build" / "sgl-kernel"
TOOLKIT = ROOT / "build" / "cuda-toolkit"


def toolkit(python: Path | str = sys.executable, run: Callable[[Command], None] = run_checked) -> Path:
    """Return the root of a CUDA toolkit. Download NVIDIA's wheels if none is installed.

    Args:
        python: the interpreter whose pip downloads them.
        run: runs a command and raises if it fails.

    Raises:
        ToolError: the download failed.
    """
    for nvcc in (shutil.which("nvcc"), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")):
        if nvcc and Path(nvcc).is_file():
            return Path(nvcc).resolve().parent.parent
    root = TOOLKIT / "nvidia" / "cu13"
    if not (root / "lib64").exists():
        lock = ROOT / "requirements" / "cuda-toolkit.lock"
        shutil.rmtree(TOOLKIT, ignore_errors=True)
        pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
        run([*pip, "--target", TOOLKIT, "-r", lock])
        # The wheels have the layout of a runtime. nvcc also needs lib64, and the linker libcudart.so.
        (root / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
        (root / "lib64").symlink_to("lib")
    return root


def compiler_environment(cuda: Path, scripts: Path) -> dict[str, str]:
    """Return the variables that lead CMake to the toolkit at `cuda` and to ninja in the folder `scripts`."""
    return {
        "CUDACXX": str(cuda / "bin" / "nvcc"),
        "CUDA_HOME": str(cuda),
        "PATH": f"{scripts}:{os.environ.get('PATH', '')}",
    }


def build(cuda: Path) -> Path:
    """Configure and compile; return the CUDA library.

    Raises:
        ToolError: cmake or ninja failed.
    """
    environment = os.environ | compiler_environment(cuda, Path(sys.executable).parent)
    configure: list[str | Path] = [
        "cmake",
        "-S",
        ROOT / "sgl-kernel",
        "-B",
        BUILD,
        "-G",
        "Ninja",
        "-DDDTREE_CUDA=ON",
    ]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    run_checked(configure, environment, quiet=True)
    run_checked(["ninja", "-C", BUILD], environment, quiet=True)
    return BUILD / "_ddtree_cuda.so"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(prog="python -m tools.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--report",
        type=Path,
        default=BUILD / "report.md",
        help="also write the table to this file (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    with exit_on_error():
        library = build(toolkit())
    script = ROOT / "sgl-kernel" / "tools" / "kernel_report.py"
    return subprocess.call([sys.executable, script, library, "--output", arguments.report])


if __name__ == "__main__":
    sys.exit(main())
