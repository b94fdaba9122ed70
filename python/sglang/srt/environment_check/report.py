"""Rows of the report, and how they are shown."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

SHARE = Path(os.environ.get("SGLANG_IMAGE_SHARE", "/usr/share/sglang"))  # what the image says of itself

OK, WARN, FAIL, NONE = "ok", "warn", "FAIL", "-"  # NONE: not checked here, the detail says why


@dataclass
class Row:
    """One check's outcome. detail: one sentence; data: what --json adds."""

    check: str
    status: str
    detail: str
    data: dict = field(default_factory=dict)


def build_info() -> dict:
    """The image's record of what it was made from; empty outside of an image."""
    try:
        return json.loads((SHARE / "build.json").read_text())
    except FileNotFoundError:
        return {}


def site_packages() -> Path:
    """Where this installation's packages lie."""
    import sglang

    return Path(sglang.__file__).resolve().parent.parent


def last_line(text: str) -> str:
    """The last line of a program's output that says something."""
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1].strip()[:300]


def failed(rows: list[Row]) -> bool:
    return any(row.status == FAIL for row in rows)


def show(rows: list[Row], as_json: bool) -> None:
    """Prints the report to stdout."""
    if as_json:
        json.dump(
            {"passed": not failed(rows), "build": build_info(), "rows": [asdict(row) for row in rows]},
            sys.stdout,
            indent=1,
        )
        print()
        return
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{row.check:<{width}}  {row.status:<4}  {row.detail}")
    counts = {status: sum(row.status == status for row in rows) for status in (OK, WARN, FAIL, NONE)}
    print(
        f"\n{counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed, {counts[NONE]} not checked here"
    )
