"""Builds the wheels of our kernels for a profile. For the CPU profile, also builds the stub of sglang-kernel.

    python -m tools.image.native cpu|cuda OUT

It runs in the image's build stage, in an environment that has pip, the build tools and, for `cpu`, torch. For
`cuda` it downloads torch, whose headers and libraries the kernels are built against, and NVIDIA's compiler,
both locked by hash. TORCH_CUDA_ARCH_LIST chooses the architectures.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tools import kernels
from tools.commands import pip_wheel, run_checked
from tools.errors import ToolError, exit_on_error
from tools.upstream import ROOT


def locked(lock: Path, name: str) -> str:
    """Return the lines of `lock` that pin the package `name`, including its hashes.

    Raises:
        ToolError: the lock does not pin it.
    """
    lines, inside = [], False
    for line in lock.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            inside = line.split("==")[0].strip() == name
        if inside:
            lines.append(line)
    if not lines:
        raise ToolError(f"{lock.name}: expected a pin of {name}, found none.")
    return "".join(lines)


def build(profile: str, out: Path) -> None:
    """Write the wheels of `profile` ('cpu' or 'cuda') to `out`.

    Raises:
        ToolError: a build failed. Its own output says why.
    """
    out.mkdir(parents=True, exist_ok=True)
    wheel = pip_wheel(sys.executable, out)
    environment = dict(os.environ)
    scripts = Path(sys.executable).parent
    if profile == "cpu":
        environment["PATH"] = f"{scripts}:{environment['PATH']}"
        run_checked([*wheel, ROOT / "sgl-kernel" / "cpu_stub"], environment)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".lock") as pins:
            pins.write(locked(ROOT / "requirements" / "cuda.lock", "torch"))
            pins.flush()
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps"]
            run_checked([*pip, "--require-hashes", "-r", pins.name])
        environment |= kernels.compiler_environment(kernels.toolkit(), scripts)
    setting = f"--config-settings=cmake.define.DDTREE_CUDA={'ON' if profile == 'cuda' else 'OFF'}"
    run_checked([*wheel, setting, ROOT / "sgl-kernel"], environment)
    print("built", *sorted(path.name for path in out.glob("*.whl")))


if __name__ == "__main__":
    with exit_on_error():
        build(sys.argv[1], Path(sys.argv[2]))
