"""Summarizes results files of bench.py: medians over the rounds, and 95% intervals.

python -m benchmark.serving.summary RESULTS.json [RESULTS.json ...] prints them as Markdown. Files of several runs are
taken together.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.ddtree.medians import median_and_interval

FIELDS = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "accept_length")
RATIOS = ("ratio_to_best", "ratio_to_DFLASH")
TOOLS = {
    "serving": "`sglang.benchmark.serving`, requests that stream",
    "one_batch": "`sglang.benchmark.one_batch_server`, one batch in one call",
}


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of several results files, with a number of its own for each round of each file."""
    return [
        row | dict(round=(i, row["round"])) for i, result in enumerate(results) for row in result["results"]
    ]


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per tool, temperature, concurrency and case: medians over the rounds, and 95% intervals.

    `ratio_to_best` compares tokens per second with the fastest other case, round by round; `ratio_to_DFLASH` with DFLASH.
    """
    loads: dict[tuple, dict[str, dict[Any, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        loads[row["tool"], row["temperature"], row["concurrency"]][row["case"]][row["round"]] = row
    found = []
    for (tool, temperature, concurrency), cases in sorted(loads.items()):
        for case, rounds in cases.items():
            line: dict[str, Any] = dict(
                tool=tool, temperature=temperature, concurrency=concurrency, case=case, rounds=len(rounds)
            )
            for field in FIELDS:
                values = [row[field] for row in rounds.values() if row.get(field) is not None]
                line[field] = median_and_interval(values) if values else None
            for name, other in zip(RATIOS, (best_other(case, cases), "DFLASH")):
                shared = rounds.keys() & cases.get(other, {}).keys() if other != case else ()
                ratios = [speed(rounds[i]) / speed(cases[other][i]) for i in shared]
                if ratios:
                    line[name] = (other, *median_and_interval(ratios))
            found.append(line)
    return found


def speed(row: dict[str, Any]) -> float:
    """Return the tokens per second of a measurement."""
    return row["output_throughput"]


def best_other(case: str, cases: dict[str, dict[Any, dict[str, Any]]]) -> str | None:
    """Return the fastest of the other cases that do not choose their width themselves."""
    others = [other for other in cases if other != case and "=auto" not in other]
    return max(others, key=lambda other: median(map(speed, cases[other].values())), default=None)


def label_of(case: str) -> str:
    """Return what a case is called in tables and pictures."""
    algorithm, *rest = case.split(":")
    if "speculative-ddtree-budget=auto" in rest or "speculative_ddtree_budget=auto" in rest:
        return "auto"
    name = {"none": "plain", "DDTREE": "N = " + (rest[0] if rest else "?")}.get(algorithm, algorithm)
    more = [option.split("=")[-1] for option in rest if not option.isdigit()]
    return ", ".join([name, *more])


def markdown(summary: list[dict[str, Any]]) -> str:
    """Return Markdown tables: a row per load, a column per case."""
    blocks = []
    for tool, title in TOOLS.items():
        loads: dict[tuple[float, int], dict[str, dict[str, Any]]] = defaultdict(dict)
        for row in summary:
            if row["tool"] == tool:
                loads[row["temperature"], row["concurrency"]][label_of(row["case"])] = row
        if loads:
            blocks.append(table(f"{title}: tokens per second", loads, tokens_per_second, show_ratios=True))
        if tool == "serving" and loads:
            blocks.append(table("Milliseconds per output token, median / p99", loads, milliseconds))
    return "\n\n".join(blocks)


def table(
    title: str,
    loads: dict[tuple[float, int], dict[str, dict[str, Any]]],
    cell: Callable[[dict[str, Any]], str],
    *,
    show_ratios: bool = False,
) -> str:
    """Return a Markdown table with its title.

    Args:
        title: of the table.
        loads: (temperature, concurrency) -> label of a case -> row of summarize().
        cell: text for a row.
        show_ratios: whether the last columns compare `auto` with the others.
    """
    labels = sorted({label for of_load in loads.values() for label in of_load}, key=order)
    head = ["T", "requests", "rounds", *labels]
    ratios = show_ratios and "auto" in labels
    lines = [head + ["auto / best other", "auto / DFLASH"] if ratios else head]
    for (temperature, concurrency), of_load in loads.items():
        rounds = sorted({row["rounds"] for row in of_load.values()})
        line = [
            f"{temperature:g}",
            str(concurrency),
            " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
        ]
        line += [cell(of_load[label]) if label in of_load else "" for label in labels]
        if ratios:
            found = [of_load.get("auto", {}).get(name) for name in RATIOS]
            line += ["{1:.2f} [{2:.2f}, {3:.2f}]".format(*ratio) if ratio else "" for ratio in found]
        lines.append(line)
    lines.insert(1, ["-"] * len(lines[0]))
    return f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def order(label: str) -> tuple[int, int, str]:
    """Return where a case stands among the others: plain, DFLASH, the widths, auto."""
    groups = ("plain", "DFLASH", "N =", "auto")
    return next(i for i, group in enumerate((*groups, "")) if label.startswith(group)), len(label), label


def tokens_per_second(row: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "{:,.0f} [{:,.0f}, {:,.0f}]".format(*row["output_throughput"])


def milliseconds(row: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return f"{row['median_tpot_ms'][0]:.2f} / {row['p99_tpot_ms'][0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    print(markdown(summarize(rows_of(results))))


if __name__ == "__main__":
    main()
