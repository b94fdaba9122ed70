"""Loads the op libraries once, when sgl_kernel.ddtree is imported."""

from pathlib import Path

import torch

_FOLDER = Path(__file__).resolve().parent


def load() -> None:
    """Register the ops under torch.ops.sgl_kernel: always the CPU keys, and the CUDA keys if torch has CUDA.

    Raises:
        ImportError: the CPU library is missing because the package was not built.
        OSError: torch cannot load a library, for example because it is older than its stable ABI.
    """
    cpu_library = _FOLDER / "_ddtree_cpu.so"
    if not cpu_library.exists():
        raise ImportError(
            f"{cpu_library} is missing: build it with `pip install --no-build-isolation ./sgl-kernel`"
        )
    torch.ops.load_library(str(cpu_library))
    cuda_library = _FOLDER / "_ddtree_cuda.so"
    # The CUDA library needs libtorch_cuda.so, which a torch built without CUDA lacks.
    if torch.version.cuda is not None and cuda_library.exists():
        torch.ops.load_library(str(cuda_library))


load()
