"""The CUDA architectures of our kernels: sgl-kernel/architectures.txt lists them."""

from __future__ import annotations

from tools.upstream import ROOT

LIST = ROOT / "sgl-kernel" / "architectures.txt"


def architectures(name: str) -> str:
    """Return the architectures listed under `name` ('default' or 'image'), written as in TORCH_CUDA_ARCH_LIST.

    Raises:
        KeyError: the list has no such name.
    """
    lines = (line.partition("=") for line in LIST.read_text().splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in lines}[name]
