"""Prints the README's tables from a results file of bench_tree_verify.py.

python tables.py results/NAME.json
"""

import json
import sys
from collections.abc import Iterable

# Peers by page size, in tokens.
PEERS = {1: ("FA3", "FlashInfer"), 64: ("FlashMLA",), 128: ("FA3",)}


def kv(row: dict) -> str:
    return "fp8" if row["kv"].startswith("fp8") else "bf16"


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    columns = list(columns)
    print(f"\n| {' | '.join(columns)} |\n|{'-|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def limits(rows: list[dict]) -> None:
    upstream = {row["name"]: row["upstream_us"] for row in rows if row["upstream_us"]}
    columns = "shape | KV | us | KV GB/s | of copy | TFLOP/s | of mma.sync | common us | upstream us | faster"
    print_table(
        columns.split(" | "),
        (
            (
                row["name"],
                kv(row),
                number(row["us"]),
                number(row["kv_gb_s"], ".0f"),
                number(row["of_copy"], ".0%"),
                number(row["tflop_s"], ".0f"),
                number(row["of_mma"], ".0%"),
                number(None if kv(row) == "fp8" else row["common_us"]),
                number(upstream.get(row["name"]), ".0f"),
                number(upstream[row["name"]] / row["us"] if row["name"] in upstream else None, unit="x"),
            )
            for row in rows
        ),
    )


def peers(rows: list[dict]) -> None:
    def line(row: dict) -> tuple[str, ...]:
        found = {name: peer for name, peer in row["peers"].items() if "us" in peer}
        cells: list[str] = []
        for page, names in PEERS.items():
            measured = [found.get(f"{name} page {page}") for name in names]
            ours = next((peer["ours_us"] for peer in measured if peer), None)
            cells += [number(ours), *(number(peer["us"] if peer else None) for peer in measured)]
        fastest = min(found.values(), key=lambda peer: peer["us"], default=None)
        ratio = fastest["ours_us"] / fastest["us"] if fastest else None
        return (row["name"], kv(row), *cells, number(ratio, ".2f"))

    columns = [column for page, names in PEERS.items() for column in (f"page {page}: ours", *names)]
    print_table(["shape", "KV", *columns, "ours / fastest"], map(line, rows))


def errors(rows: list[dict]) -> None:
    bf16 = {row["name"]: row for row in rows if kv(row) == "bf16"}
    print_table(
        ["shape", "bf16 us", "fp8 us", "error", "exact us", "error"],
        (
            (
                row["name"],
                number(bf16[row["name"]]["us"]),
                number(row["us"]),
                number(row["error"], ".1e"),
                number(row["exact_us"]),
                number(row["exact_error"], ".1e"),
            )
            for row in rows
            if kv(row) == "fp8"
        ),
    )


def main(source: str) -> None:
    with open(source) as f:
        rows = json.load(f)["rows"]
    for table in (limits, peers, errors):
        table(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
