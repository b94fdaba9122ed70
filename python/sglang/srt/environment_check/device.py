"""What needs a card: driver, capability, shared memory, our kernels against their reference, all-reduce."""

from __future__ import annotations

import os
import subprocess
import sys

from sglang.srt.environment_check.cubins import cubins_of, serves
from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row, last_line, site_packages

MIN_DRIVER = 580  # the first branch that runs CUDA 13.0
SHARED_BYTES = 101_376  # what a block of our kernels may use: sm_120's limit, the smallest that we serve
KERNEL_TOLERANCE = 2e-2  # bfloat16 output against double accumulation: two units in its last place near 1
ALL_REDUCE_SECONDS = 120  # start of a process a card and NCCL's own set-up; the reduction takes milliseconds
HANG_ADVICE = (
    "cards cannot write to each other's memory as the system says they can; set NCCL_P2P_DISABLE=1, or turn the "
    "IOMMU (ACS) off in the firmware"
)


def cards() -> list[Row]:
    """Whether each card can load our kernels, and what else this image lacks for it."""
    import torch

    if not torch.cuda.is_available():
        return [Row("cards", NONE, "no CUDA device")]
    library = site_packages() / "sgl_kernel" / "ddtree" / "_ddtree_cuda.so"
    built = cubins_of(library)
    rows = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        fitting = sorted(cubin for cubin in built if serves(cubin, capability))
        name = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        if not fitting:
            rows.append(Row(f"card {index}", FAIL, f"{name}: none of {', '.join(sorted(built))} runs on it"))
        elif capability[0] == 9 and not list((site_packages() / "sgl_kernel").glob("flash_ops*.so")):
            advice = "this image has no FlashAttention 3: pass --attention-backend flashinfer or triton"
            rows.append(Row(f"card {index}", WARN, f"{name}: {fitting[0]}; {advice}"))
        else:
            rows.append(Row(f"card {index}", OK, f"{name}: {', '.join(fitting)}"))
    return rows


def has_card() -> bool:
    import torch

    return torch.cuda.is_available()


def driver() -> list[Row]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [
            Row("driver", NONE, f"no NVIDIA driver in here ({error}); run with --gpus all, or the CDI device")
        ]
    text = pynvml.nvmlSystemGetDriverVersion()
    if int(text.split(".")[0]) < MIN_DRIVER:
        return [Row("driver", FAIL, f"{text}: expected {MIN_DRIVER} or later, which CUDA 13.0 needs")]
    return [Row("driver", OK, text)]


def shared_memory() -> list[Row]:
    import torch

    if not has_card():
        return [Row("shared memory", NONE, "no CUDA device")]
    limits = {
        index: torch.cuda.get_device_properties(index).shared_memory_per_block_optin
        for index in range(torch.cuda.device_count())
    }
    small = [f"card {index} has {limit}" for index, limit in limits.items() if limit < SHARED_BYTES]
    if small:
        return [
            Row("shared memory", FAIL, f"{'; '.join(small)} bytes a block: our kernels want {SHARED_BYTES}")
        ]
    return [
        Row(
            "shared memory",
            OK,
            f"{min(limits.values())} bytes a block, our kernels use at most {SHARED_BYTES}",
        )
    ]


def verify_inputs(device: str) -> dict:
    """Arguments of sgl_kernel.ddtree.verify_gqa for one request: a prefix of 70 tokens and a tree of 6 rows."""
    import torch

    generator = torch.Generator().manual_seed(5)
    prefix, rows, slots, heads_q, heads_kv, size = 70, 6, 128, 8, 2, 128
    parents = [0, 0, 0, 1, 1, 4]
    words = []
    for row, parent in enumerate(parents):
        words.append((1 << row) | (words[parent] if row else 0))
    order = torch.randperm(slots, generator=generator)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    def integers(values, dtype=torch.int32):
        return torch.as_tensor(values).to(dtype).to(device)

    return {
        "q": random(rows, heads_q, size),
        "k_cache": random(slots, heads_kv, size),
        "v_cache": random(slots, heads_kv, size),
        "qo_indptr": integers([0, rows]),
        "kv_indptr": integers([0, prefix]),
        "kv_indices": integers(order[:prefix]),
        "prefix_lens": integers([prefix]),
        "tree_slots": integers(order[prefix : prefix + rows]),
        "ancestors": integers([[word] for word in words], torch.int64),
    }


def verify(device: str):
    """Output of the tree-verify op on `device`, [rows, heads, size] bfloat16, on the CPU."""
    from sgl_kernel.ddtree import verify_gqa, verify_workspace

    inputs = verify_inputs(device)
    rows, heads_q, size = inputs["q"].shape
    heads_kv = inputs["k_cache"].shape[1]
    workspace = verify_workspace(
        batch=1, num_nodes=rows, h_q=heads_q, h_kv=heads_kv, d_qk=size, d_v=size, device=device
    )
    return verify_gqa(**inputs, workspace=workspace).cpu()


def kernels() -> list[Row]:
    """The tree-verify kernel on each card against the CPU op, which is its reference."""
    import torch

    if not has_card():
        return [Row("ddtree kernel", NONE, "no CUDA device")]
    expected, rows = verify("cpu").float(), []
    for index in range(torch.cuda.device_count()):
        difference = (verify(f"cuda:{index}").float() - expected).abs().max().item()
        good = difference <= KERNEL_TOLERANCE  # a NaN is not
        detail = f"card {index}: largest difference from the reference {difference:.1e}"
        rows.append(
            Row("ddtree kernel", OK if good else FAIL, f"{detail}, at most {KERNEL_TOLERANCE:.0e} allowed")
        )
    return rows


_ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
x = torch.full((1 << 22,), float(rank + 1), device="cuda")
for _ in range(3):
    y = x.clone()
    dist.all_reduce(y)
torch.cuda.synchronize()
expected = world * (world + 1) / 2
assert bool((y == expected).all()), f"sum: expected {expected}, got {y.min().item()} to {y.max().item()}"
dist.destroy_process_group()
"""


def all_reduce_in(environment: dict[str, str], world: int) -> str | None:
    """Runs an all-reduce over `world` cards in processes of their own; returns None, or what went wrong."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _ALL_REDUCE],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=ALL_REDUCE_SECONDS)
            if process.returncode:
                return last_line(errors)
    except subprocess.TimeoutExpired:
        return f"no answer within {ALL_REDUCE_SECONDS} s"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return None


def all_reduce() -> list[Row]:
    """An all-reduce over all cards; if it fails, again without peer-to-peer copies, to tell what is at fault."""
    import torch

    world = torch.cuda.device_count()
    if world < 2:
        return [Row("all-reduce", NONE, f"{world} CUDA devices, two are needed")]
    problem = all_reduce_in(dict(os.environ), world)
    if problem is None:
        return [Row("all-reduce", OK, f"{world} cards over NCCL")]
    without = all_reduce_in(os.environ | {"NCCL_P2P_DISABLE": "1"}, world)
    if without is None:
        return [Row("all-reduce", FAIL, f"{problem}, but well with NCCL_P2P_DISABLE=1: {HANG_ADVICE}")]
    return [Row("all-reduce", FAIL, f"{problem}; with NCCL_P2P_DISABLE=1: {without}")]
