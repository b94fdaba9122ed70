"""Writes what a step costs by batch size and width: the table that --speculative-ddtree-budget auto starts from.

The server measures it when it starts (sglang.srt.speculative.ddtree.step_costs). Here an engine of a given shape does.

    PYTHONPATH=test python -m benchmark.ddtree.step_costs --shape 8b --batches 1 4 16 32
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from support.engine import Engine
from support.processes import EngineProcess

from benchmark.ddtree.host_step import results_path
from benchmark.ddtree.record import origin, save
from benchmark.ddtree.shapes import SHAPES, write_configs

START_SECONDS = 400


class Table:
    """Measures the table of an engine twice: at its start and again. It is the job of an EngineProcess."""

    def __call__(self, engine: Engine) -> dict[str, Any]:
        from sglang.srt.speculative.ddtree.step_costs import measure

        worker = engine.scheduler.draft_worker
        start = time.perf_counter()
        again = measure(worker.step_graphs)
        seconds = time.perf_counter() - start
        rows = [
            dict(
                batch=bs,
                nodes=width,
                ms=1e3 * fixed,
                us_per_1000_tokens=1e9 * slope,
                ms_again=1e3 * again[bs, width][0],
            )
            for (bs, width), (fixed, slope) in worker.control.budget.costs.table.items()
        ]
        return dict(
            measure_seconds=seconds, capture_seconds=worker.step_graphs.capture_seconds,
            capture_gb=worker.step_graphs.capture_gb, table=rows,
        )  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print the table: a line per batch size, milliseconds by width."""
    widths = sorted({row["nodes"] for row in found["table"]})
    print(
        f"captured in {found['capture_seconds']:.1f} s and {found['capture_gb']:.2f} GB, measured in "
        f"{found['measure_seconds']:.1f} s; ms per step without context of {widths} nodes, and us per 1000 tokens of "
        "context of the first and the last:"
    )
    for bs in sorted({row["batch"] for row in found["table"]}):
        rows = {row["nodes"]: row for row in found["table"] if row["batch"] == bs}
        times = "  ".join(f"{rows[width]['ms']:6.2f} ({rows[width]['ms_again']:.2f})" for width in widths)
        slopes = [f"{rows[width]['us_per_1000_tokens']:.1f}" for width in (widths[0], widths[-1])]
        print(f"batch {bs:3}: {times}  {', '.join(slopes)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of --model")
    parser.add_argument("--model", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--nodes", type=int, default=64, help="the widest verify")
    parser.add_argument("--commit", help="commit of this repository; default: ask git")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.device = "cuda"
    folder = tempfile.TemporaryDirectory()
    arguments = dict(model_path=options.model, speculative_draft_model_path=options.drafter)
    if options.shape:
        arguments = write_configs(Path(folder.name), **SHAPES[options.shape])
        arguments |= dict(load_format="dummy", speculative_draft_load_format="dummy")
    most = max(options.batches)
    arguments |= dict(
        device="cuda", dtype="bfloat16", attention_backend=None, mem_fraction_static=0.8, max_running_requests=most,
        max_total_tokens=most * 9000, context_length=16384 if options.shape else None,
        cuda_graph_bs_decode=options.batches, cuda_graph_backend_prefill="disabled", speculative_algorithm="DDTREE",
        speculative_ddtree_budget="auto", speculative_num_draft_tokens=options.nodes,
    )  # fmt: skip
    found = EngineProcess(arguments, Table()).result(START_SECONDS)
    result = origin(options) | dict(weights=options.shape or options.model) | found
    path = options.output or results_path("step-costs", result)
    save(result, path)
    show(found)
    print(path)


if __name__ == "__main__":
    main()
