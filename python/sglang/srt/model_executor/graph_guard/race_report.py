"""The report of the race detector: what it found, as an object, as JSON and as text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from sglang.srt.model_executor.graph_guard.happens_before import HappensBefore, Operation, Race


class RaceReport:
    """The findings of the detector. It grows while the ``with`` block runs and is complete after it."""

    def __init__(self) -> None:
        self.engine = HappensBefore()
        self.captures: list[str] = []
        self.undeclared_aliases: set[str] = set()  # ops that return an operand, against their schema

    @property
    def races(self) -> list[Race]:
        return self.engine.races

    def distinct(self) -> list[tuple[Race, int]]:
        """One race per pair of source locations, with the number of times it occurred."""
        groups: dict[tuple, list[Race]] = {}
        for race in self.races:
            sites = tuple((op.name, (op.info.get("stack") or [""])[0]) for op in (race.first, race.second))
            groups.setdefault((race.kind, sites), []).append(race)
        return [(group[0], len(group)) for group in groups.values()]

    def to_json(self) -> dict:
        return {
            "version": 1,
            "torch": torch.__version__,
            "captures": self.captures,
            "operations": self.engine.operations,
            "streams": len(self.engine.streams),
            "races": len(self.races),
            "undeclared_aliases": sorted(self.undeclared_aliases),
            "distinct": [
                {
                    "kind": race.kind,
                    "count": count,
                    "bytes": race.region and race.region.nbytes,
                    "address": race.region and race.region.start,
                    "first": _operation_json(race.first, race.first_writes, race.allocations[0]),
                    "second": _operation_json(race.second, race.second_writes, race.allocations[1]),
                }
                for race, count in self.distinct()
            ],
        }

    def write(self, path: str | os.PathLike) -> None:
        """Write the report as JSON. The file appears atomically, so a reader never sees a partial report."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        os.replace(partial, path)

    def __str__(self) -> str:
        return render(self.to_json())


def _operation_json(op: Operation, writes: bool | None, allocation: tuple | None) -> dict:
    return {
        "operation": op.name,
        "index": op.index,
        "stream": hex(op.stream) if isinstance(op.stream, int) else str(op.stream),
        "access": {True: "write", False: "read", None: None}[writes],
        "layer": op.info.get("layer"),
        "tensors": op.info.get("tensors", []),
        "allocation": allocation and {"bytes": allocation[0], "stream": hex(allocation[1])},
        "stack": op.info.get("stack", []),
    }


def render(report: dict) -> str:
    """Format a report that ``RaceReport.to_json`` made."""
    lines = [
        f"Races: {report['races']} ({len(report['distinct'])} distinct). Operations: {report['operations']}, streams: "
        f"{report['streams']}, captures: {len(report['captures'])}."
    ]
    meaning = {
        "allocation-reuse": "memory was reused before another stream had finished with it",
        "live-conflict": "two streams use the same memory with no ordering between them",
        "dropped-wait": "a wait had no effect although the other stream had work queued",
    }
    for race in report["distinct"]:
        size = f", {race['bytes']} bytes at {race['address']:#x}" if race["bytes"] else ""
        lines.append(f"\n{race['kind']} x{race['count']}: {meaning[race['kind']]}{size}")
        for which in ("first", "second"):
            op = race[which]
            block = op["allocation"]
            lines.append(
                f"  {which}: {op['operation']}"
                + (f" ({op['access']})" if op["access"] else "")
                + f" on stream {op['stream']}"
                + (f", layer {op['layer']}" if op["layer"] else "")
                + (f", block of {block['bytes']} bytes from stream {block['stream']}" if block else "")
            )
            lines.extend(f"    {tensor}" for tensor in op["tensors"])
            lines.extend(f"      {frame}" for frame in op["stack"])
    if undeclared := report.get("undeclared_aliases"):
        lines.append(
            f"\nThese ops return an operand although their schema declares a new tensor: {', '.join(undeclared)}. The "
            "detector treats that as a write, so a race that names one of them may be false."
        )
    return "\n".join(lines)
