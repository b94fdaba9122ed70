"""What kind of installation this is and where its parts are."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SHARE = Path(os.environ.get("SGLANG_IMAGE_SHARE", "/usr/share/sglang"))  # the image's records about itself


def build_info() -> dict:
    """What the image was built from. Empty outside an image."""
    try:
        return json.loads((SHARE / "build.json").read_text())
    except FileNotFoundError:
        return {}


def profile() -> str:
    """'cuda' if torch was built for CUDA, else 'cpu'."""
    import torch

    return "cpu" if torch.version.cuda is None else "cuda"


def installed(name: str) -> str | None:
    """The version of the distribution ``name``, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def site_packages() -> Path:
    """The folder that holds the packages of this installation."""
    import sglang

    return Path(sglang.__file__).resolve().parent.parent


def ddtree_library() -> Path:
    """The CUDA library of our kernels. It may not exist."""
    return site_packages() / "sgl_kernel" / "ddtree" / "_ddtree_cuda.so"


def cuda_home() -> Path | None:
    """The CUDA toolkit that JIT compilers find: CUDA_HOME, the CUDA wheels, or the toolkit of nvcc on PATH."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), site_packages() / "nvidia" / "cu13"]
    candidates += [Path(nvcc).resolve().parent.parent if nvcc else None, "/usr/local/cuda"]
    return next((Path(c) for c in candidates if c and Path(c, "bin", "nvcc").is_file()), None)
