"""Loads the op libraries, once, when sgl_kernel.ddtree is imported."""

from pathlib import Path

import torch

_FOLDER = Path(__file__).resolve().parent


def load() -> None:
    """Registers the ops under torch.ops.sgl_kernel: the CPU keys always, the CUDA keys where torch has CUDA.

    Raises:
        ImportError: the CPU library is missing (the package was not built), or torch is older than its stable
            ABI.
    """
    cpu_library = _FOLDER / "_ddtree_cpu.so"
    if not cpu_library.exists():
        raise ImportError(
            f"{cpu_library} is missing: build it with `pip install --no-build-isolation ./sgl-kernel`"
        )
    torch.ops.load_library(str(cpu_library))
    cuda_library = _FOLDER / "_ddtree_cuda.so"
    # A build of torch without CUDA lacks libtorch_cuda.so, which the CUDA library needs.
    if torch.version.cuda is not None and cuda_library.exists():
        torch.ops.load_library(str(cuda_library))


load()
