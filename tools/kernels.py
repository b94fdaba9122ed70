"""Compiles our kernels for every architecture and prints what each will ask of the card.

    .venv/bin/python -m tools.kernels [--report FILE]

Uses the installed CUDA toolkit (nvcc on PATH or under CUDA_HOME); where there is none, NVIDIA's toolkit wheels of
requirements/cuda-toolkit.lock, unpacked into build/. TORCH_CUDA_ARCH_LIST chooses the architectures. The exit status is
that of sgl-kernel/tools/kernel_report.py: not 0 when a hot kernel spills or wants more shared memory than sm_120 has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.upstream import ROOT

BUILD = ROOT / "build" / "sgl-kernel"
TOOLKIT = ROOT / "build" / "cuda-toolkit"


def run_checked(command: list) -> None:
    """Runs `command`; raises subprocess.CalledProcessError if it fails, its output has said why then."""
    subprocess.run(command, check=True)


def toolkit(python: Path | str = sys.executable, run=run_checked) -> Path:
    """Returns the root of a CUDA toolkit, fetching NVIDIA's wheels if none is installed.

    Args:
        python: the interpreter whose pip fetches them.
        run: runs a command, a list; raises what it likes if that fails.
    """
    for nvcc in (shutil.which("nvcc"), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")):
        if nvcc and Path(nvcc).is_file():
            return Path(nvcc).resolve().parent.parent
    root = TOOLKIT / "nvidia" / "cu13"
    if not (root / "lib64").exists():
        lock = ROOT / "requirements" / "cuda-toolkit.lock"
        shutil.rmtree(TOOLKIT, ignore_errors=True)
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--require-hashes",
            "--target",
            TOOLKIT,
            "-r",
            lock,
        ]
        run(pip)
        # The wheels lay a runtime out, not a toolkit: nvcc looks for lib64 and the linker for the unversioned name.
        (root / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
        (root / "lib64").symlink_to("lib")
    return root


def compiler_environment(cuda: Path, scripts: Path) -> dict[str, str]:
    """What CMake has to find in the environment: the toolkit at `cuda`, and its own ninja in the folder `scripts`."""
    return {
        "CUDACXX": str(cuda / "bin" / "nvcc"),
        "CUDA_HOME": str(cuda),
        "PATH": "%s:%s" % (scripts, os.environ.get("PATH", "")),
    }


def build(cuda: Path) -> Path:
    """Configures and compiles; returns the CUDA library.

    Raises:
        subprocess.CalledProcessError: cmake or ninja failed; its output says why.
    """
    environment = os.environ | compiler_environment(cuda, Path(sys.executable).parent)
    configure = ["cmake", "-S", ROOT / "sgl-kernel", "-B", BUILD, "-G", "Ninja", "-DDDTREE_CUDA=ON"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", BUILD], check=True, env=environment, stdout=subprocess.DEVNULL)
    return BUILD / "_ddtree_cuda.so"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernels", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=Path, default=BUILD / "report.md", help="where the table also goes (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        library = build(toolkit())
    except subprocess.CalledProcessError as error:
        print(
            f"error: {error.cmd[0]} failed (exit status {error.returncode}); its output is above.",
            file=sys.stderr,
        )
        return 1
    report = [
        sys.executable,
        ROOT / "sgl-kernel" / "tools" / "kernel_report.py",
        library,
        "--output",
        arguments.report,
    ]
    return subprocess.call(report)


if __name__ == "__main__":
    sys.exit(main())
