"""Builds the wheels of our kernels for a profile, and for a CPU the stand-in for sglang-kernel.

    python -m tools.image.native cpu|cuda OUT

Runs in the image's build stage, in an environment that has pip, the build tools and, for `cpu`, torch. For `cuda` it
fetches torch (whose headers and libraries the kernels are built against) and NVIDIA's compiler by their locks.
TORCH_CUDA_ARCH_LIST names the architectures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import kernels
from tools.upstream import ROOT


def locked(lock: Path, name: str) -> str:
    """Returns the lines of `lock` that pin the package `name`, hashes included.

    Raises:
        KeyError: the lock does not pin it.
    """
    lines, inside = [], False
    for line in lock.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            inside = line.split("==")[0].strip() == name
        if inside:
            lines.append(line)
    if not lines:
        raise KeyError(f"{lock.name} pins no {name}")
    return "".join(lines)


def build(profile: str, out: Path) -> None:
    """Writes the wheels of `profile` ('cpu' or 'cuda') to `out`.

    Raises:
        subprocess.CalledProcessError: a build failed; its output has said why.
    """
    out.mkdir(parents=True, exist_ok=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out]
    environment = dict(os.environ)
    scripts = Path(sys.executable).parent
    if profile == "cpu":
        environment["PATH"] = f"{scripts}:{environment['PATH']}"
        subprocess.run([*wheel, ROOT / "sgl-kernel" / "cpu_stub"], check=True, env=environment)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".lock") as pins:
            pins.write(locked(ROOT / "requirements" / "cuda.lock", "torch"))
            pins.flush()
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps"]
            subprocess.run([*pip, "--require-hashes", "-r", pins.name], check=True)
        environment |= kernels.compiler_environment(kernels.toolkit(), scripts)
    setting = f"--config-settings=cmake.define.DDTREE_CUDA={'ON' if profile == 'cuda' else 'OFF'}"
    subprocess.run([*wheel, setting, ROOT / "sgl-kernel"], check=True, env=environment)
    print("built", *sorted(path.name for path in out.glob("*.whl")))


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
