"""Draws a results file of bench_tree_verify.py as a roofline.

python plot_roofline.py results/NAME.json roofline.png
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LIGHT, MUTED, COMMON, UPSTREAM = "#2a6fbb", "#d9822b", "#2a9d6f", "#8a8a8a"


def intensity(row: dict) -> float:
    """FLOP per byte of KV."""
    return row["tflop_s"] * 1e3 / row["kv_gb_s"]


def main(source: str, target: str) -> None:
    with open(source) as f:
        results = json.load(f)
    copy, mma = results["copy_gb_s"], results["mma_sync_tflop_s"]
    rows = results["rows"]
    fig, ax = plt.subplots(figsize=(9, 5.5))
    low, high = 0.7 * min(map(intensity, rows)), 1.4 * max(map(intensity, rows))
    ridge = mma * 1e3 / copy
    ax.plot([low, ridge, high], [low * copy / 1e3, mma, mma], color="black", lw=1.2)
    ax.annotate(
        f"copy {copy:.0f} GB/s", (low * 1.1, low * 1.1 * copy / 1e3), rotation=33, va="bottom", fontsize=8
    )
    ax.annotate(f"mma.sync {mma:.0f} TFLOP/s", (high, mma), ha="right", va="bottom", fontsize=8)
    markers = {"gqa": "o", "mla": "s"}
    for kv, color in (("bf16", LIGHT), ("fp8_e4m3", MUTED)):
        for kind, marker in markers.items():
            points = [r for r in rows if r["kv"] == kv and r["shape"]["kind"] == kind]
            ax.scatter(
                [intensity(r) for r in points],
                [r["tflop_s"] for r in points],
                c=color,
                marker=marker,
                s=28,
                label=f"{kind.upper()}, KV {kv}",
                zorder=3,
            )
    others = (("common_us", COMMON, "common kernels"), ("upstream_us", UPSTREAM, "upstream Triton"))
    for field, color, label in others:
        for kind, marker in markers.items():
            points = [r for r in rows if r["kv"] == "bf16" and r[field] and r["shape"]["kind"] == kind]
            ax.scatter(
                [intensity(r) for r in points],
                [r["tflop_s"] * r["us"] / r[field] for r in points],
                facecolors="none",
                edgecolors=color,
                marker=marker,
                s=28,
                label=f"{kind.upper()}, KV bf16, {label}",
                zorder=2,
            )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of KV",
        ylabel="TFLOP/s",
        title=f"Tree verify on one {results['gpu']}, commit {results['commit'][:10]}",
    )
    ax.grid(which="both", alpha=0.2)
    ax.legend(fontsize=8, loc="lower right")
    fig.tight_layout()
    fig.savefig(target, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
