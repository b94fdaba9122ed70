"""Turns NVIDIA's wheels, which have the layout of a CUDA runtime, into a toolkit.

    python -m tools.image.cuda ROOT          ROOT: site-packages/nvidia/cu13

nvcc looks for lib64, and linkers look for libcudart.so. Kernels that are compiled at first use link with
-lcuda, which needs a stub on a machine without a driver.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tools.commands import run_checked
from tools.errors import ToolError, exit_on_error

CUDA_ERROR_STUB_LIBRARY = 34  # every function of NVIDIA's own stub returns this


def driver_functions(header: str) -> list[str]:
    """Return the driver API's functions in the text of cuda.h, including renamed ones (cuMemAlloc_v2)."""
    declared = re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header)
    renamed = re.findall(r"(?m)^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)\s*$", header)
    return sorted({*declared, *renamed})


def complete(root: Path, compiler: str = "cc") -> None:
    """Add lib64, lib/libcudart.so and lib/stubs/libcuda.so to the toolkit. Keep those that exist.

    Args:
        root: the toolkit's folder.
        compiler: the C compiler that makes the stub.

    Raises:
        ToolError: `root` has no libcudart, or the stub does not compile.
        FileNotFoundError: `root` has no cuda.h.
    """
    library = root / "lib"
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    if not (library / "libcudart.so").exists():
        runtime = next(library.glob("libcudart.so.*"), None)
        if runtime is None:
            raise ToolError(f"{library}: expected libcudart.so.*, found none.")
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
        run_checked([compiler, *options, "-o", stub, source.name])


if __name__ == "__main__":
    with exit_on_error():
        complete(Path(sys.argv[1]))
