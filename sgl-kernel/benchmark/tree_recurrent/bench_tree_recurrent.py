"""Times verify and commit of draft trees over recurrent layers, next to upstream's kernels and to plain copies.

A time is the median of a CUDA graph's replays, divided by its launches. Each launch of a graph takes other states, so
that states come from memory as they do in a model, where every layer has its own. The inputs stay in the L2 cache, as
the kernel before has just written them. One launch of the commit is for all layers, as in a step. Its time, and that of
a copy of the same states, is divided by the layers.

Our rows come first, then upstream's kernels (peers). Compiling those takes most of the time, so by default they run
only for N 16 and 64 at batch sizes 8 and 32, and stop when --seconds are over. The result says why a peer is missing.
With --compile nothing is timed: it fills Triton's cache with the peers, so that a later run has time for all of them.

    python bench_tree_recurrent.py --commit REVISION --results results
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
from sgl_kernel.ddtree import (
    GatedDelta,
    RecurrentWorkspace,
    StateSpace,
    pack_ancestors,
    tree_conv_commit,
    tree_conv_verify,
    tree_recurrent_commit,
    tree_recurrent_verify,
)

DEVICE = "cuda"
STATE_BYTES = 256 << 20  # of the states that a graph's launches go through: several times the L2 cache
MAX_DEPTH = 15
ACCEPTED = 6  # nodes of a committed path: the root and five accepted ones
BATCHES = (1, 8, 32)
NODES = (16, 32, 64)
PEER_BATCHES, PEER_NODES = (8, 32), (16, 64)
COPY_BYTES = 4 << 30
SECONDS_PER_TIME = 0.1


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str  # "gdn" or "mamba2"
    h_k: int
    h_v: int
    d_k: int
    d_v: int
    layers: int
    state_dtype: torch.dtype = torch.float32

    @property
    def state_bytes(self) -> int:
        return self.h_v * self.d_k * self.d_v * self.state_dtype.itemsize

    @property
    def channels(self) -> int:
        return 2 * self.h_k * self.d_k + self.h_v * self.d_v


SHAPES = (
    Shape("Qwen3-Next", "gdn", 16, 32, 128, 128, 36),
    Shape("Mamba2", "mamba2", 8, 128, 128, 64, 24),
    Shape("Qwen3.5-27B", "gdn", 16, 48, 128, 128, 48),
    Shape("Qwen3-Next, bf16 state", "gdn", 16, 32, 128, 128, 36, torch.bfloat16),
    Shape("Qwen3.5-27B, bf16 state", "gdn", 16, 48, 128, 128, 48, torch.bfloat16),
)


def microseconds(calls) -> float:
    """Median time of one call, in a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    began = time.monotonic()
    while len(times) < 23 and (len(times) < 7 or time.monotonic() - began < SECONDS_PER_TIME):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def tree(nodes: int, rng: random.Random) -> list[int]:
    """Parents of a random tree as DDTREE builds them: bushy near the root, at most MAX_DEPTH deep."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        parent = max(rng.randrange(len(parents)), rng.randrange(len(parents)))
        if depths[parent] < MAX_DEPTH:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


class Inputs:
    """One batch, as a layer gets it after its convolution."""

    def __init__(self, shape: Shape, bs: int, nodes: int):
        rng = random.Random(nodes)
        self.shape, self.bs, self.nodes, rows = shape, bs, nodes, bs * nodes

        def normal(*size, dtype=torch.bfloat16):
            return torch.randn(size, device=DEVICE).to(dtype)

        self.trees = [tree(nodes, rng) for _ in range(bs)]
        self.parents = torch.tensor(self.trees, device=DEVICE)
        mask = torch.zeros(bs, nodes, nodes, dtype=torch.bool)
        for request, parents in enumerate(self.trees):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    mask[request, node] = mask[request, parent]
                mask[request, node, node] = True
        self.ancestors = pack_ancestors(mask.view(rows, nodes)).to(DEVICE)
        depth = mask.sum(-1)
        ends = (depth * (depth <= ACCEPTED)).argmax(1)  # a node as deep as a committed path is long, or less
        paths = torch.zeros(bs, MAX_DEPTH + 1, dtype=torch.int64)
        for request, end in enumerate(ends.tolist()):
            path = mask[request, end].nonzero().flatten()
            paths[request, : len(path)] = path
        self.path = paths.to(DEVICE)
        self.lengths = depth.gather(1, ends[:, None]).flatten().int().to(DEVICE)

        self.mixed = normal(rows, shape.channels)
        sizes = (shape.h_k * shape.d_k, shape.h_k * shape.d_k, shape.h_v * shape.d_v)
        self.q, self.k, self.v = (
            part.unflatten(-1, (heads, -1))
            for part, heads in zip(
                self.mixed.split(sizes, -1), (shape.h_k, shape.h_k, shape.h_v), strict=True
            )
        )
        self.a, self.b = normal(rows, shape.h_v), normal(rows, shape.h_v)
        self.a_log, self.dt_bias = (
            normal(shape.h_v, dtype=torch.float32),
            normal(shape.h_v, dtype=torch.float32),
        )
        self.skip = normal(shape.h_v, dtype=torch.float32)
        if shape.kind == "gdn":
            self.gate = GatedDelta(self.a, self.b, self.a_log, self.dt_bias)
        else:
            self.gate = StateSpace(self.a, -self.a_log.exp(), self.dt_bias, self.skip)

        self.sets = max(2, min(100, STATE_BYTES // (bs * shape.state_bytes)))
        self.states = normal(self.sets * bs, shape.h_v, shape.d_v, shape.d_k, dtype=torch.float32)
        self.states = (self.states * 0.1).to(shape.state_dtype)
        self.indices = [
            torch.arange(i * bs, (i + 1) * bs, dtype=torch.int32, device=DEVICE) for i in range(self.sets)
        ]
        self.layers = min(self.sets, shape.layers)  # of a commit
        self.workspace = RecurrentWorkspace.allocate(
            layers=self.layers,
            rows=rows,
            h_k=shape.h_k,
            h_v=shape.h_v,
            d_k=shape.d_k,
            d_v=shape.d_v,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        self.out = torch.empty(rows, shape.h_v, shape.d_v, dtype=torch.bfloat16, device=DEVICE)

    def per_set(self, call):
        return [lambda indices=indices: call(indices) for indices in self.indices]

    @property
    def workspace_bytes(self) -> int:
        return sum(t[0].nbytes for t in (self.workspace.k, self.workspace.u, self.workspace.g))


def ours(x: Inputs) -> dict:
    def verify(indices):
        tree_recurrent_verify(
            x.q,
            x.k,
            x.v,
            x.gate,
            x.states,
            indices,
            x.ancestors,
            x.workspace,
            0,
            scale=None if x.shape.kind == "gdn" else 1.0,
            normalize=x.shape.kind == "gdn",
            out=x.out,
        )

    states = x.states.unflatten(0, (x.sets, x.bs))[: x.layers]

    def commit():
        tree_recurrent_commit(states, x.indices[0], x.path, x.lengths, x.workspace, num_nodes=x.nodes)

    copies = torch.empty_like(states)
    return dict(
        verify_us=microseconds(x.per_set(verify)),
        commit_us=microseconds([commit]) / x.layers,
        copy_us=microseconds([lambda: copies.copy_(states)]) / x.layers,
    )


def convolution(x: Inputs) -> dict:
    """The short convolution of width 4 over the layer's channels."""
    channels, rows = x.shape.channels, x.bs * x.nodes
    weight = torch.randn(channels, 4, device=DEVICE).bfloat16()
    window = torch.randn(1, x.sets * x.bs, channels, 3, device=DEVICE).bfloat16()
    kept = torch.empty(1, rows, channels, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(kept[0])

    def verify(indices):
        tree_conv_verify(
            x.mixed, window[0], indices, x.ancestors, weight, None, kept, 0, activation="silu", out=out
        )

    def commit(indices):
        tree_conv_commit(window, indices, x.path, x.lengths, kept, num_nodes=x.nodes)

    return dict(
        conv_verify_us=microseconds(x.per_set(verify)), conv_commit_us=microseconds(x.per_set(commit))
    )


def upstream_gdn(x: Inputs, result: dict) -> None:
    """Adds upstream's times and bytes to `result`. If a kernel fails, those of the kernels before it are there."""
    gdn_tree(x, result)
    gdn_decode(x, result)
    gdn_chain(x, result)


def gdn_update(x: Inputs) -> Callable:
    """Upstream's kernel with the arguments that do not depend on the tokens."""
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    return partial(
        fused_sigmoid_gating_delta_rule_update,
        A_log=x.a_log,
        dt_bias=x.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        initial_state_source=x.states,
        use_qk_l2norm_in_kernel=True,
    )


def starts_of(bs: int, tokens: int) -> torch.Tensor:
    """[bs + 1], where the tokens of each request start."""
    return torch.arange(bs + 1, dtype=torch.int32, device=DEVICE) * tokens


def gdn_tree(x: Inputs, result: dict) -> None:
    """Adds upstream's tree verify, and the bytes of the states that it keeps."""
    shape, update = x.shape, gdn_update(x)
    starts = starts_of(x.bs, x.nodes)
    per_node = torch.empty(
        x.bs, x.nodes, shape.h_v, shape.d_v, shape.d_k, dtype=shape.state_dtype, device=DEVICE
    )
    rows = torch.arange(x.bs, dtype=torch.int32, device=DEVICE)
    parents = x.parents.clamp(min=0).int()

    def verify(indices):
        update(
            q=x.q[None],
            k=x.k[None],
            v=x.v[None],
            a=x.a,
            b=x.b,
            initial_state_indices=indices,
            cu_seqlens=starts,
            disable_state_update=True,
            intermediate_states_buffer=per_node,
            intermediate_state_indices=rows,
            cache_steps=x.nodes,
            retrieve_parent_token=parents,
        )

    result["upstream_tree_us"] = microseconds(x.per_set(verify)[: max(2, min(x.sets, 8))])
    result["upstream_bytes"] = per_node.nbytes


def gdn_decode(x: Inputs, result: dict) -> None:
    """Adds one plain decode step."""
    bs, update, starts = x.bs, gdn_update(x), starts_of(x.bs, 1)

    def decode(indices):
        update(
            q=x.q[None, :bs],
            k=x.k[None, :bs],
            v=x.v[None, :bs],
            a=x.a[:bs],
            b=x.b[:bs],
            initial_state_indices=indices,
            cu_seqlens=starts,
        )

    result["upstream_decode_us"] = microseconds(x.per_set(decode))


def gdn_chain(x: Inputs, result: dict) -> None:
    """Adds upstream's verify of a chain of as many tokens."""
    from sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode import gdn_replayssm_spec_decode

    shape, nodes, slots = x.shape, x.nodes, x.sets * x.bs
    ring = 2 * nodes  # upstream's smallest ring for this many draft tokens, half full
    low = shape.state_dtype != torch.float32
    cache = dict(
        d_cache=torch.randn(slots, shape.h_v, ring, shape.d_v, device=DEVICE).bfloat16(),
        k_cache=torch.randn(slots, shape.h_k, ring, shape.d_k, device=DEVICE).bfloat16(),
        g_cache=-torch.rand(slots, shape.h_v, ring, device=DEVICE),
        rawv_cache=torch.zeros(slots, shape.h_v, ring, shape.d_v, device=DEVICE).bfloat16() if low else None,
        rawk_cache=torch.zeros(slots, shape.h_k, ring, shape.d_k, device=DEVICE).bfloat16() if low else None,
        beta_cache=None,
        write_pos=torch.full((slots,), nodes // 2, dtype=torch.int32, device=DEVICE),
        cache_base=torch.zeros(slots, dtype=torch.int32, device=DEVICE),
        is_flush=torch.zeros(slots, dtype=torch.int8, device=DEVICE),
    )
    starts = starts_of(x.bs, nodes)

    def chain(indices):
        gdn_replayssm_spec_decode(
            x.q,
            x.k,
            x.v,
            x.a,
            x.b,
            x.a_log,
            x.dt_bias,
            x.states,
            out=x.out,
            query_start_loc=starts,
            ssm_state_indices=indices,
            replay_indices=indices,
            max_cache_len=ring,
            max_spec_len=nodes,
            null_block_id=-1,
            launch_mode="verify",
            **cache,
        )

    result["upstream_chain_us"] = microseconds(x.per_set(chain))


def upstream_mamba2(x: Inputs, result: dict) -> None:
    """Adds upstream's times and bytes to `result`."""
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    shape, bs, nodes = x.shape, x.bs, x.nodes
    a = (-x.a_log.exp())[:, None, None].expand(-1, shape.d_v, shape.d_k)
    bias, skip = (t[:, None].expand(-1, shape.d_v) for t in (x.dt_bias, x.skip))
    dt = x.a[..., None].expand(-1, -1, shape.d_v)
    per_node = torch.empty(bs, nodes, shape.h_v, shape.d_v, shape.d_k, dtype=shape.state_dtype, device=DEVICE)
    rows = torch.arange(bs, dtype=torch.int32, device=DEVICE)
    parents = x.parents.clamp(min=0).int()

    def tokens(tensor):
        return tensor.unflatten(0, (bs, nodes))

    def tree_verify(indices):
        selective_state_update(
            x.states,
            tokens(x.v),
            tokens(dt),
            a,
            tokens(x.k),
            tokens(x.q),
            skip,
            dt_bias=bias,
            dt_softplus=True,
            state_batch_indices=indices,
            out=tokens(x.out),
            disable_state_update=True,
            intermediate_states_buffer=per_node,
            cache_steps=nodes,
            retrieve_parent_token=parents,
            intermediate_state_indices=rows,
        )

    def decode(indices):
        selective_state_update(
            x.states,
            x.v[:bs],
            dt[:bs],
            a,
            x.k[:bs],
            x.q[:bs],
            skip,
            dt_bias=bias,
            dt_softplus=True,
            state_batch_indices=indices,
            out=x.out[:bs],
        )

    result["upstream_tree_us"] = microseconds(x.per_set(tree_verify)[: max(2, min(x.sets, 8))])
    result["upstream_bytes"] = per_node.nbytes
    result["upstream_decode_us"] = microseconds(x.per_set(decode))


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy far larger than the L2 cache."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * COPY_BYTES / statistics.median(times[2:])


def bench(shape: Shape, bs: int, nodes: int, rate: float) -> dict:
    x = Inputs(shape, bs, nodes)
    row = dict(
        shape=shape.name, bs=bs, nodes=nodes, depth=MAX_DEPTH, accepted=x.lengths.float().mean().item()
    )
    row.update(ours(x), **convolution(x))
    state_bytes = bs * shape.state_bytes
    moved = state_bytes + x.workspace_bytes + x.mixed.nbytes + x.out.nbytes
    row.update(
        state_rate=state_bytes / (row["verify_us"] * 1e-6) / rate,
        byte_rate=moved / (row["verify_us"] * 1e-6) / rate,
        commit_to_copy=row["commit_us"] / row["copy_us"],
        workspace_bytes=x.workspace_bytes,
    )
    return row


def compile_peers(shape: Shape, nodes: list[int], batches: list[int]) -> None:
    """Call upstream's kernels once for each size."""
    global microseconds

    def call_once(calls) -> float:
        calls[0]()
        torch.cuda.synchronize()
        return 0.0

    microseconds = call_once
    for n in nodes:
        for bs in batches:
            print(shape.name, bs, n, peers(shape, bs, n), flush=True)
            torch.cuda.empty_cache()


def peers(shape: Shape, bs: int, nodes: int) -> dict:
    """Upstream's times, and why there is not one of each."""
    result = {}
    try:
        (upstream_gdn if shape.kind == "gdn" else upstream_mamba2)(Inputs(shape, bs, nodes), result)
    except Exception as error:  # a peer that is not installed or does not run must not end the run
        result["upstream_missing"] = f"{type(error).__name__}: {error}"[:300]
    return result


COLUMNS = (
    "shape", "bs", "nodes", "verify_us", "state_rate", "byte_rate", "commit_us", "copy_us", "commit_to_copy",
    "workspace_bytes", "conv_verify_us", "conv_commit_us",
)  # fmt: skip
PEER_COLUMNS = (
    "shape", "bs", "nodes", "verify_us", "upstream_tree_us", "upstream_chain_us", "upstream_decode_us",
    "upstream_bytes", "upstream_missing",
)  # fmt: skip


def table_row(cells) -> str:
    return "|" + "|".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + "|"


def print_header(columns) -> None:
    print("\n" + table_row(columns) + "\n" + "|-" * len(columns) + "|")


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--results", type=Path, help="the folder for the result, named <gpu>-<date>-<commit>-recurrent.json"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES)
    parser.add_argument("--peers", choices=("default", "all", "none"), default="default")
    parser.add_argument("--compile", action="store_true", help="only compile the peers")
    parser.add_argument("--seconds", type=float, default=120, help="no peer starts later than this")
    args = parser.parse_args()
    torch.manual_seed(0)

    if args.compile:
        for shape in SHAPES:
            if shape.name in args.shapes:
                compile_peers(shape, args.nodes, args.batches)
        return
    rate = copy_rate()
    torch.cuda.empty_cache()
    print(f"copy rate: {rate / 1e12:.2f} TB/s read and written")
    cases = [
        (shape, nodes, bs)
        for shape in SHAPES
        if shape.name in args.shapes
        for nodes in args.nodes
        for bs in args.batches
    ]
    results = []
    print_header(COLUMNS)
    for shape, nodes, bs in cases:
        results.append(bench(shape, bs, nodes, rate))
        print(table_row(results[-1][column] for column in COLUMNS), flush=True)
    print_header(PEER_COLUMNS)
    for (shape, nodes, bs), row in zip(cases, results, strict=True):
        chosen = args.peers == "all" or (bs in PEER_BATCHES and nodes in PEER_NODES)
        if args.peers == "none" or not chosen:
            row["upstream_missing"] = f"not timed with --peers {args.peers}"
            continue
        if time.monotonic() - began > args.seconds:
            row["upstream_missing"] = f"the {args.seconds:g} seconds of --seconds were over"
        else:
            row.update(peers(shape, bs, nodes))
        print(table_row(row.get(column, "") for column in PEER_COLUMNS), flush=True)

    if args.results:
        gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
        name = f"{gpu}-{date.today().isoformat()}-{args.commit[:7]}-recurrent.json"
        record = dict(
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            commit=args.commit,
            date=date.today().isoformat(),
            command=" ".join(["python", "benchmark/tree_recurrent/bench_tree_recurrent.py", *sys.argv[1:]]),
            copy_rate_bytes_per_s=rate,
            results=results,
        )
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
