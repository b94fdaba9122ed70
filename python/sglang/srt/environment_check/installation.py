"""What is installed: versions, caches, bills of materials, and whether what serves can be imported."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang.srt.environment_check.report import (
    FAIL,
    NONE,
    OK,
    SHARE,
    WARN,
    Row,
    build_info,
    last_line,
)

DISTRIBUTIONS = (
    "sglang",
    "sglang-kernel",
    "sglang-kernel-ddtree",
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn-4",
    "sgl-deep-gemm",
    "nvidia-cutlass-dsl",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
)
MODULES = {
    "cpu": (
        "torch",
        "triton",
        "sgl_kernel",
        "sgl_kernel.ddtree",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.speculative.ddtree.worker",
    ),
    "cuda": (
        "torch",
        "torchvision",
        "triton",
        "flashinfer",
        "sgl_kernel",
        "sgl_kernel.ddtree",
        "deep_gemm",
        "flash_mla",
        "flash_attn.cute",
        "cutlass.cute",
        "tilelang",
        "quack",
        "cudnn",
        "nvshmem.core",
        "nccl.core",
        "pyarrow",
        "datasets",
        "scipy.stats",
        "xgrammar",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.speculative.ddtree.worker",
        "sglang.srt.layers.attention.flashinfer_backend",
        "sglang.srt.layers.attention.flashinfer_mla_backend",
        "sglang.srt.layers.attention.trtllm_mha_backend",
        "sglang.srt.layers.attention.trtllm_mla_backend",
        "sglang.srt.layers.attention.flashattention_backend",
        "sglang.srt.layers.attention.triton_backend",
        "sglang.srt.layers.attention.dsa_backend",
        "sglang.srt.layers.quantization.modelopt_quant",
        "sglang.srt.layers.quantization.fp8",
        "sglang.kernels.ops.attention.flash_attention_v4_sm120",
    ),
}
WITH_A_CARD = ("deep_ep",)  # these ask for a device when they are imported
IMPORT_SECONDS = 600  # the first import on a slow disk compiles thousands of Python files
FREE_WARNING = 2 << 30  # bytes; a large model's JIT caches stay below


def installed(name: str) -> str | None:
    """The version of the distribution `name`, None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def profile() -> str:
    """'cuda' where torch was built for it, else 'cpu'."""
    import torch

    return "cpu" if torch.version.cuda is None else "cuda"


def versions() -> list[Row]:
    import torch

    found = {name: installed(name) for name in DISTRIBUTIONS}
    found |= {
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
    }
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    said = build_info().get("version")
    if said and said != found["sglang"]:
        return [Row("versions", FAIL, f"sglang: the image says {said}, installed is {found['sglang']}")]
    if found["sglang-kernel-ddtree"] is None:
        return [Row("versions", FAIL, "sglang-kernel-ddtree is not installed: DDTREE cannot run")]
    return [Row("versions", OK, shown, found)]


def caches() -> list[Row]:
    """Each folder that a variable of the image places, or the user's cache folder outside of one."""
    root = os.environ.get("SGLANG_IMAGE_CACHE", "/cache")
    folders = {name: Path(value) for name, value in os.environ.items() if value.startswith(root + "/")}
    if not folders:
        folders = {"XDG_CACHE_HOME": Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")}
    problems = []
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as probe:
                probe.write(b"probe")
        except OSError as error:
            problems.append(f"{name}={folder}: {error.strerror}")
    place = os.path.commonpath([str(folder) for folder in folders.values()])
    if problems:
        advice = f"mount a volume at {root} that uid {os.getuid()} or group {os.getgid()} may write"
        return [Row("caches", FAIL, f"{'; '.join(problems)}: {advice}")]
    state = os.statvfs(place)
    if state.f_flag & os.ST_NOEXEC:
        return [
            Row(
                "caches", FAIL, f"{place} is mounted noexec: kernels that are compiled there cannot be loaded"
            )
        ]
    free = state.f_bavail * state.f_frsize
    data = {name: str(folder) for name, folder in folders.items()}
    status = WARN if free < FREE_WARNING else OK
    return [
        Row(
            "caches", status, f"{len(folders)} folders under {place} writable, {free / 1e9:.0f} GB free", data
        )
    ]


def sboms() -> list[Row]:
    if not build_info():
        return [Row("sbom", NONE, f"not an image of ours: {SHARE} has no build.json")]
    counts = {}
    for name in ("python", "debian"):
        path = SHARE / "sbom" / f"{name}.cdx.json"
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            return [Row("sbom", FAIL, f"{path}: {error}")]
        counts[name] = len(document.get("components", []))
        names = {component["name"] for component in document.get("components", [])}
        expected = "sglang" if name == "python" else "libc6"
        if document.get("bomFormat") != "CycloneDX" or expected not in names:
            return [Row("sbom", FAIL, f"{path}: expected CycloneDX with {expected} among its components")]
    shown = ", ".join(f"{count} {name} components" for name, count in counts.items())
    return [Row("sbom", OK, f"CycloneDX: {shown}", counts)]


def left_out() -> list[Row]:
    """What the image build removed, and that it is gone."""
    path = SHARE / "pruned.json"
    if not path.exists():
        return [Row("left out", NONE, "this installation is complete")]
    records = json.loads(path.read_text())
    from sglang.srt.environment_check.report import site_packages

    back = [p for r in records if r["verb"] == "remove" for p in r["paths"] if list(site_packages().glob(p))]
    if back:
        return [Row("left out", FAIL, f"{', '.join(back)}: expected to be gone, found")]
    saved = sum(record["bytes"] for record in records)
    return [Row("left out", OK, f"{saved / 1e9:.2f} GB by {len(records)} rules", {"rules": records})]


_IMPORTER = """
import importlib, json, sys, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as exception:
        error = f"{type(exception).__name__}: {exception}"
        traceback.print_exc()
    print(json.dumps([name, error]), flush=True)
"""


def imports() -> list[Row]:
    """Imports what serves, in a process of its own. Without a driver a stub of libcuda stands in for it."""
    import torch
    from sglang.srt.environment_check.toolchain import driver_stub

    names = (*MODULES[profile()], *(WITH_A_CARD if torch.cuda.is_available() else ()))
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        stub = driver_stub() if profile() == "cuda" else None
        if stub:
            Path(folder, "libcuda.so.1").symlink_to(stub)
            environment["LD_LIBRARY_PATH"] = f"{folder}:{environment.get('LD_LIBRARY_PATH', '')}"
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTER, *names],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
        )
    results = {}
    for line in done.stdout.splitlines():
        if line.startswith('["'):
            name, error = json.loads(line)
            results[name] = error
    broken = {name: results.get(name, "the process died: " + last_line(done.stderr)) for name in names}
    broken = {name: error for name, error in broken.items() if error}
    if broken:
        name, error = next(iter(broken.items()))
        return [
            Row(
                "imports",
                FAIL,
                f"{len(broken)} of {len(names)} fail: {name}: {error[:300]}",
                {"broken": broken},
            )
        ]
    note = f", with a stub for the driver and without {', '.join(WITH_A_CARD)}" if stub else ""
    return [Row("imports", OK, f"{len(names)} modules that serve{note}", {"modules": list(names)})]
