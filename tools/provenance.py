"""No upstream code in this repository: find runs of lines that our files share with the pinned release."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.errors import ToolError
from tools.upstream import Release

RUN = 6  # this many consecutive non-trivial lines must not be shared
TEXT = tuple(
    ".py .pyi .cu .cuh .h .hpp .cpp .cc .c .hip .md .txt .toml .yaml .sh .jinja2 .js .mjs .css .html".split()
)
TRIVIAL = re.compile(
    r"""\W*                                                                 # blank, or punctuation only
      | (from\s+\S+\s+)?import\s .* | \#\s*(include|pragma|if|ifdef|ifndef|else|endif)\b.* | using\s+namespace\s.*
      | \W*(else|try|finally|return|pass|break|continue|default)\W*            # a keyword only
      | [\#/*\s]* (Copyright|Licensed\sunder|Licensed\sto|SPDX-|you\smay\snot\suse|You\smay\sobtain|https?://www\.apache
                 |Unless\srequired|distributed\sunder|WITHOUT\sWARR|See\sthe\sLicense|limitations\sunder).*
    """,
    re.X | re.S,
)


@dataclass(frozen=True)
class Copy:
    """`count` non-trivial lines of `path`, from line `line` on, are also in `source`."""

    path: str
    line: int
    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.count} lines are also in upstream's {self.source}: write your own."


def essence(text: str) -> list[tuple[int, str]]:
    """Return the non-trivial lines of `text` with their numbers, without indentation and spacing."""
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        line = " ".join(line.split())
        if not TRIVIAL.fullmatch(line):
            out.append((number, line))
    return out


def windows(lines: list[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Yield (index, hash) of every run of RUN lines."""
    hashes = [hash(line) for _, line in lines]
    for i in range(len(hashes) - RUN + 1):
        yield i, hash(tuple(hashes[i : i + RUN]))


def tracked(root: Path) -> list[Path]:
    """Return the files that git tracks or would track.

    Raises:
        ToolError: `root` is not a git checkout.
    """
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True
    )
    if done.returncode:
        raise ToolError(f"provenance needs a git checkout, and {root} is not one: run it in a clone.")
    return [
        root / name for name in sorted(done.stdout.decode().split("\0")) if name and (root / name).is_file()
    ]


def copies(files: dict[str, str], sources: dict[str, str]) -> list[Copy]:
    """Return the runs of lines that `files` share with `sources` (both: text by path)."""
    ours: dict[int, list[tuple[str, int]]] = {}  # hash of a window: where it is
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
    """Return what this checkout shares with others. The licence text may be shared.

    Args:
        root: the checkout.
        upstream: the release to compare with.
        also: folders of further sources to compare with.

    Raises:
        ToolError: `root` is not a git checkout, or a folder has no sources.
    """

    def text(data: bytes) -> str:
        return data.decode("utf-8", "replace")

    contents = {p.relative_to(root).as_posix(): p.read_bytes() for p in tracked(root) if p.name != "LICENSE"}
    files = {name: text(data) for name, data in contents.items() if b"\0" not in data}
    sources = {n: text(upstream.read(n)) for n in upstream.entries if n.endswith(TEXT)}
    for folder in also:
        found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name.endswith(TEXT)]
        if not found:
            raise ToolError(f"--also: expected a folder with source files, got {folder}, which has none.")
        sources |= {str(p): text(p.read_bytes()) for p in found}
    return copies(files, sources)
