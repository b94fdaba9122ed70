"""Checks that the compiler of JIT kernels compiles and links for every architecture of this build."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang.srt.environment_check import layout
from sglang.srt.environment_check.cubins import architectures
from sglang.srt.environment_check.report import FAIL, NONE, OK, Row, last_line

COMPILE_SECONDS = 300
# Uses what JIT kernels use: narrow floats, the runtime (-lcudart) and the driver (-lcuda). On sm_120f it also uses the
# FP4 block-scale mma, which plain sm_120 does not have.
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


def driver_stub() -> Path | None:
    """The toolkit's stub of libcuda, for hosts without a driver. None if there is a driver, or no stub."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        pass
    home = layout.cuda_home()
    stub = home / "lib" / "stubs" / "libcuda.so" if home else None
    return stub if stub and stub.exists() else None


def compiler() -> list[Row]:
    """Compile a small program for every architecture of this build."""
    if layout.profile() == "cpu":
        return [Row("compiler", NONE, "the CPU profile has no JIT kernels")]
    home = layout.cuda_home()
    if home is None:
        return [
            Row("compiler", FAIL, "nvcc: expected under CUDA_HOME, in nvidia/cu13 or on PATH, found none")
        ]
    missing = [name for name in ("g++", "gcc", "ninja") if shutil.which(name) is None]
    if missing:
        return [
            Row("compiler", FAIL, f"{', '.join(missing)}: expected on PATH for JIT compilers, found none")
        ]
    names = architectures()
    if not names:
        return [Row("compiler", NONE, "no architecture to compile for: our kernels are not built for any")]
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
