"""No upstream code in this repository: find runs of lines that a file of ours shares with the pinned release."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .upstream import Release, Stop

RUN = 6  # consecutive non-trivial lines that may not be shared
TEXT = (
    ".py",
    ".pyi",
    ".cu",
    ".cuh",
    ".h",
    ".hpp",
    ".cpp",
    ".cc",
    ".c",
    ".hip",
    ".md",
    ".txt",
    ".toml",
    ".yaml",
    ".sh",
)
TEXT += (".jinja2", ".js", ".mjs", ".css", ".html")
TRIVIAL = re.compile(
    r"""\W*                                                                 # blank, or punctuation alone
      | (from\s+\S+\s+)?import\s .* | \#\s*(include|pragma|if|ifdef|ifndef|else|endif)\b.* | using\s+namespace\s.*
      | \W*(else|try|finally|return|pass|break|continue|default)\W*            # a keyword alone
      | [\#/*\s]* (Copyright|Licensed\sunder|Licensed\sto|SPDX-|you\smay\snot\suse|You\smay\sobtain|https?://www\.apache
                 |Unless\srequired|distributed\sunder|WITHOUT\sWARR|See\sthe\sLicense|limitations\sunder).*
    """,
    re.X | re.S,
)


@dataclass(frozen=True)
class Copy:
    """`count` non-trivial lines from line `line` of `path` on are in `source`, too."""

    path: str
    line: int
    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.count} lines are those of upstream's {self.source}: write your own."


def essence(text: str) -> list[tuple[int, str]]:
    """The non-trivial lines of `text`, with their numbers, without indentation, spacing and diff marks."""
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        line = " ".join(line.split())
        if not TRIVIAL.fullmatch(line):
            out.append((number, line))
    return out


def windows(lines: list[tuple[int, str]]):
    """Yield (index, hash) of every run of RUN lines."""
    hashes = [hash(line) for _, line in lines]
    for i in range(len(hashes) - RUN + 1):
        yield i, hash(tuple(hashes[i : i + RUN]))


def tracked(root: Path) -> list[Path]:
    """Files that git has or would take up. Raises Stop outside a git checkout."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True
    )
    if done.returncode:
        raise Stop(f"provenance needs the git checkout, and {root} is none: run it there.")
    return [
        root / name for name in sorted(done.stdout.decode().split("\0")) if name and (root / name).is_file()
    ]


def copies(files: dict[str, str], sources: dict[str, str]) -> list[Copy]:
    """Runs of lines that `files` share with `sources` (both: text by path)."""
    ours = {}  # window hash: where it is
    lines = {p: essence(re.sub(r"(?m)^\+", "", t) if p.endswith(".patch") else t) for p, t in files.items()}
    for path, found in lines.items():
        for i, key in windows(found):
            ours.setdefault(key, []).append((path, i))
    shared: dict[tuple[str, int], str] = {}
    for name, text in sources.items():
        theirs = essence(text)
        for _, key in windows(theirs):
            for place in ours.get(key, ()):
                shared.setdefault(place, name)
    out: list[Copy] = []
    for path, i in sorted(shared):
        line, source = lines[path][i][0], shared[path, i]
        last = out[-1] if out else None
        if last and (path, i - 1) in shared and last.path == path:
            out[-1] = Copy(path, last.line, last.count + 1, last.source)
        else:
            out.append(Copy(path, line, RUN, source))
    return out


def check(root: Path, upstream: Release, also: Iterable[Path] = ()) -> list[Copy]:
    """What this checkout shares with `upstream` and with the sources in the folders `also`; the licence text is free."""

    def text(data: bytes) -> str:
        return data.decode("utf-8", "replace")

    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in tracked(root) if p.name != "LICENSE"}
    files = {name: text(data) for name, data in files.items() if b"\0" not in data}
    sources = {n: text(upstream.read(n)) for n in upstream.entries if n.endswith(TEXT)}
    for folder in also:
        found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name.endswith(TEXT)]
        if not found:
            raise Stop(f"--also {folder} has no source files to compare with: name a folder that has.")
        sources |= {str(p): text(p.read_bytes()) for p in found}
    return copies(files, sources)
