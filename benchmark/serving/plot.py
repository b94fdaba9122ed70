"""Draws tokens per second and time per output token against concurrent requests.

The results are of benchmark.ddtree.host_step (without HTTP) or of bench.py (servers over HTTP).

    python3 -m venv /tmp/plot && /tmp/plot/bin/pip install matplotlib
    /tmp/plot/bin/python -m benchmark.serving.plot RESULTS.json [RESULTS.json ...] --output PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmark.serving.summary import label_of, order, rows_of, summarize

COLORS = {"plain": "#9a9a9a", "DFLASH": "#d9822b", "auto": "#1a7f37"}
BLUES = ("#b8d4ec", "#74a9d8", "#1f5a94", "#0b2e4f")


def points_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per case and load: label, requests, temperature, (median, low, high) of tokens_per_second, p50, p99.

    p50 and p99 are milliseconds per output token.
    """
    over_http = [result for result in results if "concurrency" in result["results"][0]]
    summary = summarize([row for row in rows_of(over_http) if row["tool"] == "serving"])
    summary += [row for result in results if result not in over_http for row in result["summary"]]
    found = []
    for row in summary:
        if "graphs of auto" in row["case"]:  # widths by order, which no server runs
            continue
        if "concurrency" in row:
            requests, temperature = row["concurrency"], row["temperature"]
            rate, p50, p99 = row["output_throughput"], row["median_tpot_ms"], row["p99_tpot_ms"]
        else:
            requests = int(re.match(r"batch (\d+)", row["batch"])[1])
            sampled = re.search(r"T = (\S+)", row["batch"])
            temperature = float(sampled[1]) if sampled else 0.0
            rate, (p50, p99) = row["tokens_per_second"], row["tpot_ms"]
        found.append(
            dict(
                label=label_of(row["case"]), requests=requests, temperature=temperature, tokens_per_second=rate,
                p50=p50, p99=p99,
            )
        )  # fmt: skip
    return found


def draw_lines(axes: Axes, rows: list[dict[str, Any]], field: str, title: str) -> None:
    """Draw one line per case, with its interval if it has one.

    Args:
        axes: to draw on.
        rows: of one temperature, from points_of().
        field: of a row.
        title: of the axes.
    """
    labels = {row["label"] for row in rows}
    blues = iter(BLUES[(len(BLUES) - len(labels - COLORS.keys())) // 2 :])
    for label in sorted(labels, key=order):
        of_label = sorted((row for row in rows if row["label"] == label), key=lambda row: row["requests"])
        color = COLORS.get(label) or next(blues)
        at = [row["requests"] for row in of_label]
        values = [
            row[field] if isinstance(row[field], (list, tuple)) else [row[field]] * 3 for row in of_label
        ]
        middle, low, high = zip(*values)
        width = 2.2 if label == "auto" else 1.2
        axes.plot(at, middle, marker="o", markersize=3, color=color, label=label, linewidth=width)
        axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    digits = "125" if field == "tokens_per_second" else "12357"
    for use in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        use(FuncFormatter(lambda value, _: f"{value:,g}" if f"{value:.0e}"[0] in digits else ""))
    axes.set_xlabel("concurrent requests")
    axes.set_xticks(at, [str(n) for n in at])
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, which="both")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = points_of([json.loads(path.read_text()) for path in options.results])
    temperatures = sorted({row["temperature"] for row in rows})
    figure, grid = plt.subplots(
        len(temperatures), 3, figsize=(11, 3.4 * len(temperatures)), squeeze=False, layout="constrained"
    )
    titles = dict(
        tokens_per_second="tokens per second, all requests",
        p50="time per output token, median, ms",
        p99="time per output token, p99, ms",
    )
    for row_of_axes, temperature in zip(grid, temperatures):
        of_temperature = [row for row in rows if row["temperature"] == temperature]
        for axes, (field, title) in zip(row_of_axes, titles.items()):
            draw_lines(axes, of_temperature, field, f"T = {temperature:g}: {title}")
    grid[0][0].legend(fontsize=8)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=140)


if __name__ == "__main__":
    main()
