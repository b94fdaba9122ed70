"""Estimates tokens per second of the 8B shape with the demo drafter's acceptance, for every width and for the budget auto.

No model runs here. The time of a step is the one that a server of the 8B shape measured (benchmark.ddtree.step_costs). A
step's trees, and what the target accepts of them, are drawn from a recorded trace of the demo model (record_trace.py). The
budget is the real one, with the drafter's probabilities of these trees: it learns what they are worth.

    python -m benchmark.serving.simulate --costs COSTS.json --trace TRACE.jsonl --output RESULTS.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.speculative.ddtree.budget import Budget, Load, Step, StepCosts
from sglang.srt.speculative.ddtree.expectation import LATE
from sglang.srt.speculative.ddtree.trace import read_trace

from benchmark.ddtree.record import host_name, save

WARM_UP, STEPS = 400, 2000


class Draft(NamedTuple):
    """A recorded draft: by width, the tokens that it is expected to emit and those that it emits."""

    expected: tuple[float, ...]
    emitted: tuple[float, ...]


def read_drafts(trace: Path, widths: list[int]) -> list[Draft]:
    """Read the drafts of a trace.

    A verify of the first n nodes accepts the recorded path up to its first node that is not among them.
    """
    found = []
    for line in read_trace(trace):
        for request in line.get("requests", ()):
            share, expected = [1.0], []
            for parent, probability in zip(request["parents"][1:], request["probabilities"][1:]):
                share.append(share[parent] * probability)
            for width in widths:
                expected.append(sum(share[:width]))
            emitted = [float(sum(node < width for node in request["path"])) for width in widths]
            found.append(Draft(tuple(expected), tuple(emitted)))
    return found


def fixed_rate(drafts: list[Draft], costs: StepCosts, load: Load, at: int) -> float:
    """Return tokens per second of one width, for requests whose steps are drawn from the drafts."""
    tokens = statistics.fmean(draft.emitted[at] for draft in drafts)
    return load.bs * tokens / costs.seconds(load, costs.widths[at])


def auto_rate(
    drafts: list[Draft], costs: StepCosts, load: Load, noise: float, seed: int
) -> tuple[float, dict[int, int]]:
    """Return tokens per second of the budget's choices after a warm-up, and how often it chose each width."""
    generator = random.Random(seed)
    budget = Budget(StepCosts(costs.widths, costs.batch_sizes, dict(costs.table)))
    pending: list[Step] = []
    tokens = seconds = 0.0
    chosen: dict[int, int] = {}
    for number in range(WARM_UP + STEPS):
        while len(pending) >= LATE:
            budget.observe(pending.pop(0))
        width = budget.choose(load)
        at = costs.widths.index(width)
        batch = generator.choices(drafts, k=load.bs)
        emitted = statistics.fmean(draft.emitted[at] for draft in batch)
        spent = costs.seconds(load, width) * max(0.5, generator.gauss(1.0, noise))
        expected = None
        if width > 1:
            expected = tuple(statistics.fmean(column) for column in zip(*(draft.expected for draft in batch)))
        pending.append(Step(load, width, spent, expected, emitted if width > 1 else None))
        if number >= WARM_UP:
            tokens, seconds = tokens + load.bs * emitted, seconds + spent
            chosen[width] = chosen.get(width, 0) + 1
    return tokens / seconds, chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--costs", type=Path, required=True, help="results file of benchmark.ddtree.step_costs"
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens per request")
    parser.add_argument("--noise", type=float, default=0.03, help="spread of the steps' times")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    measured = json.loads(options.costs.read_text())
    table = {
        (row["batch"], row["nodes"]): (row["ms"] / 1e3, row["us_per_1000_tokens"] / 1e9)
        for row in measured["table"]
    }
    widths, sizes = sorted({width for _, width in table}), sorted({bs for bs, _ in table})
    costs, drafts = StepCosts(widths, sizes, table), read_drafts(options.trace, widths)
    result: dict[str, Any] = dict(
        host=host_name(), commit=options.commit, costs=options.costs.name, drafts=len(drafts), context=options.context,
        gpu_of_costs=measured["gpu"], results=[],
    )  # fmt: skip
    print(f"{len(drafts)} drafts; tokens per step by width: " + ", ".join(
        f"{width}: {statistics.fmean(draft.emitted[i] for draft in drafts):.2f}" for i, width in enumerate(widths)
    ))  # fmt: skip
    for bs in sizes:
        load = Load(bs, bs * options.context, False)
        fixed = {width: fixed_rate(drafts, costs, load, i) for i, width in enumerate(widths)}
        runs = [auto_rate(drafts, costs, load, options.noise, seed) for seed in range(options.runs)]
        auto = statistics.median(rate for rate, _ in runs)
        best = max(fixed, key=fixed.__getitem__)
        usual = max(runs[0][1], key=runs[0][1].__getitem__)
        result["results"].append(
            dict(
                batch=bs,
                fixed=fixed,
                auto=[rate for rate, _ in runs],
                auto_over_best=auto / fixed[best],
                best=best,
            )
        )
        print(
            f"batch {bs:3}: auto {auto:6.0f} tokens/s (mostly {usual} nodes), {auto / fixed[best]:.3f} of the best width, {best}; "
            + ", ".join(f"{width}: {rate:.0f}" for width, rate in fixed.items())
        )
    save(result, options.output)


if __name__ == "__main__":
    main()
