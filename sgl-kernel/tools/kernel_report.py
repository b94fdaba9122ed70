#!/usr/bin/env python3
"""Reads the built CUDA library and reports what each kernel needs on each architecture.

Columns: registers per thread, local-memory instructions (LDL + STL, from spills and indexed arrays), shared memory per
block, tensor-core instructions, threads per block, and theoretical occupancy with its limit. The exit status is 1 if
- a hot kernel (attention, combine, recurrent or indexer) has more local-memory instructions than
  KNOWN_LOCAL_MEMORY allows,
- a kernel that multiplies matrices (attention, recurrent verify or index logits) has no tensor-core instruction or is
  missing for an architecture, or
- a block needs more shared memory than sm_120 has, or than sm_90 has for a kernel built only for sm_90a.

    python tools/kernel_report.py python/sgl_kernel/ddtree/_ddtree_cuda.so [--output report.md]

Needs cuobjdump (from the CUDA toolkit or the triton package), c++filt and a C++ compiler, but no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = (ROOT / "csrc/common/shared_memory.h").read_text()
# Bytes per block: the limit of sm_120, and that of sm_90 for the kernels in sm90/ folders, the only ones built for sm_90a.
MAX_SHARED, MAX_SHARED_SM90A = (
    int(re.search(rf"\b{name} = (\d+);", LIMITS)[1]) for name in ("kMaxSharedMemory", "kMaxSharedMemorySm90")
)
# Allowed LDL + STL of a hot kernel by (kernel without its element type, architecture), for example
# ("gqa fp8 256 64", "sm_120"): 6. For 16-bit KV the word of KV_MATH is left out. Kernels that are not listed may have
# none. Entries may only shrink.
KNOWN_LOCAL_MEMORY: dict[tuple[str, str], int] = {}
KV_MATH = ("16bit", "fp8", "converted")  # enum KvMath in csrc/tree_verify/traits.h
MATRIX = re.compile(
    r"((gqa|mla)_(fp8_)?(sm90_)?(partial|tasks)|recurrent_verify|index_logits(_sm90)?)_kernel"
)
HOT = re.compile(
    MATRIX.pattern + r"|(combine|recurrent_commit|conv_verify|conv_commit|store_index_keys)_kernel"
)
TENSOR_CORE = re.compile(r"\b[HQIDO]G?MMA\b|\bUTC[A-Z]*MMA\b")
LOCAL_MEMORY = re.compile(r"\b(LDL|STL)\b")


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor (CUDA programming guide, specifications per compute capability)."""

    warps: int
    blocks: int
    shared: int  # bytes
    registers: int = 65_536
    reserved_shared: int = 1024  # bytes per block that the system takes


ARCHITECTURES = {
    "sm_90": Architecture(warps=64, blocks=32, shared=228 * 1024),
    "sm_100": Architecture(warps=64, blocks=32, shared=228 * 1024),
    "sm_103": Architecture(warps=64, blocks=32, shared=228 * 1024),
    "sm_120": Architecture(warps=48, blocks=24, shared=100 * 1024),
}


@dataclass
class Kernel:
    name: str  # demangled
    arch: str
    registers: int = 0
    stack: int = 0
    static_shared: int = 0
    dynamic_shared: int = 0
    threads: int | None = None
    local_memory: int = 0
    tensor_core: int = 0
    problems: list = field(default_factory=list)

    @property
    def shared(self) -> int:
        return self.static_shared + self.dynamic_shared


def find_cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    home = os.environ.get("CUDA_HOME")
    if found is None and home and Path(home, "bin/cuobjdump").exists():
        found = str(Path(home, "bin/cuobjdump"))
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None:
        bundled = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        found = str(bundled) if bundled.exists() else None
    if found is None:
        sys.exit(
            "kernel_report: no cuobjdump on PATH, in CUDA_HOME or in the triton package: install the CUDA toolkit "
            "or triton"
        )
    return found


def lines_of(*command: str) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout
    if process.returncode:
        sys.exit(f"kernel_report: `{' '.join(command)}` failed")


def demangle(names: list[str]) -> dict[str, str]:
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, result.stdout.splitlines(), strict=True))


def short_name(demangled: str) -> str:
    """Remove the return type, the parameters and our own namespace, and name the values of KvMath."""
    name = re.sub(r"^void ", "", demangled)
    name = name.replace("(anonymous namespace)::", "").replace("ddtree::", "")
    name = re.sub(r"\(KvMath\)(\d)", lambda match: KV_MATH[int(match[1])], name)
    return re.sub(r"\(.*$", "", name).replace("> >", ">>")


def launch_shapes() -> dict[tuple, tuple[int, int]]:
    """Read what the traits say about each kernel that multiplies matrices.

    Returns (kernel, type, flag, head size, tile height or warpgroups) -> (threads, dynamic shared bytes). The flag of
    a common kernel is its KvMath, that of an fp8 kernel of sm_90 is whether it splits Q and P. A kernel of sm_90 with
    "paged" in its name loads by page, and a 16-bit one with "tasks" is for several tasks per block. For recurrent
    verify the key is ("recurrent" or "recurrent_wide", type of the state, decay per channel, d_k, tiles of nodes), for
    the index logits ("index" or "index_sm90", type, 0, head size, keys per tile).
    """
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/launch_shapes"
        compiler = os.environ.get("CXX", "c++")
        source = str(ROOT / "tools/launch_shapes.cc")
        subprocess.run([compiler, "-std=c++17", f"-I{ROOT}/csrc", source, "-o", program], check=True)
        output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    shapes = {}
    for line in output.splitlines():
        kind, element, *numbers = line.split()
        flag, size, tile, threads, shared = map(int, numbers)
        shapes[kind, element, flag, size, tile] = threads, shared
    return shapes


def shape_key(name: str) -> tuple | None:
    """Return the key of a kernel in launch_shapes(), or None if it is not there."""
    flag = {"true": 1, "false": 0} | {math: i for i, math in enumerate(KV_MATH)}
    if match := re.search(
        r"(Gqa|Mla)(Fp8)?(Sm90)?Traits<(\w+)(?:, ([a-z]\w+|16bit))?(?:, (\d+), (\d+))?"
        r"(?:, (true|false))?(?:, (true|false))?>",
        name,
    ):
        kernel, fp8, own, element, option, size, tile, paged, tasks = match.groups()
        if own and not fp8:  # no option, but MlaSm90Traits<T, paged> reads like one
            option, paged = None, paged or option
        words = (kernel, fp8, "paged" if paged == "true" else None, "tasks" if tasks == "true" else None, own)
        kind = "_".join(word.lower() for word in words if word)
        return kind, element, flag[option or "false"], int(size or 0), int(tile or 0)
    if match := re.search(r"VerifyTraits<(\w+), (\d+), (\d+), (true|false), (true|false)>", name):
        state, d_k, tiles, channel, wide = match.groups()
        return "recurrent_wide" if flag[wide] else "recurrent", state, flag[channel], int(d_k), int(tiles)
    if match := re.match(r"index_logits(_sm90)?_kernel", name):
        return f"index{match[1] or ''}", "__nv_bfloat16", 0, 128, 64 if match[1] else 32
    return None


def shape_of(name: str, shapes: dict) -> tuple[int, int] | None:
    key = shape_key(name)
    return None if key is None else shapes[key]


def missing_kernels(kernels: list[Kernel], shapes: dict) -> list[str]:
    """List the kernels of launch_shapes() that the library lacks.

    The kernels of sm_90a are required if the library is built for any sm_90, the others on every architecture. At run
    time a missing kernel would only show as a slower or failing launch.
    """
    built = {(kernel.arch, shape_key(kernel.name)) for kernel in kernels}
    architectures = {kernel.arch for kernel in kernels}
    common = architectures - {"sm_90a"} if "sm_90" in architectures else architectures
    own = {"sm_90a"} if architectures & {"sm_90", "sm_90a"} else set()
    return [
        " ".join(map(str, (*shape, arch)))
        for shape in shapes
        for arch in sorted(own if shape[0].endswith("sm90") else common)
        if (arch, shape) not in built
    ]


def launch_bounds(cubin: bytes) -> dict[str, int]:
    """Read kernel -> threads per block (__launch_bounds__) from the .nv.info sections of a cubin (64-bit ELF)."""
    max_threads = 0x05  # EIATTR_MAX_THREADS: three 32-bit dimensions
    table, entry_size, count, names_index = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    bounds = {}
    for name_at, _, _, _, offset, size in headers:
        start = names_offset + name_at
        section = cubin[start : cubin.index(b"\0", start)].decode()
        if not section.startswith(".nv.info."):
            continue
        at, end = offset, offset + size
        while at + 4 <= end:
            kind, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if kind == 4 and attribute == max_threads:
                x, y, z = struct.unpack_from("<III", cubin, at + 4)
                bounds[section.removeprefix(".nv.info.")] = x * y * z
            at += 4 + (value if kind == 4 else 0)
    return bounds


def static_shared(arch: str, shared: int) -> int:
    """Return the shared memory that a kernel declares.

    cuobjdump's SHARED also counts what the system reserves in each block that uses shared memory. The limits per block
    and the sizes of the traits do not.
    """
    limits = ARCHITECTURES.get(re.sub(r"[af]$", "", arch))
    reserved = limits.reserved_shared if limits else 0
    return shared - reserved if shared >= reserved else shared


def read_library(library: Path) -> list[Kernel]:
    cuobjdump = find_cuobjdump()
    found: dict[tuple[str, str], Kernel] = {}

    arch = mangled = ""
    for line in lines_of(cuobjdump, "-res-usage", str(library)):
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            mangled = match[1]
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            found[arch, mangled] = Kernel("", arch, registers, stack, static_shared(arch, shared))

    for line in lines_of(cuobjdump, "-sass", str(library)):
        if match := re.match(r"\s+code for (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s+Function : (\S+)", line):
            mangled = match[1]
        elif TENSOR_CORE.search(line):
            found[arch, mangled].tensor_core += 1
        elif LOCAL_MEMORY.search(line):
            found[arch, mangled].local_memory += 1

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump, "-xelf", "all", str(library.resolve())],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        bounds: dict[str, dict[str, int]] = defaultdict(dict)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            arch = re.search(r"\.(sm_\w+)\.cubin$", cubin.name)[1]
            bounds[arch].update(launch_bounds(cubin.read_bytes()))

    names = demangle(sorted({mangled for _, mangled in found}))
    shapes = launch_shapes()
    for (arch, mangled), kernel in found.items():
        kernel.name = short_name(names[mangled])
        kernel.threads = bounds[arch].get(mangled)
        if shape := shape_of(kernel.name, shapes):
            kernel.threads, kernel.dynamic_shared = shape
    return sorted(found.values(), key=lambda k: (k.name, int(re.sub(r"\D", "", k.arch))))


def occupancy(kernel: Kernel) -> str:
    """Return the resident warps as a share of the multiprocessor's warps, and what limits them."""
    limits = ARCHITECTURES.get(re.sub(r"[af]$", "", kernel.arch))
    if limits is None or kernel.threads is None:
        return "-"
    warps = -(-kernel.threads // 32)
    registers_per_warp = -(-kernel.registers * 32 // 256) * 256  # allocated in units of 256
    warps_by_registers = limits.registers // registers_per_warp // 4 * 4  # over four schedulers
    blocks = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared // (kernel.shared + limits.reserved_shared),
    }
    limit = min(blocks, key=blocks.get)
    return f"{100 * blocks[limit] * warps // limits.warps}% ({blocks[limit]} blocks, {limit})"


def allowed_local_memory(kernel: Kernel) -> int:
    match = re.search(r"(Gqa|Mla)Traits<\w+, (\w+)(?:, (\d+), (\d+))?>", kernel.name)
    if match is None:
        return 0
    kind, math, *sizes = match.groups()
    words = [kind.lower(), math if math != KV_MATH[0] else None, *sizes]
    return KNOWN_LOCAL_MEMORY.get((" ".join(filter(None, words)), kernel.arch), 0)


def judge(kernel: Kernel) -> None:
    if HOT.search(kernel.name) and kernel.local_memory > allowed_local_memory(kernel):
        kernel.problems.append(f"{kernel.local_memory} local-memory instructions")
    if MATRIX.search(kernel.name) and not kernel.tensor_core:
        kernel.problems.append("no tensor-core instruction")
    limit = MAX_SHARED_SM90A if kernel.arch == "sm_90a" else MAX_SHARED
    if kernel.shared > limit:
        kernel.problems.append(f"{kernel.shared} bytes of shared memory, {limit} allowed")


def table(kernels: list[Kernel]) -> str:
    rows = [
        "kernel|arch|registers|LDL+STL|shared bytes|tensor-core|threads|occupancy",
        "-|-|-:|-:|-:|-:|-:|-",
    ]
    for k in kernels:
        rows.append(
            f"`{k.name}`|{k.arch}|{k.registers}|{k.local_memory}|{k.shared}|{k.tensor_core}|"
            f"{k.threads or '-'}|{occupancy(k)}"
        )
    return "\n".join(f"|{row}|" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="_ddtree_cuda.so")
    parser.add_argument("--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    if not arguments.library.exists():
        sys.exit(f"kernel_report: no file {arguments.library}: build the CUDA library first")
    kernels = read_library(arguments.library)
    for kernel in kernels:
        judge(kernel)
    text = table(kernels)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    bad = [k for k in kernels if k.problems]
    for kernel in bad:
        print(f"FAIL {kernel.name} {kernel.arch}: {'; '.join(kernel.problems)}")
    for kernel in kernels:
        if HOT.search(kernel.name) and kernel.local_memory and not kernel.problems:
            print(
                f"KNOWN {kernel.name} {kernel.arch}: {kernel.local_memory} local-memory instructions (goal: 0)"
            )
    missing = missing_kernels(kernels, launch_shapes())
    for kernel in missing:
        print(f"MISSING {kernel}")
    hot = sum(bool(HOT.search(k.name)) for k in kernels)
    print(
        f"{len(kernels)} kernels x architectures, {hot} of them hot: {len(bad)} with problems, "
        f"{len(missing)} missing"
    )
    return 1 if bad or missing or not hot else 0


if __name__ == "__main__":
    sys.exit(main())
