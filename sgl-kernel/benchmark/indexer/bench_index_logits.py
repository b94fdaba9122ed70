"""Times ddtree_index_logits as nodes of a CUDA graph, next to a copy and to DeepGEMM's logits over fp8 keys.

A graph holds LAUNCHES launches over rotating pools that together exceed the L2 cache. A time is the median over its
replays divided by LAUNCHES. "rate" is the bytes of all keys (256 per key, 132 for fp8), read once, per second. The copy
moves a buffer of 4 GiB and counts what it reads and writes. The matmul multiplies square bfloat16 matrices. "bound" is
the longer of the two times that a launch would take at these rates, over the time it took. "empty" is a launch whose
requests have no keys. Prints a Markdown table; never asserts. SGLANG_DDTREE_SM90=0 times the kernel of the other
architectures on sm_90.

    python bench_index_logits.py --commit REVISION --output results/NAME.json
"""

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from sgl_kernel.ddtree import index_logits

LAUNCHES = 16
REPLAYS = 20
HEADS, HEAD_DIM, PAGE_SIZE = 64, 128, 64  # DeepSeek-V4's indexer of C4 layers
POOL_BYTES = 1 << 30  # at least this much is read before a pool comes around again
FP8_BYTES = HEAD_DIM + 4  # per key: its values, then a float32 scale


def microseconds(functions: list[Callable[[], object]], launches: int = LAUNCHES) -> float:
    """Median time of one call. The i-th call of a graph is functions[i % len(functions)]."""
    for function in functions:
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            functions[i % len(functions)]()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[3:])


def copy_rate() -> float:
    """Bytes per second that a copy reads and writes. Not in a graph, where a copy takes another and slower way."""
    source = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(8):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times[3:]) * 1e3


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a product of bfloat16 matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / microseconds([lambda: a @ b], launches=2) * 1e6


def shuffled_pages(pages: int, bs: int) -> torch.Tensor:
    return torch.randperm(pages, device="cuda").to(torch.int32).view(bs, -1)


def bf16_calls(
    keys: list[torch.Tensor], tables: list[torch.Tensor], length: int, rows: int, seen: int
) -> list:
    """Launches over `length` keys per request, of which each row sees `seen`."""
    bs = tables[0].shape[0]
    q = torch.randn(bs * rows, HEADS, HEAD_DIM, device="cuda").bfloat16()
    weights = torch.randn(bs * rows, HEADS, device="cuda")
    seq_lens = torch.full((bs * rows,), seen, dtype=torch.int32, device="cuda")
    out = torch.empty(bs * rows, length, device="cuda")
    return [
        lambda k=k, t=t: index_logits(q, k, weights, seq_lens, t, out)
        for k, t in zip(keys, tables, strict=True)
    ]


def fp8_calls(tables: list[torch.Tensor], length: int, rows: int) -> list | None:
    """DeepGEMM's paged logits as upstream calls them: a page table line per query row. None if it is missing."""
    try:
        import deep_gemm
    except ImportError:
        return None
    pages = tables[0].numel()
    bs = tables[0].shape[0] * rows
    q = torch.randn(bs, 1, HEADS, HEAD_DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(bs, HEADS, device="cuda")
    seq_lens = torch.full((bs, 1), length, dtype=torch.int32, device="cuda")
    plan = deep_gemm.get_paged_mqa_logits_metadata(seq_lens, PAGE_SIZE, deep_gemm.get_num_sms())
    calls = []
    for table in tables:
        pool = torch.zeros(pages, PAGE_SIZE, 1, FP8_BYTES, dtype=torch.uint8, device="cuda")
        lines = table.repeat_interleave(rows, 0)
        calls.append(
            lambda p=pool, t=lines: deep_gemm.fp8_paged_mqa_logits(
                q, p, weights, seq_lens, t, plan, length, clean_logits=False
            )
        )
    return calls


def bench(bs: int, length: int, rows: int, with_fp8: bool) -> dict:
    pages = bs * length // PAGE_SIZE
    sets = max(2, -(-POOL_BYTES // (pages * PAGE_SIZE * HEAD_DIM * 2)))
    sets = min(sets, LAUNCHES)
    tables = [shuffled_pages(pages, bs) for _ in range(sets)]
    keys = [torch.randn(pages, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    us = microseconds(bf16_calls(keys, tables, length, rows, length))
    empty_us = microseconds(bf16_calls(keys, tables, length, rows, 0))
    row = dict(
        bs=bs, keys=length, rows=rows, us=us, empty_us=empty_us, rate=bs * length * HEAD_DIM * 2 / us * 1e6
    )
    row["tflops"] = 2 * bs * rows * HEADS * HEAD_DIM * length / us / 1e6
    del keys
    fp8 = fp8_calls(tables, length, rows) if with_fp8 else None
    if fp8 is not None:
        row["fp8_us"] = microseconds(fp8)
        row["fp8_rate"] = bs * length * FP8_BYTES / row["fp8_us"] * 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--no-fp8", action="store_true", help="leave DeepGEMM's logits out")
    args = parser.parse_args()
    torch.manual_seed(0)

    copied, multiplied = copy_rate(), matmul_rate()
    record = dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=args.commit,
        date=date.today().isoformat(),
        command="python benchmark/indexer/bench_index_logits.py",
        launches_per_graph=LAUNCHES,
        copy_bytes_per_second=copied,
        matmul_flops=multiplied,
        results=[],
    )
    print(f"copy: {copied / 1e12:.2f} TB/s, matmul: {multiplied / 1e12:.0f} TFLOPS")
    print(
        "|bs|keys|rows|us|empty us|TB/s|of the copy|TFLOPS|of the bound|fp8 us|fp8 TB/s|\n" + "|-" * 11 + "|"
    )
    for bs in args.batches:
        for length in args.lengths:
            for rows in args.rows:
                r = bench(bs, length, rows, not args.no_fp8)
                r["of_bound"] = max(r["rate"] / copied, r["tflops"] * 1e12 / multiplied)
                record["results"].append(r)
                if args.output:
                    args.output.parent.mkdir(parents=True, exist_ok=True)
                    args.output.write_text(json.dumps(record, indent=1) + "\n")
                fp8 = f"{r['fp8_us']:.1f}|{r['fp8_rate'] / 1e12:.2f}" if "fp8_us" in r else "|"
                print(
                    f"|{bs}|{length}|{rows}|{r['us']:.1f}|{r['empty_us']:.1f}|{r['rate'] / 1e12:.2f}|"
                    f"{r['rate'] / copied:.2f}|{r['tflops']:.0f}|{r['of_bound']:.2f}|{fp8}|",
                    flush=True,
                )


if __name__ == "__main__":
    main()
