"""The GPU architectures that each shipped library was built for, and our kernels for each architecture."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

from sglang.srt.environment_check import layout
from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row

# The libraries whose device code serves requests.
LIBRARIES = (
    "sgl_kernel/ddtree/_ddtree_cuda.so",
    "sgl_kernel/**/common_ops*.so",
    "sgl_kernel/*_ops*.so",
    "flash_mla/*.so",
    "deep_ep/*.so",
    "torch/lib/libtorch_cuda.so",
)
LIST_SECONDS = 300


def architectures() -> list[str]:
    """The architectures that this installation was built for, in nvcc's notation: ['90', '100a', '103a', '120f'].

    An image records what it was built for. Elsewhere these are the architectures of our library. Whoever built it chose
    them, so no other architecture counts as missing.
    """
    asked = layout.build_info().get("architectures")
    if asked:
        return [entry.replace(".", "") for entry in asked.split(";")]
    library = layout.ddtree_library()
    if not library.exists():
        return []
    names = [name.removeprefix("sm_") for name in cubins_of(library)]
    return sorted(names, key=lambda name: int(name.rstrip("af")))


def cuobjdump() -> Path | None:
    """NVIDIA's cuobjdump, from the CUDA toolkit, PATH or the Triton package."""
    home, spec = layout.cuda_home(), importlib.util.find_spec("triton")
    candidates = [home / "bin" / "cuobjdump" if home else None, shutil.which("cuobjdump")]
    candidates.append(
        Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    )
    return next((Path(c) for c in candidates if c and Path(c).is_file()), None)


def listing(*arguments: str) -> str:
    """The output of cuobjdump.

    Raises:
        FileNotFoundError: there is no cuobjdump.
    """
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError(
            "cuobjdump: expected in CUDA_HOME, on PATH or in the triton package, found none"
        )
    return subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=LIST_SECONDS, check=True
    ).stdout


def cubins_of(library: Path) -> Counter[str]:
    """The number of cubins in ``library`` per architecture, such as 'sm_120f'."""
    return Counter(re.findall(r"\.(sm_\w+)\.cubin", listing("--list-elf", str(library))))


def kernels_of(library: Path) -> dict[str, set[str]]:
    """The mangled names of the kernels in ``library`` per architecture."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    architecture = ""
    for line in listing("--dump-resource-usage", str(library)).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r" Function (\S+):", line):
            found[architecture].add(match[1])
    return dict(found)


def serves(cubin: str, capability: tuple[int, int]) -> bool:
    """Whether a card of this compute capability can load a cubin.

    A plain or family target (sm_90, sm_120f) also runs on later minor versions of the same major version. An "a" target
    (sm_100a) runs on its exact version only.

    Raises:
        ValueError: ``cubin`` is not an architecture.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", cubin)
    if match is None:
        raise ValueError(f"cubin: expected an architecture such as sm_90, sm_100a or sm_120f, got {cubin!r}.")
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def libraries() -> list[Row]:
    """One row per shipped library, with the architectures that it was built for."""
    if layout.profile() == "cpu":
        return [Row("architectures", NONE, "the CPU profile ships no device code")]
    site = layout.site_packages()
    found: dict[str, dict[str, int]] = {}
    for pattern in LIBRARIES:
        for path in sorted(site.glob(pattern)):
            found.setdefault(path.relative_to(site).as_posix(), dict(sorted(cubins_of(path).items())))
    rows = []
    for name, counts in found.items():
        shown = " ".join(architecture.removeprefix("sm_") for architecture in counts)
        rows.append(Row(f"archs {name}", OK if counts else WARN, shown or "no device code", counts))
    return rows


def kernels() -> list[Row]:
    """One row per architecture, with our kernels for it.

    A kernel that only one architecture has was written for that architecture. Every other kernel must be present for
    all of them.
    """
    if layout.profile() == "cpu":
        return []
    library = layout.ddtree_library()
    if not library.exists():
        return [Row("our kernels", FAIL, f"{library} is missing, so DDTREE cannot run on a GPU")]
    found = kernels_of(library)
    holders = Counter(name for names in found.values() for name in names)
    common = {name for name, count in holders.items() if count > 1}
    rows = []
    for architecture in (f"sm_{name}" for name in architectures()):
        names = found.get(architecture, set())
        missing = sorted(common - names)
        detail = f"{len(names)} kernels" + (f", missing: {', '.join(missing)[:200]}" if missing else "")
        data = {"kernels": sorted(names), "missing": missing}
        rows.append(Row(f"our kernels {architecture}", FAIL if missing or not names else OK, detail, data))
    return rows
