"""Summarizes results files of bench.py: medians over the rounds, and 95% intervals.

python -m benchmark.serving.summary RESULTS.json [RESULTS.json ...] prints them as Markdown. Files of several runs are
taken together.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
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
    """Return a Markdown table per tool."""
    blocks = []
    for tool, title in TOOLS.items():
        rows = [row for row in summary if row["tool"] == tool]
        if not rows:
            continue
        streams = tool == "serving"
        head = ["T", "requests", "way to serve", "rounds", "tokens/s"]
        head += ["TPOT p50, ms", "TPOT p99, ms"] if streams else []
        head += ["accept length", "ratio to DFLASH", "ratio to the best other"]
        lines = [f"{title}:", "", "| " + " | ".join(head) + " |", "|-" * len(head) + "|"]
        for row in rows:
            middle, low, high = row["output_throughput"]
            cells = [
                f"{row['temperature']:g}",
                str(row["concurrency"]),
                label_of(row["case"]),
                str(row["rounds"]),
            ]
            cells.append(f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]")
            if streams:
                cells += [f"{row[field][0]:.2f}" for field in ("median_tpot_ms", "p99_tpot_ms")]
            cells.append(f"{row['accept_length'][0]:.2f}" if row["accept_length"] else "1")
            for name in reversed(RATIOS):
                other, *ratio = row.get(name, (None,))
                text = "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else ""
                cells.append(f"{text} ({label_of(other)})" if ratio and name == "ratio_to_best" else text)
            lines.append("| " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    print(markdown(summarize(rows_of(results))))


if __name__ == "__main__":
    main()
