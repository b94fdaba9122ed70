"""The rows of the report and how they are printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from sglang.srt.environment_check import layout

OK, WARN, FAIL, NONE = "ok", "warn", "FAIL", "-"  # NONE: not checked on this host; the detail says why


@dataclass
class Row:
    """The outcome of one check.

    Args:
        detail: one sentence.
        data: details for --json.
    """

    check: str
    status: str
    detail: str
    data: dict = field(default_factory=dict)


def last_line(text: str) -> str:
    """The last line of a program's output that is not blank, cut to 300 characters."""
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1].strip()[:300]


def failed(rows: list[Row]) -> bool:
    """Whether any check failed."""
    return any(row.status == FAIL for row in rows)


def show(rows: list[Row], as_json: bool) -> None:
    """Print the report to stdout."""
    if as_json:
        document = {
            "passed": not failed(rows),
            "build": layout.build_info(),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(document, indent=1))
        return
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{row.check:<{width}}  {row.status:<4}  {row.detail}")
    counts = {status: sum(row.status == status for row in rows) for status in (OK, WARN, FAIL, NONE)}
    print(
        f"\n{counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed, {counts[NONE]} not checked here"
    )
