"""Draws tokens per second and time per output token against requests at once, from a results file of bench.py.

python3 -m venv /tmp/plot && /tmp/plot/bin/pip install matplotlib
/tmp/plot/bin/python -m benchmark.serving.plot RESULTS.json --output PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"none": "#9a9a9a", "DFLASH": "#d9822b", "auto": "#1a7f37"}
BLUES = ("#b8d4ec", "#74a9d8", "#1f5a94", "#0b2e4f")


def label_of(case: str) -> str:
    """Return how a case is called in the picture."""
    if "auto" in case:
        return "auto"
    return "plain" if case == "none" else case.replace("DDTREE:", "N=")


def draw_lines(axes: Axes, summary: list[dict[str, Any]], field: str, title: str) -> None:
    """Draw one line per case, with its interval.

    Args:
        axes: to draw on.
        summary: rows of one temperature.
        field: of a row: (median, low, high).
        title: of the axes.
    """
    cases = list(dict.fromkeys(row["case"] for row in summary))
    blues = iter(BLUES)
    for case in cases:
        rows = sorted((row for row in summary if row["case"] == case), key=lambda row: row["concurrency"])
        label = label_of(case)
        color = COLORS.get(case) or COLORS.get(label) or next(blues)
        at = [row["concurrency"] for row in rows]
        middle, low, high = zip(*(row[field] for row in rows))
        axes.plot(
            at,
            middle,
            marker="o",
            markersize=3,
            color=color,
            label=label,
            linewidth=2 if label == "auto" else 1.2,
        )
        axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at once")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    summary = json.loads(options.results.read_text())["summary"]
    temperatures = sorted({row["temperature"] for row in summary})
    figure, grid = plt.subplots(
        len(temperatures), 3, figsize=(11, 3.4 * len(temperatures)), squeeze=False, layout="constrained"
    )
    for row_of_axes, temperature in zip(grid, temperatures):
        rows = [row for row in summary if row["temperature"] == temperature]
        for axes, (field, title) in zip(
            row_of_axes,
            (
                ("output_throughput", "tokens per second"),
                ("median_tpot_ms", "time per output token, median, ms"),
                ("p99_tpot_ms", "time per output token, 99%, ms"),
            ),
        ):
            draw_lines(axes, rows, field, f"T = {temperature:g}: {title}")
            axes.set_ylim(bottom=0)
    grid[0][0].legend(fontsize=8)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=140)


if __name__ == "__main__":
    main()
