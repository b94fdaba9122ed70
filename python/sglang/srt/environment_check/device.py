"""Checks that need a GPU: driver, capability, shared memory, our kernels against their reference, all-reduce."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from sglang.srt.environment_check import layout
from sglang.srt.environment_check.cubins import cubins_of, serves
from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row, last_line

if TYPE_CHECKING:
    import torch

MIN_DRIVER = 580  # the first driver branch that runs CUDA 13.0
SHARED_BYTES = (
    101_376  # the most shared memory a block of our kernels uses; the limit of sm_120, our smallest target
)
KERNEL_TOLERANCE = (
    2e-2  # bfloat16 output against a float64 reference: about two units in the last place near 1
)
ALL_REDUCE_SECONDS = (
    120  # covers the start of one process per card and NCCL's set-up; the reduction takes milliseconds
)
HANG_ADVICE = (
    "the system reports peer-to-peer access between cards, but it does not work. Set NCCL_P2P_DISABLE=1, or turn off "
    "the IOMMU (ACS) in the firmware"
)


def cards() -> list[Row]:
    """Whether each card can load our kernels, and which of upstream's kernels this image lacks for it."""
    import torch

    if not torch.cuda.is_available():
        return [Row("cards", NONE, "no CUDA device")]
    built = cubins_of(layout.ddtree_library())
    rows = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        fitting = sorted(cubin for cubin in built if serves(cubin, capability))
        name = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        if not fitting:
            rows.append(
                Row(f"card {index}", FAIL, f"{name}: cannot run kernels built for {', '.join(sorted(built))}")
            )
        elif capability[0] == 9 and not list((layout.site_packages() / "sgl_kernel").glob("flash_ops*.so")):
            advice = "FlashAttention 3 is not installed, so pass --attention-backend flashinfer or triton"
            rows.append(Row(f"card {index}", WARN, f"{name}: {fitting[0]}; {advice}"))
        else:
            rows.append(Row(f"card {index}", OK, f"{name}: {', '.join(fitting)}"))
    return rows


def has_card() -> bool:
    """Whether torch can use a CUDA device."""
    import torch

    return torch.cuda.is_available()


def driver() -> list[Row]:
    """Whether there is an NVIDIA driver, and whether it is new enough for CUDA 13.0."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [
            Row(
                "driver",
                NONE,
                f"no NVIDIA driver ({error}). In a container, pass --gpus all or the CDI device",
            )
        ]
    text = pynvml.nvmlSystemGetDriverVersion()
    if int(text.split(".")[0]) < MIN_DRIVER:
        return [Row("driver", FAIL, f"expected {MIN_DRIVER} or later for CUDA 13.0, got {text}")]
    return [Row("driver", OK, text)]


def shared_memory() -> list[Row]:
    """Whether each card has the shared memory that our kernels need."""
    import torch

    if not has_card():
        return [Row("shared memory", NONE, "no CUDA device")]
    properties: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    limits = {index: card.shared_memory_per_block_optin for index, card in enumerate(properties)}
    small = [f"card {index} has {limit}" for index, limit in limits.items() if limit < SHARED_BYTES]
    if small:
        return [
            Row(
                "shared memory",
                FAIL,
                f"our kernels need {SHARED_BYTES} bytes per block, but {', '.join(small)}",
            )
        ]
    return [
        Row(
            "shared memory",
            OK,
            f"{min(limits.values())} bytes per block, our kernels use at most {SHARED_BYTES}",
        )
    ]


def verify_inputs(device: str) -> dict[str, torch.Tensor]:
    """The arguments of sgl_kernel.ddtree.verify_gqa for one request: a prefix of 70 tokens and a tree of 6 nodes."""
    import torch

    generator = torch.Generator().manual_seed(5)
    prefix, num_nodes, slots, h_q, h_kv, size = 70, 6, 128, 8, 2, 128
    parents = [0, 0, 0, 1, 1, 4]
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((1 << node) | (words[parent] if node else 0))
    order = torch.randperm(slots, generator=generator)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    def integers(values: Any) -> torch.Tensor:
        return torch.as_tensor(values).to(torch.int32).to(device)

    return {
        "q": random(num_nodes, h_q, size),
        "k_cache": random(slots, h_kv, size),
        "v_cache": random(slots, h_kv, size),
        "qo_indptr": integers([0, num_nodes]),
        "kv_indptr": integers([0, prefix]),
        "kv_indices": integers(order[:prefix]),
        "prefix_lens": integers([prefix]),
        "tree_slots": integers(order[prefix : prefix + num_nodes]),
        "ancestors": torch.tensor([[word] for word in words], device=device),  # int64
    }


def verify(device: str) -> torch.Tensor:
    """The output of the tree-verify op on ``device``, copied to the CPU: [N, h_q, d_v] bfloat16."""
    from sgl_kernel.ddtree import verify_gqa, verify_workspace

    inputs = verify_inputs(device)
    num_nodes, h_q, size = inputs["q"].shape
    h_kv = inputs["k_cache"].shape[1]
    workspace = verify_workspace(
        max_bs=1, num_nodes=num_nodes, h_q=h_q, h_kv=h_kv, d_qk=size, d_v=size, device=device
    )
    return verify_gqa(**inputs, workspace=workspace).cpu()


def kernels() -> list[Row]:
    """Compare the tree-verify kernel on each card with the CPU op, which is its reference."""
    import torch

    if not has_card():
        return [Row("ddtree kernel", NONE, "no CUDA device")]
    expected, rows = verify("cpu").float(), []
    for index in range(torch.cuda.device_count()):
        difference = (verify(f"cuda:{index}").float() - expected).abs().max().item()
        good = difference <= KERNEL_TOLERANCE  # false for NaN
        detail = f"card {index}: the largest difference from the reference is {difference:.1e}"
        rows.append(
            Row("ddtree kernel", OK if good else FAIL, f"{detail}, {KERNEL_TOLERANCE:.0e} is allowed")
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
    """Run an all-reduce over ``world`` cards, one process per card. Return None, or what went wrong."""
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
    """Run an all-reduce over all cards. If it fails, run it again without peer-to-peer copies to find the cause."""
    import torch

    world = torch.cuda.device_count()
    if world < 2:
        return [Row("all-reduce", NONE, f"needs two CUDA devices, found {world}")]
    problem = all_reduce_in(dict(os.environ), world)
    if problem is None:
        return [Row("all-reduce", OK, f"{world} cards over NCCL")]
    without = all_reduce_in(os.environ | {"NCCL_P2P_DISABLE": "1"}, world)
    if without is None:
        return [Row("all-reduce", FAIL, f"{problem}, but it works with NCCL_P2P_DISABLE=1: {HANG_ADVICE}")]
    return [Row("all-reduce", FAIL, f"{problem}; with NCCL_P2P_DISABLE=1: {without}")]
