"""Times ddtree_build, ddtree_accept and ddtree_commit as nodes of a CUDA graph.

A graph holds LAUNCHES launches of one op over rotating inputs. A time is the median over its replays divided by
LAUNCHES, so it includes the gap between two nodes. "empty" is the time of a kernel that fills one element, which no op
can beat. Commit is compared with one indexed PyTorch copy per buffer. Prints a Markdown table; never asserts.

    python bench_tree.py --commit REVISION --output results/NAME.json
"""

import argparse
import json
import statistics
from datetime import date
from pathlib import Path

import torch
from sgl_kernel.ddtree import (
    MAX_PATHS,
    Accepted,
    DraftTrees,
    KVBuffers,
    accept_path,
    build_trees,
    commit_path,
)

LAUNCHES = 20
REPLAYS = 30
SETS = 4  # of rotating inputs


def microseconds(functions: list) -> float:
    """Median time of one call. The i-th call of a graph is functions[i % len(functions)]."""
    for function in functions:
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            functions[i % len(functions)]()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times[3:])


def candidates_of(bs: int, depth: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities like a drafter's: certain at some positions, undecided at others."""
    sharpness = 1 + 7 * torch.rand(bs, depth, 1, device="cuda")
    logits = torch.randn(bs, depth, 4096, device="cuda") * sharpness
    top = torch.log_softmax(logits, -1).topk(width)
    return top.indices.contiguous(), top.values.contiguous()


def bench_rows(bs: int, num_nodes: int, depth: int, width: int) -> list[dict]:
    """Build with candidates that are scored after each of several paths."""
    shape = dict(bs=bs, num_nodes=num_nodes, max_depth=depth, candidates=width)
    bonus = torch.zeros(bs, dtype=torch.int64, device="cuda")
    results = []
    for op, rows in (("build, pairs", width), ("build, beam", MAX_PATHS)):
        calls = []
        for _ in range(SETS):
            tokens, _ = candidates_of(bs, depth, width)
            log_probs = torch.log_softmax(3 * torch.randn(bs, depth, rows, width, device="cuda"), -1)
            # Of any paths; most are children of the first rows, which are the likely nodes.
            beam = torch.randint(4 * width, (bs, depth, rows), dtype=torch.int32, device="cuda")
            trees = DraftTrees.allocate(bs, num_nodes, "cuda")
            options = dict(beam=beam) if op == "build, beam" else {}
            calls.append(lambda c=tokens, p=log_probs, t=trees, o=options: build_trees(c, p, bonus, t, **o))
        results.append(dict(op=op, **shape, us=microseconds(calls)))
    return results


def bench_trees(bs: int, num_nodes: int, depth: int, width: int) -> list[dict]:
    shape = dict(bs=bs, num_nodes=num_nodes, max_depth=depth, candidates=width)
    bonus = torch.zeros(bs, dtype=torch.int64, device="cuda")
    inputs = [
        (*candidates_of(bs, depth, width), DraftTrees.allocate(bs, num_nodes, "cuda")) for _ in range(SETS)
    ]
    out = Accepted.allocate(bs, depth + 1, "cuda")
    results = []
    for top1_path in (False, True):
        calls = [
            lambda c=c, p=p, t=t, s=top1_path: build_trees(c, p, bonus, t, keep_top1_path=s)
            for c, p, t in inputs
        ]
        results.append(
            dict(op="build, top-1 path" if top1_path else "build", **shape, us=microseconds(calls))
        )
    # Most nodes choose their first child, which gives paths of a few nodes.
    targets = []
    for _, _, trees in inputs:
        child = trees.first_child.long().clamp(min=0)
        says_it = (trees.first_child >= 0) & (torch.rand(bs, num_nodes, device="cuda") < 0.8)
        targets.append(torch.where(says_it, trees.tokens.gather(1, child), -1))
    calls = [lambda t=t, x=x: accept_path(t, x, out) for (_, _, t), x in zip(inputs, targets, strict=True)]
    results.append(
        dict(op="accept", **shape, us=microseconds(calls), length=out.lengths.float().mean().item())
    )
    return results


def bench_commit(name: str, bs: int, buffers: int, row_bytes: int, hidden_width: int) -> list[dict]:
    num_nodes, block_size, length = 32, 16, 7
    slots_in_pool = 2 * bs * num_nodes
    pool = [
        torch.randint(0, 255, (slots_in_pool, row_bytes), dtype=torch.uint8, device="cuda")
        for _ in range(buffers)
    ]
    kv = KVBuffers.of(pool)
    hidden = torch.randn(bs * num_nodes, hidden_width, dtype=torch.bfloat16, device="cuda")
    hidden_out = torch.empty(bs, block_size, hidden_width, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(slots_in_pool, device="cuda")[: bs * num_nodes].view(bs, num_nodes)
    results = []
    for where in ("out of place", "in place"):
        # Three accepted nodes on the top-1 path and three off it, or all six on it.
        path = torch.arange(block_size, device="cuda").repeat(bs, 1)
        path[:, length:] = 0
        if where == "out of place":
            off = torch.rand(bs, num_nodes - 5, device="cuda").argsort(1)[:, : length - 4] + 5
            path[:, 4:length] = off.sort(1).values
        lengths = torch.full((bs,), length, dtype=torch.int32, device="cuda")
        moved = int((path[:, :length] != torch.arange(length, device="cuda")).sum())
        copied = 2 * (moved * row_bytes * buffers + hidden_out.numel() * 2)

        source, target = slots.gather(1, path[:, :length]).flatten(), slots[:, :length].flatten()

        def indexed(source=source, target=target, path=path):
            for buffer in pool:
                buffer[target] = buffer[source]
            torch.index_select(
                hidden,
                0,
                (path + torch.arange(0, bs * num_nodes, num_nodes, device="cuda")[:, None]).flatten(),
            )

        us = microseconds([lambda p=path, n=lengths: commit_path(p, n, slots, kv, hidden, hidden_out)])
        results.append(
            dict(
                op=f"commit, {name}, {where}",
                bs=bs,
                us=us,
                copied_bytes=copied,
                gb_per_s=copied / us / 1e3,
                indexed_copies_us=microseconds([indexed]),
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    torch.manual_seed(0)

    cell = torch.zeros(1, device="cuda")
    results = [dict(op="empty", us=microseconds([lambda: cell.fill_(1)]))]
    for num_nodes, depth, width in (
        (16, 7, 8),
        (32, 15, 8),
        (65, 15, 8),
        (128, 15, 16),
        (256, 15, 16),
        (256, 32, 32),
    ):
        for bs in (1, 16, 64):
            results += bench_trees(bs, num_nodes, depth, width)
            results += bench_rows(bs, num_nodes, depth, width)
    for bs in (1, 16, 64):
        results += bench_commit("36 layers GQA", bs, 72, 2048, 5 * 4096)
        results += bench_commit("61 layers MLA", bs, 61, 1152, 5 * 7168)

    columns = (
        "op",
        "bs",
        "num_nodes",
        "max_depth",
        "candidates",
        "us",
        "length",
        "gb_per_s",
        "indexed_copies_us",
    )
    print("|" + "|".join(columns) + "|\n" + "|-" * len(columns) + "|")
    for row in results:
        cells = (row.get(column, "") for column in columns)
        print("|" + "|".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + "|")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        record = dict(
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            commit=args.commit,
            date=date.today().isoformat(),
            command="python benchmark/tree/bench_tree.py",
            launches_per_graph=LAUNCHES,
            results=results,
        )
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
