"""What an image is made from, in one record: its labels, and /usr/share/sglang/build.json inside it.

python -m tools.image.info TARGET [ARCHITECTURES]        prints it as JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from tools.environment import source_files
from tools.upstream import ROOT, Pins

# Files that are also in the image and are not sources of an environment.
RECIPE = ("docker/Dockerfile", "docker/entrypoint.py", "docker/prune.toml")


def digest(files: list[Path]) -> str:
    """Return the sha256 of the files' names and contents."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def build_info(target: str, architectures: str = "") -> dict[str, str]:
    """Return the record of an image.

    Args:
        target: the stage of docker/Dockerfile, 'cpu' or 'cuda'.
        architectures: those of our kernels, written as in TORCH_CUDA_ARCH_LIST; empty for the CPU.

    Returns:
        version, upstream, target and architectures.
        patchset: the sha256 of the patches and of our modules.
        build_id: depends on everything that the image is made from, and names its folder of caches.
    """
    pins = Pins.load()
    sources = source_files()
    ours = [f for f in sources if f.relative_to(ROOT).parts[0] in ("patches", "python")]
    everything = digest([*sources, *(ROOT / name for name in RECIPE)])
    return {
        "version": pins.version,
        "upstream": pins.sglang,
        "target": target,
        "architectures": architectures,
        "patchset": digest(ours),
        "build_id": hashlib.sha256(f"{everything} {target} {architectures}".encode()).hexdigest()[:12],
    }


if __name__ == "__main__":
    print(json.dumps(build_info(*sys.argv[1:3]), indent=1))
