"""Estimates tokens per second of the 8B shape with the demo drafter's acceptance, for every width and for the budget auto.

No model runs here. The time of a step is the one that a server of the 8B shape measured (benchmark.ddtree.step_costs). A
step's trees, and what the target accepts of them, come from a recorded trace of the demo model (record_trace.py,
acceptance.py). Budget and calibration are the server's own: they learn what the drafter's probabilities are worth.

`gain_of_sharing` of a results file says what more the same number of nodes would emit if the requests of a batch had
different widths.

    python -m benchmark.serving.simulate --costs COSTS.json --trace TRACE.jsonl --output RESULTS.json
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from sglang.srt.speculative.ddtree.budget import Budget, Load, Step, StepCosts
from sglang.srt.speculative.ddtree.expectation import LATE

from benchmark.ddtree.medians import median_and_interval
from benchmark.ddtree.record import host_name, save
from benchmark.serving.acceptance import Acceptance

WARM_UP, STEPS = 200, 1000


def fixed_rate(acceptance: Acceptance, costs: StepCosts, load: Load, width: int) -> float:
    """Return tokens per second of one width."""
    tokens = [acceptance.step(load.bs, width)[1] for _ in range(WARM_UP + STEPS)][WARM_UP:]
    return load.bs * sum(tokens) / STEPS / costs.seconds(load, width)


def auto_rate(
    acceptance: Acceptance, costs: StepCosts, load: Load, noise: float, generator: random.Random
) -> tuple[float, Counter[int]]:
    """Return tokens per second of the budget's choices after a warm-up, and how often it chose each width."""
    budget = Budget(StepCosts(costs.widths, costs.batch_sizes, dict(costs.table)))
    pending: list[Step] = []
    tokens = seconds = 0.0
    chosen: Counter[int] = Counter()
    for number in range(WARM_UP + STEPS):
        while len(pending) >= LATE:
            budget.observe(pending.pop(0))
        width = budget.choose(load)
        expected, emitted = acceptance.step(load.bs, width)
        spent = costs.seconds(load, width) * max(0.5, generator.gauss(1.0, noise))
        pending.append(Step(load, width, spent, expected, None if expected is None else emitted))
        if number >= WARM_UP:
            tokens, seconds = tokens + load.bs * emitted, seconds + spent
            chosen[width] += 1
    return tokens / seconds, chosen


def measured_costs(measured: dict[str, Any]) -> StepCosts:
    """Return the step costs in a results file of benchmark.ddtree.step_costs."""
    table = {
        (row["batch"], row["nodes"]): (row["ms"] / 1e3, row["us_per_1000_tokens"] / 1e9)
        for row in measured["table"]
    }
    return StepCosts(sorted({width for _, width in table}), sorted({bs for bs, _ in table}), table)


def simulate(acceptance: Acceptance, costs: StepCosts, load: Load, noise: float, runs: int) -> dict[str, Any]:
    """Simulate a batch with every width and with the budget's choices.

    Args:
        acceptance: what the target accepts of the recorded trees.
        costs: the time of a step by batch size and width.
        load: the batch.
        noise: standard deviation of the times that the budget sees, divided by the time.
        runs: simulations of each case. Numbers are medians over them.

    Returns:
        A row of the results file.
    """
    rates: dict[Any, list[float]] = {case: [] for case in [*costs.widths, "auto"]}
    chosen: Counter[int] = Counter()
    for seed in range(runs):
        for width in costs.widths:
            acceptance.restart(seed)
            rates[width].append(fixed_rate(acceptance, costs, load, width))
        acceptance.restart(seed)
        rate, of_run = auto_rate(acceptance, costs, load, noise, random.Random(seed))
        rates["auto"].append(rate)
        chosen += of_run
    medians = {case: median_and_interval(of_case)[0] for case, of_case in rates.items()}
    best = max(costs.widths, key=medians.__getitem__)
    return dict(
        batch=load.bs,
        tokens_per_second=medians,
        best=best,
        auto_over_best=median_and_interval([a / b for a, b in zip(rates["auto"], rates[best])]),
        chosen=chosen,
        gain_of_sharing={
            width: acceptance.gain_of_sharing(load.bs, width)
            for width in costs.widths
            if 1 < width < costs.widths[-1]
        },
    )


def show(row: dict[str, Any], widths: list[int]) -> None:
    """Print a row of the results file as a line."""
    medians, ratio = row["tokens_per_second"], row["auto_over_best"]
    print(
        f"batch {row['batch']:3}: auto {medians['auto']:6.0f} tokens/s (mostly {row['chosen'].most_common(1)[0][0]} nodes), "
        f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}] of the best width, {row['best']}; "
        + ", ".join(f"{width}: {medians[width]:.0f}" for width in widths)
    )


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
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
    return parser.parse_args()


def main() -> None:
    options = parse()
    measured = json.loads(options.costs.read_text())
    costs = measured_costs(measured)
    widths = costs.widths
    acceptance = Acceptance(options.trace, widths)
    result: dict[str, Any] = dict(
        host=host_name(), commit=options.commit, costs=options.costs.name, drafts=len(acceptance.emitted),
        context=options.context, gpu_of_costs=measured["gpu"], results=[],
    )  # fmt: skip
    print(
        f"{len(acceptance.emitted)} drafts; tokens per step by width: "
        + ", ".join(f"{width}: {acceptance.tokens(width):.2f}" for width in widths)
    )
    for bs in costs.batch_sizes:
        row = simulate(acceptance, costs, Load(bs, bs * options.context, 0), options.noise, options.runs)
        result["results"].append(row)
        show(row, widths)
    save(result, options.output)


if __name__ == "__main__":
    main()
