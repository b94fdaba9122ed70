"""A patch: a zero-context unified diff that only adds lines, under a header that says why.

Every patch is written against the pristine upstream file, so patches do not depend on one another.
"""

from __future__ import annotations

import ast
import io
import re
from dataclasses import dataclass, field

from .symbols import MODULE
from .upstream import Stop

REQUIRED = ("Description", "Author", "Forwarded", "Last-Update", "Seam", "Calls", "Remove-When", "Test")
OPTIONAL = ("Bug", "Applied-Upstream")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,([1-9]\d*))? @@")
SEAM = re.compile(r"[\w.]+:[\w.<>]+")


@dataclass(frozen=True)
class Hunk:
    """Lines (without their ends) added after line `after` of the upstream file (0: at its top)."""

    after: int
    lines: tuple[str, ...]


@dataclass
class Patch:
    """One file of the series. name: its path below patches/; hunks: by upstream path, ascending."""

    name: str
    fields: dict[str, str]
    hunks: dict[str, list[Hunk]] = field(default_factory=dict)

    def entries(self, key: str) -> list[str]:
        """The values of a header field that holds several, split at commas and white space."""
        return self.fields[key].replace(",", " ").split()

    @property
    def seams(self) -> list[tuple[str, str]]:
        """The (module, qualified name) pairs of upstream's that the header says are changed."""
        return [tuple(entry.split(":")) for entry in self.entries("Seam")]

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The (module, name) pairs of ours that the header says are called."""
        return [tuple(entry.split(":")) for entry in self.entries("Calls")]

    @classmethod
    def parse(cls, name: str, text: str) -> Patch:
        """Read a patch, refusing everything but a full header and added lines.

        Raises:
            Stop: names the patch, the line and the rule.
        """

        def stop(number: int, why: str):
            raise Stop(f"patches/{name}:{number}: {why}")

        patch, lines, key = cls(name, {}), text.rstrip("\n").split("\n"), None
        start = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
        for at, line in enumerate(lines[:start], 1):
            if match := re.match(r"([A-Z][\w-]*):\s*(.*)", line):
                key, value = match.groups()
                if key not in REQUIRED + OPTIONAL:
                    stop(at, f"{key} is no header field we use; use one of {', '.join(REQUIRED + OPTIONAL)}.")
                patch.fields[key] = value
            elif line.startswith(" ") and key:
                patch.fields[key] += "\n" + line.strip()
            elif line.strip():
                stop(at, f"expected a header field or '--- a/...', got {line!r}.")
        missing = [k for k in REQUIRED if not patch.fields.get(k, "").strip()]
        if missing:
            stop(1, f"the header lacks {', '.join(missing)}; see patches/README.md.")
        for key in ("Seam", "Calls"):
            for entry in patch.entries(key):
                if not SEAM.fullmatch(entry):
                    stop(1, f"{key} must be module:Qual.name (or module:{MODULE}), got {entry!r}.")

        path, added, due = None, None, 0
        for at, line in enumerate(lines[start:], start + 1):
            if due and line.startswith("+"):
                added.append(line[1:])
                due -= 1
            elif line.startswith("--- ") and not due:
                path = line.removeprefix("--- a/")
                if at == len(lines) or lines[at] != f"+++ b/{path}" or path in patch.hunks:
                    stop(at, f"expected '--- a/PATH' and '+++ b/PATH', once for each file, got {line!r}.")
                if not path.endswith(".py"):
                    stop(at, f"expected a Python module of upstream's, got {path}.")
                patch.hunks[path] = []
            elif line.startswith("+++ ") and lines[at - 2].startswith("--- "):
                continue
            elif (match := HUNK.match(line)) and not due:
                if line != match.group():
                    stop(
                        at, "text after the second @@ is upstream's; run `python -m tools.patchset refresh`."
                    )
                if patch.hunks[path] and int(match[1]) <= patch.hunks[path][-1].after:
                    stop(at, "the hunks of a file must ascend, one for each place.")
                added, due = [], int(match[3] or 1)
                patch.hunks[path].append(Hunk(int(match[1]), added))
            elif line.startswith("@@") and not due:
                stop(at, f"{line!r} has context or removed lines: expected '@@ -LINE,0 +LINE,COUNT @@'.")
            elif line.startswith("+"):
                stop(at, "the hunk has more lines than its @@ line says: correct the count.")
            else:
                kind = "removed" if line.startswith("-") else "context"
                stop(at, f"{kind} line {line!r}: a patch only adds lines and carries none of upstream's.")
        if due or not all(patch.hunks.values()) or not patch.hunks:
            stop(len(lines), "the patch ends before its hunks do.")
        for path, hunks in patch.hunks.items():
            patch.hunks[path] = [Hunk(h.after, tuple(h.lines)) for h in hunks]
        return patch

    def format(self) -> str:
        """The one way a patch is written down, so that exporting twice changes nothing."""
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


def merge(source: bytes, patches: list[Patch], path: str) -> tuple[bytes, dict[str, list[int]]]:
    """Add the lines of `patches` to the upstream file `path`.

    Args:
        source: the upstream file.
        patches: in series order.
    Returns:
        The new file, and for each patch the numbers (1-based) that its lines have in it.
    Raises:
        Stop: a hunk lies beyond the end of the file.
    """
    lines = io.BytesIO(source).readlines()  # as git counts them: only \n ends a line
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    places: dict[int, list[tuple[str, bytes]]] = {}
    for patch in patches:
        for hunk in patch.hunks.get(path, ()):
            if hunk.after > len(lines) or (hunk.after and not lines[hunk.after - 1].endswith(b"\n")):
                raise Stop(f"patches/{patch.name}: {path} has no line {hunk.after} to add lines after.")
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
    """Stop if the patched file `path` is Python no longer."""
    try:
        ast.parse(data)
    except SyntaxError as error:
        raise Stop(f"{path}:{error.lineno} is no Python any more ({error.msg}) after {patches}.") from None
