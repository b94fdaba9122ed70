"""Leaves out of site-packages what docker/prune.toml lists, once it has shown that no other file reaches for it.

    python -m tools.image.prune SITE_PACKAGES LIST REPORT

Before anything is removed, every Python file and shared library that stays is searched for the names by which it could
import, open or link what goes. Those that the list does not know stop the build. The report is JSON, a record a rule:
verb, paths, reason, importers, bytes saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

LINK_BYTES = 4096  # smaller files take a block each way
LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")


class PruneError(Exception):
    """The list does not fit the packages; its text says what to change."""


def size(path: Path) -> int:
    """Bytes of a file, or of all files under a folder; a link counts nothing."""
    if path.is_symlink():
        return 0
    return sum(map(size, path.iterdir())) if path.is_dir() else path.stat().st_size


def matches(site: Path, patterns: list[str]) -> list[Path]:
    """Returns what the patterns match, outermost paths only.

    Raises:
        PruneError: one of them matches nothing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        new = set(site.glob(pattern))
        if not new:
            raise PruneError(f"paths: expected {pattern} to match something in {site}, found nothing")
        found |= new
    return sorted(path for path in found if not found.intersection(path.parents))


def texts(site: Path, gone: set[Path]) -> Iterator[tuple[str, bytes]]:
    """(path in `site`, content) of each Python file and shared library that is not in or under `gone`."""
    for top, folders, files in os.walk(site):
        folders[:] = [name for name in folders if Path(top, name) not in gone]
        for name in files:
            path = Path(top, name)
            if (name.endswith(".py") or LIBRARY.search(name)) and path not in gone and not path.is_symlink():
                yield path.relative_to(site).as_posix(), path.read_bytes()


def check_importers(site: Path, rules: list[dict], gone: set[Path]) -> None:
    """Raises PruneError unless the files that name what the rules remove are those that the rules list."""
    found_by_rule: list[set[str]] = [set() for _ in rules]
    names_by_rule = [[name.encode() for name in rule["names"]] for rule in rules]
    for path, content in texts(site, gone):
        for found, names in zip(found_by_rule, names_by_rule):
            if any(name in content for name in names):  # plain search: gigabytes of libraries are read
                found.add(path)
    wrong = []
    for rule, found in zip(rules, found_by_rule):
        known = set(rule["importers"])
        wrong += [f"{path} names {' or '.join(rule['names'])}" for path in sorted(found - known)]
        wrong += [f"{path} no longer names {' or '.join(rule['names'])}" for path in sorted(known - found)]
    if wrong:
        raise PruneError("importers: " + "; ".join(wrong))


def prune(site: Path, rules: dict[str, list[dict]]) -> list[dict]:
    """Removes and strips what `rules` (the list, parsed) names under `site`, and links copies; returns the records.

    Raises:
        PruneError: a pattern matches nothing, or an importer is not listed.
        subprocess.CalledProcessError: strip failed; its output has said why.
    """
    removals = [(rule, matches(site, rule["paths"])) for rule in rules.get("remove", [])]
    strips = [(rule, matches(site, rule["paths"])) for rule in rules.get("strip", [])]
    check_importers(site, rules.get("remove", []), {path for _, paths in removals for path in paths})
    report = []
    for rule, paths in removals:
        saved = sum(map(size, paths))
        for path in paths:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        report.append({"verb": "remove", "bytes": saved, **rule})
    for rule, paths in strips:
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        before = sum(map(size, files))
        subprocess.run(["strip", "--strip-unneeded", *files], check=True)
        report.append({"verb": "strip", "bytes": before - sum(map(size, files)), **rule})
    return [*report, link_copies(site)]


def link_copies(site: Path) -> dict:
    """Makes one file of those with the same content and mode (wheels know no links); returns the report's record."""
    by_size: dict[tuple[int, int], list[Path]] = {}
    for top, _, files in os.walk(site):
        for name in files:
            path = Path(top, name)
            state = path.lstat()
            if not path.is_symlink() and state.st_size >= LINK_BYTES and state.st_nlink == 1:
                by_size.setdefault((state.st_size, state.st_mode), []).append(path)
    saved, linked, first = 0, 0, {}
    for key, paths in by_size.items():
        for path in sorted(paths) if len(paths) > 1 else ():
            content = (*key, hashlib.sha256(path.read_bytes()).digest())
            if content in first:
                path.unlink()
                path.hardlink_to(first[content])
                saved, linked = saved + key[0], linked + 1
            else:
                first[content] = path
    return {"verb": "link", "bytes": saved, "paths": [f"{linked} copies of other files"]}


def main(site: str, rules: str, report: str) -> int:
    try:
        records = prune(Path(site), tomllib.loads(Path(rules).read_text()))
    except PruneError as error:
        print(f"error: {rules}: {error}", file=sys.stderr)
        return 1
    Path(report).parent.mkdir(parents=True, exist_ok=True)
    Path(report).write_text(json.dumps(records, indent=1) + "\n")
    for record in records:
        print(f"{record['verb']} {record['bytes'] / 1e6:.0f} MB: {', '.join(record['paths'])[:90]}")
    print(f"{sum(record['bytes'] for record in records) / 1e9:.2f} GB left out")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
