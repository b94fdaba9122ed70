"""Removes from site-packages what docker/prune.toml lists, after checking that no other file uses it.

    python -m tools.image.prune SITE_PACKAGES LIST REPORT

Before it removes anything, it searches every Python file and shared library that stays for the names by which
the file could import, open or link what goes. A file that the list does not name stops the build. The report
is JSON with one record per rule: verb, paths, reason, importers, bytes saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.commands import run_checked
from tools.errors import ToolError, exit_on_error

Rule = dict[str, Any]  # one table of the list; in the report, with verb and bytes

LINK_BYTES = 4096  # a smaller file takes one block either way
LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files under a folder. A link counts as 0."""
    if path.is_symlink():
        return 0
    return sum(map(size, path.iterdir())) if path.is_dir() else path.stat().st_size


def matches(site: Path, patterns: list[str]) -> list[Path]:
    """Return what the patterns match, without paths that are inside others.

    Raises:
        ToolError: a pattern matches nothing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        new = set(site.glob(pattern))
        if not new:
            raise ToolError(f"paths: expected {pattern} to match something in {site}, found nothing.")
        found |= new
    return sorted(path for path in found if not found.intersection(path.parents))


def texts(site: Path, gone: set[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield (path in `site`, content) of each Python file and shared library outside `gone`."""
    for top, folders, files in os.walk(site):
        folders[:] = [name for name in folders if Path(top, name) not in gone]
        for name in files:
            path = Path(top, name)
            if (name.endswith(".py") or LIBRARY.search(name)) and path not in gone and not path.is_symlink():
                yield path.relative_to(site).as_posix(), path.read_bytes()


def check_importers(site: Path, rules: list[Rule], gone: set[Path]) -> None:
    """Check that each rule lists exactly the files that name what it removes.

    Args:
        site: the folder site-packages.
        rules: the rules of the verb `remove`.
        gone: the paths that the rules remove.

    Raises:
        ToolError: a rule lists too few files or too many.
    """
    found_by_rule: list[set[str]] = [set() for _ in rules]
    names_by_rule = [[name.encode() for name in rule["names"]] for rule in rules]
    for path, content in texts(site, gone):
        for found, names in zip(found_by_rule, names_by_rule):
            if any(
                name in content for name in names
            ):  # a plain search, since it reads gigabytes of libraries
                found.add(path)
    wrong = []
    for rule, found in zip(rules, found_by_rule):
        known = set(rule["importers"])
        wrong += [f"{path} names {' or '.join(rule['names'])}" for path in sorted(found - known)]
        wrong += [f"{path} no longer names {' or '.join(rule['names'])}" for path in sorted(known - found)]
    if wrong:
        raise ToolError("importers: " + "; ".join(wrong))


def prune(site: Path, rules: dict[str, list[Rule]]) -> list[Rule]:
    """Remove and strip what the rules name, and link copies.

    Args:
        site: the folder site-packages.
        rules: the parsed list, by verb.

    Returns:
        One record per rule, and one for the links.

    Raises:
        ToolError: a pattern matches nothing, an importer is not listed, or strip failed.
    """
    removals = [(rule, matches(site, rule["paths"])) for rule in rules.get("remove", [])]
    strips = [(rule, matches(site, rule["paths"])) for rule in rules.get("strip", [])]
    check_importers(site, rules.get("remove", []), {path for _, paths in removals for path in paths})
    report: list[Rule] = []
    for rule, paths in removals:
        saved = sum(map(size, paths))
        for path in paths:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        report.append({"verb": "remove", "bytes": saved, **rule})
    for rule, paths in strips:
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        before = sum(map(size, files))
        run_checked(["strip", "--strip-unneeded", *files])
        report.append({"verb": "strip", "bytes": before - sum(map(size, files)), **rule})
    return [*report, link_copies(site)]


def link_copies(site: Path) -> Rule:
    """Link files of the same content and mode, since wheels cannot hold links; return the report's record."""
    by_size: dict[tuple[int, int], list[Path]] = {}
    for top, _, files in os.walk(site):
        for name in files:
            path = Path(top, name)
            state = path.lstat()
            if not path.is_symlink() and state.st_size >= LINK_BYTES and state.st_nlink == 1:
                by_size.setdefault((state.st_size, state.st_mode), []).append(path)
    saved, linked = 0, 0
    first: dict[tuple[int, int, bytes], Path] = {}
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
    """Run the command line; return the exit status."""
    with exit_on_error():
        records = prune(Path(site), tomllib.loads(Path(rules).read_text()))
    Path(report).parent.mkdir(parents=True, exist_ok=True)
    Path(report).write_text(json.dumps(records, indent=1) + "\n")
    for record in records:
        print(f"{record['verb']} {record['bytes'] / 1e6:.0f} MB: {', '.join(record['paths'])[:90]}")
    print(f"{sum(record['bytes'] for record in records) / 1e9:.2f} GB left out")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
