"""Makes a CUDA toolkit of NVIDIA's wheels, which lay out a runtime only.

    python -m tools.image.cuda ROOT          ROOT: site-packages/nvidia/cu13

nvcc looks for lib64, linkers look for libcudart.so, and what is compiled at first use links with -lcuda, which on a
machine without a driver only a stub answers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA_ERROR_STUB_LIBRARY = 34  # what NVIDIA's own stub returns from every function


def driver_functions(header: str) -> list[str]:
    """Names of the driver API's functions in the text of cuda.h, with those that a macro renames (cuMemAlloc_v2)."""
    declared = re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header)
    renamed = re.findall(r"(?m)^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)\s*$", header)
    return sorted({*declared, *renamed})


def complete(root: Path, compiler: str = "cc") -> None:
    """Adds lib64, lib/libcudart.so and lib/stubs/libcuda.so to the toolkit at `root`; keeps those that are there.

    Raises:
        FileNotFoundError: `root` has no libcudart or no cuda.h.
        subprocess.CalledProcessError: the stub does not compile.
    """
    library = root / "lib"
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    if not (library / "libcudart.so").exists():
        runtime = next(library.glob("libcudart.so.*"), None)
        if runtime is None:
            raise FileNotFoundError(f"{library}: expected libcudart.so.*, found none")
        (library / "libcudart.so").symlink_to(runtime.name)
    stub = library / "stubs" / "libcuda.so"
    if stub.exists():
        return
    names = driver_functions((root / "include" / "cuda.h").read_text())
    stub.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.writelines(f"int {name}(void) {{ return {CUDA_ERROR_STUB_LIBRARY}; }}\n" for name in names)
        source.flush()
        options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([compiler, *options, "-o", stub, source.name], check=True)


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
