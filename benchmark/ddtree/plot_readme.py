"""Draws the README's picture from results files of host_step.py: the demo model and the shape of an 8B model.

    python3 -m venv /tmp/plot && /tmp/plot/bin/pip install matplotlib
    /tmp/plot/bin/python -m benchmark.ddtree.plot_readme \\
        --demo DEMO.json --shape SHAPE.json [SHAPE.json ...] \\
        --output docs/images/ddtree-vs-dflash.png

A case of the shape comes from the first file that has it. The picture needs only matplotlib, which is not part of the
CPU profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Cases in the order of the bars, with their labels and colors.
CASES = {
    "none": ("plain", "#9a9a9a"),
    "DFLASH": ("DFLASH", "#d9822b"),
    "DDTREE:16": ("N=16", "#74a9d8"),
    "DDTREE:32": ("N=32", "#1f5a94"),
}
CONTEXT = 4096  # of the shape's steps


def draw_bars(
    axes: Axes, values: dict[str, float], title: str, *, digits: int, top: float,
    intervals: dict[str, tuple[float, float]] | None = None, dots: dict[str, list[float]] | None = None,
) -> None:  # fmt: skip
    """Draw one bar per case.

    Args:
        axes: where to draw.
        values: height of each case's bar. Cases without one are left out.
        title: title of the axes.
        digits: digits after the point in a bar's label.
        top: upper end of the y axis, which starts at 0.
        intervals: ends of each case's error bar.
        dots: single measurements of each case.
    """
    cases = [case for case in CASES if case in values]
    for x, case in enumerate(cases):
        value, highest = values[case], values[case]
        axes.bar(x, value, color=CASES[case][1], width=0.8)
        if dots:
            axes.scatter([x] * len(dots[case]), dots[case], color="black", s=5, zorder=3, alpha=0.6)
            highest = max(highest, *dots[case])
        if intervals:
            low, high = intervals[case]
            axes.errorbar(x, value, [[value - low], [high - value]], color="black", capsize=4, linewidth=1.2)
            highest = max(highest, high)
        label = f"{value:.{digits}f}"
        axes.annotate(label, (x, highest), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(cases)), [CASES[case][0] for case in cases], fontsize=9)
    axes.set_ylim(0, top)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_demo(accept: Axes, speed: Axes, results: dict[str, Any]) -> None:
    """Draw accept length and tokens/s of the demo model at batch 1."""
    rows = [row for row in results["results"] if row["case"] in CASES]
    lengths = {case: [row["tokens_per_step"] for row in rows if row["case"] == case] for case in CASES}
    # Every round emits the same number of tokens, so tokens per step over all rounds is the harmonic mean.
    means = {case: statistics.harmonic_mean(found) for case, found in lengths.items() if found}
    top = 1.12 * max(max(found) for found in lengths.values())
    draw_bars(accept, means, "demo model, batch 1: accept length", digits=2, top=top, dots=lengths)
    summary = {row["case"]: row["tokens_per_second"] for row in results["summary"] if row["case"] in CASES}
    draw_bars(
        speed, {case: found[0] for case, found in summary.items()}, "demo model, batch 1: tokens/s", digits=0,
        top=1.12 * max(found[2] for found in summary.values()),
        intervals={case: (found[1], found[2]) for case, found in summary.items()},
    )  # fmt: skip


def steps_of(shapes: dict[str, dict[str, Any]]) -> tuple[dict[int, dict[str, float]], dict[str, list[str]]]:
    """Collect the step times of the shape at CONTEXT.

    Args:
        shapes: content of the results files, by name.

    Returns:
        Milliseconds per step, by batch size and case; and the cases that come from each file.
    """
    steps: dict[int, dict[str, float]] = {}
    source: dict[str, str] = {}
    for name, found in shapes.items():
        for row in found["results"]:
            batch, context = row["batch"].split(", context ")
            if (
                int(context) == CONTEXT
                and row["case"] in CASES
                and source.setdefault(row["case"], name) == name
            ):
                steps.setdefault(int(batch.split()[1]), {})[row["case"]] = row["step_us"] / 1000
    return steps, {name: [case for case in CASES if source.get(case) == name] for name in shapes}


def draw(demo: tuple[str, dict[str, Any]], shapes: dict[str, dict[str, Any]], target: Path) -> None:
    """Draw the whole picture.

    Args:
        demo: name and content of the results file of the demo model.
        shapes: content of the results files of the shape, by name.
        target: image file to write.
    """
    figure = plt.figure(figsize=(10, 6.2))
    grid = figure.add_gridspec(2, 6)
    draw_demo(figure.add_subplot(grid[0, :3]), figure.add_subplot(grid[0, 3:]), demo[1])
    steps, cases = steps_of(shapes)
    for column, (batch, times) in enumerate(sorted(steps.items())):
        title = f"8B shape, batch {batch}: ms per step"
        axes = figure.add_subplot(grid[1, 2 * column : 2 * column + 2])
        draw_bars(axes, times, title, digits=1, top=1.15 * max(times.values()))
    rounds = demo[1]["summary"][0]["rounds"]
    files = "; ".join(
        f"{name} ({', '.join(CASES[case][0] for case in found)})" for name, found in cases.items() if found
    )
    caption = (
        f"One {demo[1]['gpu']}, the full CUDA profile (torch {demo[1]['torch']}), greedy, in bfloat16. DFLASH and plain "
        "decoding run on fa3.\n"
        f"Top: SmolLM2-135M-Instruct with the demo drafter, {rounds} interleaved rounds with one prompt each. "
        f"Dot: one round. Error bar: 95% interval of the median. {demo[0]}\n"
        f"Bottom: Llama-3.1-8B's shape with random weights, context {CONTEXT:,}. It shows the cost of a step, not "
        f"the speed of a model.\n{files}"
    )
    figure.suptitle("DDTREE with a verify tree of N nodes, against DFLASH and plain decoding", fontsize=12)
    figure.text(0.5, 0.008, caption, ha="center", fontsize=6.5, color="#555555")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, required=True, help="results file of the demo model, in rounds")
    parser.add_argument("--shape", type=Path, nargs="+", required=True, help="results files of the shape")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG file to write")
    args = parser.parse_args()
    shapes = {path.name: json.loads(path.read_text()) for path in args.shape}
    draw((args.demo.name, json.loads(args.demo.read_text())), shapes, args.output)


if __name__ == "__main__":
    main()
