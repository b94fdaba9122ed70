"""The build report: what it computes and which kernels it rejects."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci_registration import register_cpu_ci

TOOLS = Path(__file__).resolve().parent.parent / "tools"
spec = importlib.util.spec_from_file_location("kernel_report", TOOLS / "kernel_report.py")
kernel_report = importlib.util.module_from_spec(spec)
sys.modules["kernel_report"] = kernel_report  # dataclasses look their module up
spec.loader.exec_module(kernel_report)
Kernel = kernel_report.Kernel

register_cpu_ci(est_time=5, suite="kernel")

GQA = "gqa_partial_kernel<GqaTraits<__half, 16bit, 128, 16>>"
MLA_SM90 = "mla_fp8_sm90_partial_kernel<MlaFp8Sm90Traits<__half, true, false>>"
RECURRENT = "recurrent_verify_kernel<VerifyTraits<__nv_bfloat16, 128, 3, true, false>>"
INDEX = "index_logits_kernel"
INDEX_SM90 = "index_logits_sm90_kernel<3>"


@pytest.mark.parametrize(
    "kernel, want",
    [
        # 64K registers / (168 x 32) = 12 warps of 64: three blocks of four warps
        (Kernel(GQA, "sm_90", registers=168, threads=128), "18% (3 blocks, registers)"),
        # 100 KiB per multiprocessor, 1 KiB of it reserved per block
        (
            Kernel(GQA, "sm_120", registers=32, threads=128, dynamic_shared=50_000),
            "16% (2 blocks, shared memory)",
        ),
        (Kernel(GQA, "sm_120", registers=32, threads=32), "50% (24 blocks, blocks)"),
        (Kernel(GQA, "sm_120a", registers=32, threads=1024), "66% (1 blocks, warps)"),
        (Kernel(GQA, "sm_90", registers=168), "-"),  # block size unknown
        (Kernel(GQA, "sm_75", registers=168, threads=128), "-"),  # no limits known
    ],
)
def test_occupancy(kernel, want):
    assert kernel_report.occupancy(kernel) == want


@pytest.mark.parametrize(
    "kernel, want",
    [
        (Kernel(GQA, "sm_90", tensor_core=1), []),
        (Kernel(GQA, "sm_90", tensor_core=1, local_memory=3), ["3 local-memory instructions"]),
        (Kernel("combine_kernel<__half, 64>", "sm_90", local_memory=1), ["1 local-memory instructions"]),
        (Kernel("combine_kernel<__half, 64>", "sm_90"), []),
        (Kernel(GQA, "sm_90"), ["no tensor-core instruction"]),
        (
            Kernel(GQA, "sm_90", tensor_core=1, static_shared=1, dynamic_shared=101_376),
            ["101377 bytes of shared memory, 101376 allowed"],
        ),
        (
            Kernel(MLA_SM90, "sm_90", tensor_core=1, dynamic_shared=101_377),
            ["101377 bytes of shared memory, 101376 allowed"],
        ),
        (Kernel(MLA_SM90, "sm_90a", tensor_core=1, dynamic_shared=232_448), []),
        (
            Kernel(MLA_SM90, "sm_90a", local_memory=1, dynamic_shared=232_449),
            [
                "1 local-memory instructions",
                "no tensor-core instruction",
                "232449 bytes of shared memory, 232448 allowed",
            ],
        ),
        (Kernel("commit_kernel", "sm_90", local_memory=9), []),
        (Kernel("recurrent_commit_kernel<float, 64, false>", "sm_90"), []),
        (
            Kernel("recurrent_commit_kernel<float, 64, false>", "sm_90", local_memory=2),
            ["2 local-memory instructions"],
        ),
        (Kernel("conv_verify_kernel<__half, 4>", "sm_90", local_memory=1), ["1 local-memory instructions"]),
        (Kernel(RECURRENT, "sm_120", tensor_core=1), []),
        (Kernel(RECURRENT, "sm_120"), ["no tensor-core instruction"]),
        (Kernel(INDEX, "sm_90", tensor_core=1), []),
        (Kernel(INDEX_SM90, "sm_90a"), ["no tensor-core instruction"]),
        (Kernel("store_index_keys_kernel", "sm_90", local_memory=1), ["1 local-memory instructions"]),
        (
            Kernel(INDEX, "sm_120", local_memory=1),
            ["1 local-memory instructions", "no tensor-core instruction"],
        ),
        (Kernel("combine_kernel<__half, 64>", "sm_100", local_memory=5), ["5 local-memory instructions"]),
    ],
)
def test_judge(kernel, want):
    kernel_report.judge(kernel)
    assert kernel.problems == want


def test_known_local_memory(monkeypatch):
    """A listed kernel passes on its own architecture only, and one more instruction fails."""
    known = {("mla fp8", "sm_120"): 32, ("gqa 256 64", "sm_120"): 4}
    monkeypatch.setattr(kernel_report, "KNOWN_LOCAL_MEMORY", known)
    mla = "mla_partial_kernel<MlaTraits<__half, fp8>>"
    gqa = "gqa_partial_kernel<GqaTraits<__nv_bfloat16, 16bit, 256, 64>>"
    for name, arch, count, bad in (
        (mla, "sm_120", 32, False),
        (mla, "sm_120", 33, True),
        (mla, "sm_90", 1, True),
        (MLA_SM90, "sm_120", 1, True),
        (gqa, "sm_120", 4, False),
        (gqa, "sm_100", 1, True),
        (GQA, "sm_120", 1, True),
    ):
        kernel = Kernel(name, arch, tensor_core=1, local_memory=count)
        kernel_report.judge(kernel)
        assert bool(kernel.problems) == bad, f"{name} {arch} {count}"


@pytest.mark.parametrize(
    "line, tensor_core, local_memory",
    [
        ("        /*1a30*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;", True, False),
        ("        /*1a30*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4 ;", True, False),
        ("        /*1a30*/                   HGMMA.64x64x16.F32 R152, gdesc[UR8], R152 ;", True, False),
        ("        /*1a30*/              @!P0 LDL.LU R4, [R1+0x10] ;", False, True),
        ("        /*1a30*/                   STL.64 [R1], R4 ;", False, True),
        ("        /*1a30*/                   LDS.128 R4, [R1] ;", False, False),
        ("        /*1a30*/                   LDGSTS.E.BYPASS.128 [R1], [R4.64] ;", False, False),
    ],
)
def test_instructions(line, tensor_core, local_memory):
    assert bool(kernel_report.TENSOR_CORE.search(line)) == tensor_core
    assert bool(kernel_report.LOCAL_MEMORY.search(line)) == local_memory


def test_launch_shapes_come_from_the_traits():
    shapes = kernel_report.launch_shapes()
    threads, shared = kernel_report.shape_of(GQA, shapes)
    assert threads % 32 == 0 and 0 < shared <= kernel_report.MAX_SHARED
    for math in kernel_report.KV_MATH:
        assert (
            kernel_report.shape_of(f"mla_partial_kernel<MlaTraits<__nv_bfloat16, {math}>>", shapes)[0] == 256
        )
    assert kernel_report.shape_of(GQA.replace("16bit, 128, 16", "fp8, 128, 128"), shapes)[0] == 256
    assert kernel_report.shape_of("combine_kernel<__half, 64>", shapes) is None
    assert kernel_report.shape_of(MLA_SM90, shapes)[0] == 384
    for kernel, options in (("partial", "true, false"), ("tasks", "false, true"), ("tasks", "true, true")):
        name = f"gqa_sm90_{kernel}_kernel<GqaSm90Traits<__half, 128, 2, {options}>>"
        assert kernel_report.MATRIX.search(name) and kernel_report.shape_of(name, shapes)[0] == 384
    words = ("gqa_sm90", "gqa_paged_sm90", "gqa_tasks_sm90", "gqa_paged_tasks_sm90")
    assert {kind for kind, *_ in shapes if kind.startswith("gqa_") and "fp8" not in kind} == set(words)
    assert kernel_report.shape_of(RECURRENT, shapes)[0] == 128
    assert kernel_report.shape_of(RECURRENT.replace("3", "4"), shapes)[0] == 64  # to fit into sm_120's memory
    assert kernel_report.shape_of(INDEX, shapes) == (256, 4 * 64 * (256 + 4))  # 4 rows of 64 heads
    assert kernel_report.shape_of(INDEX_SM90, shapes) == (
        384,
        2 * 64 * 256 + 12 * 4 * 16 * 256 + 4 * (64 * 4 + 4) + 12 * 4 * 8,
    )
    assert (
        kernel_report.shape_of(RECURRENT.replace("true, ", "false, "), shapes)[1]
        < kernel_report.shape_of(RECURRENT, shapes)[1]
    )
    for (kind, *_), (_, shared) in shapes.items():
        limit = kernel_report.MAX_SHARED_SM90A if kind.endswith("sm90") else kernel_report.MAX_SHARED
        assert shared <= limit


@pytest.mark.parametrize(
    "arch, counted, want",
    [
        ("sm_90", 0, 0),
        ("sm_90a", 1024, 0),
        ("sm_120", 1056, 32),
        ("sm_100f", 5184, 4160),
        ("sm_75", 1056, 1056),
    ],
)
def test_static_shared(arch, counted, want):
    """combine_kernel declares 4160 bytes and cuobjdump reports 5184. A kernel without shared memory has 0."""
    assert kernel_report.static_shared(arch, counted) == want


def test_missing_kernels():
    """A kernel missing for one of the library's architectures is listed. sm_90 requires the kernels of sm_90a."""
    shapes = {("gqa", "__half", 0, 128, 16): (128, 0), ("mla_fp8_sm90", "__half", 1, 0, 0): (384, 0)}
    gqa, own, combine = (
        lambda arch, name=name: Kernel(name, arch) for name in (GQA, MLA_SM90, "combine_kernel")
    )
    lacks_own, lacks_gqa = "mla_fp8_sm90 __half 1 0 0 sm_90a", "gqa __half 0 128 16 "
    for built, want in (
        ([gqa("sm_90"), own("sm_90a"), gqa("sm_120")], []),
        ([gqa("sm_120")], []),
        ([gqa("sm_90a"), own("sm_90a")], []),
        ([gqa("sm_90"), gqa("sm_120")], [lacks_own]),
        ([gqa("sm_90a")], [lacks_own]),
        ([own("sm_90a")], [lacks_gqa + "sm_90a"]),
        ([gqa("sm_90"), own("sm_90a"), combine("sm_120")], [lacks_gqa + "sm_120"]),
    ):
        assert kernel_report.missing_kernels(built, shapes) == want


def test_short_name():
    name = "void ddtree::gqa_partial_kernel<ddtree::GqaTraits<__half, (ddtree::KvMath)0, 128, 16> >"
    name += "(ddtree::TreeVerifyParams)"
    assert kernel_report.short_name(name) == GQA


def test_every_listed_architecture_has_limits():
    text = (TOOLS.parent / "architectures.txt").read_text()
    for entry in re.findall(r"\d+\.\d+", " ".join(re.findall(r"^\w+ = (.*)$", text, re.M))):
        assert "sm_" + entry.replace(".", "") in kernel_report.ARCHITECTURES


def test_missing_library(tmp_path):
    result = subprocess.run(
        [sys.executable, TOOLS / "kernel_report.py", tmp_path / "none.so"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "none.so: build the CUDA library first" in result.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
