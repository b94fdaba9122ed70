"""A patch: a zero-context unified diff that only adds lines, under a header that says why.

Every patch is written against the pristine upstream file, so patches do not depend on each other.
"""

from __future__ import annotations

import ast
import io
import re
from dataclasses import dataclass, field
from typing import NoReturn

from tools.errors import ToolError
from tools.symbols import MODULE

REQUIRED = ("Description", "Author", "Forwarded", "Last-Update", "Seam", "Calls", "Remove-When", "Test")
OPTIONAL = ("Bug", "Applied-Upstream")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,([1-9]\d*))? @@")
SEAM = re.compile(r"[\w.]+:[\w.<>]+")


def split_entries(field_text: str) -> list[str]:
    """Split a header field into its values, which commas or white space separate."""
    return field_text.replace(",", " ").split()


@dataclass(frozen=True)
class Hunk:
    """Lines, without line ends, added after line `after` of the upstream file (0: at its top)."""

    after: int
    lines: tuple[str, ...]


@dataclass
class Patch:
    """One file of the series. name: its path below patches/; hunks: by upstream path, ascending."""

    name: str
    fields: dict[str, str]
    hunks: dict[str, list[Hunk]] = field(default_factory=dict)

    def entries(self, key: str) -> list[str]:
        """Return the values of a header field."""
        return split_entries(self.fields[key])

    @property
    def seams(self) -> list[tuple[str, str]]:
        """The (module, qualified name) of each upstream symbol that the header says is changed."""
        return self.pairs("Seam")

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The (module, name) of each function of ours that the header says is called."""
        return self.pairs("Calls")

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """Return the `module:name` entries of a header field as pairs."""
        split = (entry.partition(":") for entry in self.entries(key))
        return [(module, name) for module, _, name in split]

    @classmethod
    def parse(cls, name: str, text: str) -> Patch:
        """Read a patch. Refuse everything except a full header and added lines.

        Raises:
            ToolError: with the patch, the line and the rule.
        """
        lines = text.rstrip("\n").split("\n")
        start = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
        return cls(name, _parse_header(name, lines[:start]), _parse_hunks(name, lines, start))

    def format(self) -> str:
        """Return the patch in its normal form, so that exporting twice changes nothing."""
        out = []
        for key in REQUIRED[:2] + OPTIONAL + REQUIRED[2:]:
            if key in self.fields:
                out.append(f"{key}: " + self.fields[key].replace("\n", "\n "))
        for path in sorted(self.hunks):
            out += [f"--- a/{path}", f"+++ b/{path}"]
            shift = 0
            for h in self.hunks[path]:
                n = len(h.lines)
                out.append(f"@@ -{h.after},0 +{h.after + shift + 1}" + (f",{n} @@" if n > 1 else " @@"))
                out += ["+" + line for line in h.lines]
                shift += n
        return "\n".join(out) + "\n"


def _stop(name: str, number: int, why: str) -> NoReturn:
    """Raise the error for line `number` of the patch `name`."""
    raise ToolError(f"patches/{name}:{number}: {why}")


def _parse_header(name: str, lines: list[str]) -> dict[str, str]:
    """Return the fields of a header, which is everything before the first `---`."""
    fields: dict[str, str] = {}
    key = ""
    for at, line in enumerate(lines, 1):
        if match := re.match(r"([A-Z][\w-]*):\s*(.*)", line):
            key, value = match.groups()
            if key not in REQUIRED + OPTIONAL:
                _stop(name, at, f"expected a header field of {', '.join(REQUIRED + OPTIONAL)}, got {key}.")
            fields[key] = value
        elif line.startswith(" ") and key:
            fields[key] += "\n" + line.strip()
        elif line.strip():
            _stop(name, at, f"expected a header field or '--- a/...', got {line!r}.")
    missing = [k for k in REQUIRED if not fields.get(k, "").strip()]
    if missing:
        _stop(name, 1, f"the header lacks {', '.join(missing)}; see patches/README.md.")
    for key in ("Seam", "Calls"):
        for entry in split_entries(fields[key]):
            if not SEAM.fullmatch(entry):
                _stop(name, 1, f"{key} must be module:Qual.name (or module:{MODULE}), got {entry!r}.")
    return fields


def _parse_hunks(name: str, lines: list[str], start: int) -> dict[str, list[Hunk]]:
    """Return the hunks of a patch by path. Its diff begins at index `start` of its lines."""
    path, due = "", 0
    added: list[str] = []
    found: dict[str, list[tuple[int, list[str]]]] = {}  # by path: after which line, what is added
    for at, line in enumerate(lines[start:], start + 1):
        if due and line.startswith("+"):
            added.append(line[1:])
            due -= 1
        elif line.startswith("--- ") and not due:
            path = line.removeprefix("--- a/")
            if at == len(lines) or lines[at] != f"+++ b/{path}" or path in found:
                _stop(name, at, f"expected '--- a/PATH' and '+++ b/PATH', once per file, got {line!r}.")
            if not path.endswith(".py"):
                _stop(name, at, f"expected a Python module of upstream, got {path}.")
            found[path] = []
        elif line.startswith("+++ ") and lines[at - 2].startswith("--- "):
            continue
        elif (match := HUNK.match(line)) and not due:
            if line != match.group():
                _stop(
                    name,
                    at,
                    "text after the second @@ is upstream code: run `python -m tools.patchset refresh`.",
                )
            if found[path] and int(match[1]) <= found[path][-1][0]:
                _stop(name, at, "the hunks of a file must ascend, one per place.")
            added, due = [], int(match[3] or 1)
            found[path].append((int(match[1]), added))
        elif line.startswith("@@") and not due:
            _stop(name, at, f"{line!r} has context or removed lines: expected '@@ -LINE,0 +LINE,COUNT @@'.")
        elif line.startswith("+"):
            _stop(name, at, "the hunk has more lines than its @@ line says: correct the count.")
        else:
            kind = "removed" if line.startswith("-") else "context"
            _stop(name, at, f"{kind} line {line!r}: a patch only adds lines and contains no upstream line.")
    if due or not all(found.values()) or not found:
        _stop(name, len(lines), "the patch ends before its hunks do.")
    return {p: [Hunk(at, tuple(new)) for at, new in hunks] for p, hunks in found.items()}


def merge(source: bytes, patches: list[Patch], path: str) -> tuple[bytes, dict[str, list[int]]]:
    """Add the lines of `patches` to the upstream file `path`.

    Args:
        source: the content of the upstream file.
        patches: the patches, in series order.
        path: the file's path inside the wheel.

    Returns:
        The new file, and per patch the numbers (1-based) of its lines in it.

    Raises:
        ToolError: a hunk is beyond the end of the file.
    """
    lines = io.BytesIO(source).readlines()  # like git, which ends a line at \n only
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    places: dict[int, list[tuple[str, bytes]]] = {}
    for patch in patches:
        for hunk in patch.hunks.get(path, ()):
            if hunk.after > len(lines) or (hunk.after and not lines[hunk.after - 1].endswith(b"\n")):
                raise ToolError(f"patches/{patch.name}: {path} has no line {hunk.after} to add lines after.")
            added = [(patch.name, line.encode() + end) for line in hunk.lines]
            places.setdefault(hunk.after, []).extend(added)
    out: list[bytes] = []
    numbers: dict[str, list[int]] = {}
    for at in range(len(lines) + 1):
        if at:
            out.append(lines[at - 1])
        for name, line in places.get(at, ()):
            out.append(line)
            numbers.setdefault(name, []).append(len(out))
    return b"".join(out), numbers


def must_parse(path: str, data: bytes, patches: str) -> None:
    """Check the syntax of a patched file.

    Args:
        path: its name, for the message.
        data: its content.
        patches: the names of the patches, for the message.

    Raises:
        ToolError: it is not valid Python.
    """
    try:
        ast.parse(data)
    except SyntaxError as error:
        raise ToolError(f"{path}:{error.lineno} is not valid Python after {patches} ({error.msg}).") from None
