"""Which architectures each shipped library was built for, and which of our kernels each has."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row, site_packages
from sglang.srt.environment_check.toolchain import architectures, cuda_home

# Libraries with device code that serve; torch's own is large and lists the vendor's choice.
LIBRARIES = (
    "sgl_kernel/ddtree/_ddtree_cuda.so",
    "sgl_kernel/**/common_ops*.so",
    "sgl_kernel/*_ops*.so",
    "flash_mla/*.so",
    "deep_ep/*.so",
    "torch/lib/libtorch_cuda.so",
)
LIST_SECONDS = 300


def cuobjdump() -> Path | None:
    """NVIDIA's lister: the toolkit's, or the copy that Triton brings."""
    home, spec = cuda_home(), importlib.util.find_spec("triton")
    candidates = [home / "bin" / "cuobjdump" if home else None, shutil.which("cuobjdump")]
    candidates.append(
        Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    )
    return next((Path(c) for c in candidates if c and Path(c).is_file()), None)


def listing(*arguments: str) -> str:
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump: expected in CUDA_HOME, on PATH or in the triton package")
    return subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=LIST_SECONDS, check=True
    ).stdout


def cubins_of(library: Path) -> Counter:
    """Architecture (sm_120f) -> number of cubins in `library`."""
    return Counter(re.findall(r"\.(sm_\w+)\.cubin", listing("--list-elf", str(library))))


def kernels_of(library: Path) -> dict[str, set[str]]:
    """Architecture -> mangled names of the kernels that `library` has for it."""
    found, architecture = defaultdict(set), ""
    for line in listing("--dump-resource-usage", str(library)).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r" Function (\S+):", line):
            found[architecture].add(match[1])
    return dict(found)


def serves(cubin: str, capability: tuple[int, int]) -> bool:
    """Whether a card of this compute capability loads a cubin of architecture `cubin` (sm_90, sm_100a, sm_120f).

    Plain and family targets also serve later minor versions of their major one; an "a" target serves its own only.
    """
    number, suffix = re.fullmatch(r"sm_(\d+)([af]?)", cubin).groups()
    major, minor = int(number[:-1]), int(number[-1])
    if suffix == "a":
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def libraries() -> list[Row]:
    from sglang.srt.environment_check.installation import profile

    if profile() == "cpu":
        return [Row("architectures", NONE, "the CPU profile ships no device code")]
    site, found = site_packages(), {}
    for pattern in LIBRARIES:
        for path in sorted(site.glob(pattern)):
            found.setdefault(path.relative_to(site).as_posix(), dict(sorted(cubins_of(path).items())))
    rows = []
    for name, counts in found.items():
        shown = " ".join(architecture.removeprefix("sm_") for architecture in counts)
        rows.append(Row(f"archs {name}", OK if counts else WARN, shown or "no device code", counts))
    return rows


def kernels() -> list[Row]:
    """Our own kernels, an architecture a row. One that only a single architecture has was written for it."""
    from sglang.srt.environment_check.installation import profile

    if profile() == "cpu":
        return []
    library = site_packages() / "sgl_kernel" / "ddtree" / "_ddtree_cuda.so"
    if not library.exists():
        return [Row("our kernels", FAIL, f"{library} is missing: DDTREE cannot run on a GPU")]
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
