"""Draws the README's picture from a results file of bench_server.py: accept length and tokens/s.

    python3 -m venv /tmp/plot && /tmp/plot/bin/pip install matplotlib
    /tmp/plot/bin/python -m benchmark.ddtree.plot_readme \\
        benchmark/ddtree/results/h200-2026-11-30-3fd3515-servers.json docs/images/ddtree-vs-dflash.png

A bar is the mean over the rounds of the measurement. A dot is one round. The picture needs only matplotlib,
which is not part of the CPU profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Cases in the order of the bars, with their labels and colors.
CASES = {
    "none": ("plain", "#9a9a9a"),
    "DFLASH": ("DFLASH", "#d9822b"),
    "DDTREE:8": ("N=8", "#a9cbe8"),
    "DDTREE:16": ("N=16", "#74a9d8"),
    "DDTREE:32": ("N=32", "#3f83c1"),
    "DDTREE:64": ("N=64", "#1f5a94"),
}


def draw_bars(axes: Axes, rows: list[dict], field: str, title: str, *, digits: int, top: float) -> None:
    """Draw one bar per case.

    Args:
        axes: where to draw.
        rows: rows of the results file at one batch size, one per case and round.
        field: the rows' field to draw.
        title: title of the axes.
        digits: digits after the point in a bar's label.
        top: upper end of the y axis, which starts at 0.
    """
    for x, (case, (_, color)) in enumerate(CASES.items()):
        rounds = [row[field] for row in rows if row["case"] == case]
        mean = statistics.mean(rounds)
        axes.bar(x, mean, color=color, width=0.8)
        axes.scatter([x] * len(rounds), rounds, color="black", s=7, zorder=3)
        axes.annotate(
            f"{mean:.{digits}f}",
            (x, max(rounds)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(CASES)), [label for label, _ in CASES.values()], fontsize=8)
    axes.set_ylim(0, top)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: dict, origin: str, target: Path) -> None:
    """Draw the whole picture.

    Args:
        results: results of bench_server.py.
        origin: name of the results file, for the caption.
        target: image file to write.
    """
    rows = results["results"]
    batches = sorted({row["batch"] for row in rows})
    figure, grid = plt.subplots(2, len(batches), figsize=(10, 5.6))
    longest = max(row["accept_length"] for row in rows)  # one scale for all batch sizes
    for column, batch in enumerate(batches):
        at_batch = [row for row in rows if row["batch"] == batch]
        fastest = max(row["tokens_per_second"] for row in at_batch)
        title = f"accept length, batch {batch}"
        draw_bars(grid[0][column], at_batch, "accept_length", title, digits=2, top=1.15 * longest)
        title = f"tokens/s, batch {batch}"
        draw_bars(grid[1][column], at_batch, "tokens_per_second", title, digits=0, top=1.15 * fastest)
    figure.suptitle("DDTREE with a verify tree of N nodes, against DFLASH and plain decoding", fontsize=12)
    caption = (
        f"SmolLM2-135M-Instruct, demo drafter, greedy, {results['dtype']}, one {results['gpu']}, "
        f"commit {results['commit'][:7]}. Bar: mean of the rounds. Dot: one round. {origin}"
    )
    figure.text(0.5, 0.012, caption, ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results file of bench_server.py")
    parser.add_argument("target", type=Path, help="PNG or SVG file to write")
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.results.name, args.target)


if __name__ == "__main__":
    main()
