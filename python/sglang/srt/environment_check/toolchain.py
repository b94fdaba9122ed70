"""The compiler that is needed at first use: does it compile and link for every architecture of this build?"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang.srt.environment_check.report import FAIL, NONE, OK, Row, build_info, last_line, site_packages

COMPILE_SECONDS = 300
DEFAULT_ARCHITECTURES = "9.0;10.0a;10.3a;12.0f"
# What a JIT kernel uses: narrow floats, the runtime (-lcudart) and the driver (-lcuda). On sm_120f also the FP4
# block-scale mma, which a plain sm_120 target refuses.
PROGRAM = r"""
#include <cuda.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

__global__ void probe(float* out, const __nv_fp8_e4m3* in) {
  out[threadIdx.x] = static_cast<float>(in[threadIdx.x]);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1200
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  unsigned zero = 0;
  unsigned short id = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3}, {%4}, {%5,%5}, {%4}, {%5,%5};\n"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(zero), "h"(id));
  out[threadIdx.x] += d0 + d1 + d2 + d3;
#endif
}

extern "C" int launch(float* out, const void* in) {
  CUdevice device;
  if (cuInit(0) != CUDA_SUCCESS || cuDeviceGet(&device, 0) != CUDA_SUCCESS) return 1;
  probe<<<1, 32>>>(out, static_cast<const __nv_fp8_e4m3*>(in));
  return cudaGetLastError();
}
"""


def cuda_home() -> Path | None:
    """The CUDA toolkit that JIT compilers find: CUDA_HOME, the environment's wheels, or nvcc's on PATH."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), site_packages() / "nvidia" / "cu13"]
    candidates += [Path(nvcc).resolve().parent.parent if nvcc else None, "/usr/local/cuda"]
    return next((Path(c) for c in candidates if c and Path(c, "bin", "nvcc").is_file()), None)


def driver_stub() -> Path | None:
    """A stub of libcuda to load where there is no driver; None where there is one, or no stub."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        pass
    home = cuda_home()
    stub = home / "lib" / "stubs" / "libcuda.so" if home else None
    return stub if stub and stub.exists() else None


def architectures() -> list[str]:
    """What this build serves, as nvcc names it: ['90', '100a', '103a', '120f']."""
    return [
        entry.replace(".", "")
        for entry in (build_info().get("architectures") or DEFAULT_ARCHITECTURES).split(";")
    ]


def compiler() -> list[Row]:
    from sglang.srt.environment_check.installation import profile

    if profile() == "cpu":
        return [Row("compiler", NONE, "the CPU profile compiles nothing at first use")]
    home = cuda_home()
    if home is None:
        return [Row("compiler", FAIL, "no nvcc: expected one under CUDA_HOME or in nvidia/cu13")]
    missing = [name for name in ("g++", "gcc", "ninja") if shutil.which(name) is None]
    if missing:
        return [Row("compiler", FAIL, f"{', '.join(missing)}: expected on PATH, which JIT compilers use")]
    names = architectures()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cu"), Path(folder, "probe.so")
        source.write_text(PROGRAM)
        targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
        paths = [f"-L{home / 'lib64'}", f"-L{home / 'lib64' / 'stubs'}"]
        options = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-Xlinker", "-z,defs"]
        done = subprocess.run(
            [home / "bin" / "nvcc", *options, *targets, source, "-o", library, *paths, "-lcudart", "-lcuda"],
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
        )
        if done.returncode:
            return [
                Row(
                    "compiler",
                    FAIL,
                    f"{home / 'bin' / 'nvcc'}: {last_line(done.stderr or done.stdout)}",
                    {"stderr": done.stderr},
                )
            ]
    release = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    number = release.partition("release ")[2].partition(",")[0]
    shown = ", ".join(f"sm_{name}" for name in names)
    return [
        Row(
            "compiler",
            OK,
            f"nvcc {number} compiles and links (-lcudart -lcuda) for {shown}",
            {"cuda_home": str(home)},
        )
    ]
