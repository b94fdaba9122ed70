"""Checks what is installed: versions, caches, bills of materials, and imports of the modules that serve."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang.srt.environment_check import layout
from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row, last_line
from sglang.srt.environment_check.toolchain import driver_stub

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
# Outside an image, any other library may be left out on purpose. Upstream imports those only when they are used.
REQUIRED = ("torch", "triton", "sgl_kernel", "sglang")
WITH_A_CARD = ("deep_ep",)  # importing these needs a device
IMPORT_SECONDS = 600  # the first import on a slow disk compiles thousands of Python files
FREE_WARNING = 2 << 30  # bytes, more than the JIT caches of a large model take


def versions() -> list[Row]:
    """The versions of the main distributions, and whether they match the image's record."""
    import torch

    found = {name: layout.installed(name) for name in DISTRIBUTIONS}
    found |= {
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
    }
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    said = layout.build_info().get("version")
    if said and said != found["sglang"]:
        return [Row("versions", FAIL, f"sglang: expected {said} as the image records, got {found['sglang']}")]
    if found["sglang-kernel-ddtree"] is None:
        return [Row("versions", FAIL, "sglang-kernel-ddtree is not installed, so DDTREE cannot run")]
    return [Row("versions", OK, shown, found)]


def caches() -> list[Row]:
    """Whether cache folders are writable: those that the image's variables name, or the user's outside an image."""
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
        advice = f"mount a volume at {root} that uid {os.getuid()} or group {os.getgid()} can write to"
        return [Row("caches", FAIL, f"{'; '.join(problems)}; {advice}")]
    state = os.statvfs(place)
    if state.f_flag & os.ST_NOEXEC:
        return [
            Row(
                "caches",
                FAIL,
                f"{place} is mounted noexec, so kernels that are compiled there cannot be loaded",
            )
        ]
    free = state.f_bavail * state.f_frsize
    data = {name: str(folder) for name, folder in folders.items()}
    status = WARN if free < FREE_WARNING else OK
    return [
        Row(
            "caches",
            status,
            f"writable folders under {place}: {len(folders)}; {free / 1e9:.0f} GB free",
            data,
        )
    ]


def sboms() -> list[Row]:
    """Whether the image's bills of materials are complete."""
    if not layout.build_info():
        return [Row("sbom", NONE, f"not one of our images: {layout.SHARE} has no build.json")]
    counts = {}
    for name in ("python", "debian"):
        path = layout.SHARE / "sbom" / f"{name}.cdx.json"
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
    """Whether the files that the image build removed are absent."""
    path = layout.SHARE / "pruned.json"
    if not path.exists():
        return [Row("left out", NONE, "nothing was removed from this installation")]
    records = json.loads(path.read_text())
    removed = [p for r in records if r["verb"] == "remove" for p in r["paths"]]
    back = [pattern for pattern in removed if list(layout.site_packages().glob(pattern))]
    if back:
        return [Row("left out", FAIL, f"{', '.join(back)}: expected to be removed, but found")]
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
    """Import the modules that serve, in a separate process. Without a driver it provides a stub of libcuda."""
    import torch

    wanted = (*MODULES[layout.profile()], *(WITH_A_CARD if torch.cuda.is_available() else ()))
    absent = [] if layout.build_info() else [name for name in wanted if _left_out(name)]
    names = [name for name in wanted if name not in absent]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        stub = driver_stub() if layout.profile() == "cuda" else None
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
    note = f", with a stub of the driver and without {', '.join(WITH_A_CARD)}" if stub else ""
    if absent:
        note += f"; not installed: {', '.join(absent)}"
    return [
        Row("imports", OK, f"{len(names)} modules that serve{note}", {"modules": names, "absent": absent})
    ]


def _left_out(module: str) -> bool:
    """Whether the library of ``module`` is optional and not installed."""
    library = module.partition(".")[0]
    return library not in REQUIRED and importlib.util.find_spec(library) is None
