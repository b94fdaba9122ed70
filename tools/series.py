"""The patch series and the overlay: what we add to an upstream release, and the rules it keeps.

A patch is a zero-context unified diff that only adds lines. Every patch is written against the pristine upstream file,
so patches do not depend on one another; the series gives the order of lines that two patches add at one place.
"""

from __future__ import annotations

import ast
import io
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .symbols import MODULE, Symbol, changed, owner, symbols
from .upstream import ROOT, Release, Stop, sha256

BUDGET = 10  # patches in the whole distribution
SEAM_LINES = 5  # lines a patch may add to one function: an import and one call
REQUIRED = ("Description", "Author", "Forwarded", "Last-Update", "Seam", "Calls", "Remove-When", "Test")
OPTIONAL = ("Bug", "Applied-Upstream")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,([1-9]\d*))? @@")
SEAM = re.compile(r"[\w.]+:[\w.<>]+")


def module_path(module: str, has) -> str | None:
    """File of a dotted module inside the wheel, or None. has(path) tells which files there are."""
    stem = module.replace(".", "/")
    return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if has(p)), None)


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

    @property
    def seams(self) -> list[tuple[str, str]]:
        """The (module, qualified name) pairs that the header says are changed."""
        return [tuple(s.split(":")) for s in self.fields["Seam"].replace(",", " ").split()]

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [tuple(s.split(":")) for s in self.fields["Calls"].replace(",", " ").split()]

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
            for entry in patch.fields[key].replace(",", " ").split():
                if not SEAM.fullmatch(entry):
                    stop(1, f"{key} must be module:Qual.name (or module:{MODULE}), got {entry!r}.")

        path, added, due = None, None, 0
        for number, line in enumerate(lines[start:], start + 1):
            if due:
                if not line.startswith("+"):
                    kind = "removed" if line.startswith("-") else "context"
                    stop(number, f"{kind} line {line!r}: a patch may only add lines and carries no upstream line.")
                added.append(line[1:])
                due -= 1
            elif line.startswith("--- "):
                path = line.removeprefix("--- a/")
                if number == len(lines) or lines[number] != f"+++ b/{path}" or path in patch.hunks:
                    stop(number, f"expected '--- a/PATH' and '+++ b/PATH', once for each file, got {line!r}.")
                patch.hunks[path] = []
            elif line.startswith("+++ ") and lines[number - 2].startswith("--- "):
                continue
            elif match := HUNK.match(line):
                if path is None or line != match.group():
                    stop(number, "text after the second @@ is an upstream line; run `python -m tools.patchset refresh`.")
                if patch.hunks[path] and int(match[1]) <= patch.hunks[path][-1].after:
                    stop(number, "the hunks of a file must ascend, one for each place.")
                added, due = [], int(match[3] or 1)
                patch.hunks[path].append(Hunk(int(match[1]), added))
            elif line.startswith("@@"):
                stop(number, f"{line!r} has context or removed lines; a hunk must read '@@ -LINE,0 +LINE,COUNT @@'.")
            elif line.startswith("-"):
                stop(number, f"removed line {line!r}: a patch may only add lines and carries no upstream line.")
            elif line.startswith("+"):
                stop(number, "the hunk has more lines than its @@ line says: correct the count.")
            else:
                stop(number, f"context line {line!r}: a patch may only add lines and carries no upstream line.")
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
        if path.endswith(".py"):
            ast.parse(data)
    except SyntaxError as error:
        raise Stop(f"{path}:{error.lineno} is no Python any more ({error.msg}) after {patches}.") from None


@dataclass
class Series:
    """Everything of ours that goes into the package, read from a checkout."""

    root: Path = ROOT

    @property
    def folder(self) -> Path:
        return self.root / "patches"

    @cached_property
    def names(self) -> list[str]:
        lines = (self.folder / "series").read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    @cached_property
    def patches(self) -> list[Patch]:
        self.refuse_excess()
        return [self.read(name) for name in self.names]

    def read(self, name: str) -> Patch:
        try:
            return Patch.parse(name, (self.folder / name).read_text())
        except FileNotFoundError:
            raise Stop(f"patches/series lists {name} and there is no such file: add it or drop the line.") from None

    @cached_property
    def touched(self) -> list[str]:
        """Upstream paths that some patch changes."""
        return sorted({path for p in self.patches for path in p.hunks})

    @cached_property
    def overlay(self) -> dict[str, Path]:
        """Our own files by their path in the wheel."""
        base = self.root / "python"
        files = {f.relative_to(base): f for f in sorted((base / "sglang").rglob("*")) if f.is_file()}
        skip = ("__pycache__", ".")
        return {r.as_posix(): f for r, f in files.items() if not any(part.startswith(skip) for part in r.parts)}

    def refuse_excess(self) -> None:
        if len(self.names) > BUDGET:
            raise Stop(f"the series has {len(self.names)} patches and the budget is {BUDGET}: merge or drop some.")

    def refuse_collisions(self, upstream: Release) -> None:
        """Stop if a file of ours would hide or replace something of upstream's."""
        for path in self.overlay:
            stem = path.removesuffix("/__init__.py").removesuffix(".py")
            same = [q for q in (path, f"{stem}.py", f"{stem}/__init__.py") if q in upstream]
            same += [str(q) for q in Path(path).parents if str(q) in upstream]
            same += [path] if path in upstream.folders else []
            if same:
                raise Stop(
                    f"python/{path} would replace {same[0]} of sglang {upstream.wheel.version}: "
                    "rename ours, or change upstream's by a patch."
                )

    def patched(self, upstream: Release) -> dict[str, bytes]:
        """The upstream files that the series changes, changed; each is known to be Python.

        Raises:
            Stop: a patched file is not in this release, or a patch breaks its syntax.
        """
        out = {}
        for path in self.touched:
            names = ", ".join(p.name for p in self.patches if path in p.hunks)
            if path not in upstream:
                raise Stop(f"sglang {upstream.wheel.version} has no {path}, which {names} changes: run the rebase.")
            out[path], _ = merge(upstream.read(path), self.patches, path)
            must_parse(path, out[path], names)
        return out

    def assemble(self, upstream: Release) -> dict[str, bytes]:
        """`patched`, with the overlay and the recorded hashes checked too. This is what every build calls."""
        self.refuse_collisions(upstream)
        for path, want in self.recorded("pre.sha256").items():
            if path in upstream and sha256(upstream.read(path)) != want:
                raise Stop(f"{path} of sglang {upstream.wheel.version} is not the file the patches are for: run the rebase.")
        out = self.patched(upstream)
        for name, files in (("pre.sha256", self.touched), ("post.sha256", out)):
            if (self.folder / name).exists() and set(self.recorded(name)) != set(files):
                raise Stop(f"patches/{name} is not of this series: run `python -m tools.patchset refresh`.")
        for path, want in self.recorded("post.sha256").items():
            if sha256(out[path]) != want:
                raise Stop(f"{path} comes out otherwise than recorded: run `python -m tools.patchset refresh`.")
        return out

    def recorded(self, name: str) -> dict[str, str]:
        """A generated file, `DIGEST  KEY` a line, as {KEY: DIGEST}."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return {key: digest for digest, key in (line.split(None, 1) for line in lines)}

    def seams(self, upstream: Release) -> dict[str, Symbol | None]:
        """The upstream symbols that the patches change, as they are in this release (None: not there)."""
        out: dict[str, Symbol | None] = {}
        for patch in self.patches:
            for module, name in patch.seams:
                path = module_path(module, upstream.__contains__)
                table = symbols(upstream.read(path)) if path else {}
                out[f"{module}:{name}"] = table.get(name)
        return out

    def lint(self, upstream: Release) -> list[str]:
        """Sentences on what breaks our rules though it would build."""
        wrong = []
        listed = set(self.names)
        wrong += [
            f"patches/{n} is in no series: add it with `python -m tools.patchset refresh` or delete it."
            for n in sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.patch"))
            if n not in listed
        ]
        for name, now in (("pre.sha256", self.pre(upstream)), ("seams.lock", self.lock(upstream))):
            if now != self.recorded(name):
                wrong.append(f"patches/{name} is stale: run `python -m tools.patchset refresh`.")
        for patch in self.patches:
            text = (self.folder / patch.name).read_text()
            if text != patch.format():
                wrong.append(f"patches/{patch.name} is not in normal form: run `python -m tools.patchset refresh`.")
            wrong += self.lint_seams(patch, upstream) + self.lint_names(patch)
        return wrong

    def lint_seams(self, patch: Patch, upstream: Release) -> list[str]:
        """Sentences on seams that are not there, not what the lines change, or too long."""
        claimed: set[tuple[str, str]] = set()
        wrong = []
        for module, name in patch.seams:
            path = module_path(module, upstream.__contains__)
            if not path or name not in symbols(upstream.read(path)):
                wrong.append(f"patches/{patch.name}: Seam {module}:{name} is not in sglang {upstream.wheel.version}.")
            else:
                claimed.add((path, name))
        actual: set[tuple[str, str]] = set()
        for path in patch.hunks:
            before = upstream.read(path)
            after, numbers = merge(before, [patch], path)
            names = symbols(before)
            table = {n: s for n, s in symbols(after).items() if n in names}
            actual |= {(path, n) for n in changed(before, after)}
            sizes: dict[str, int] = {}
            for number in numbers[patch.name]:
                seam = owner(table, number)
                sizes[seam] = sizes.get(seam, 0) + 1
            wrong += [
                f"patches/{patch.name} adds {n} lines to {seam} of {path}, at most {SEAM_LINES} are allowed: "
                "move the logic into a module of ours."
                for seam, n in sizes.items()
                if n > SEAM_LINES
            ]
        for path, name in sorted(actual ^ claimed):
            says = "changes" if (path, name) in actual else "does not change"
            wrong.append(f"patches/{patch.name} {says} {name} of {path}, unlike its Seam field.")
        return wrong

    def lint_names(self, patch: Patch) -> list[str]:
        """Sentences on what Calls and Test name and this repository lacks."""
        wrong = []
        for module, name in patch.calls:
            path = module_path(module, self.overlay.__contains__)
            if not path or name not in defined(self.overlay[path].read_bytes()):
                wrong.append(f"patches/{patch.name}: Calls {module}:{name}, which is not under python/.")
        for test in patch.fields["Test"].replace(",", " ").split():
            if not (self.root / test.split("::")[0]).exists():
                wrong.append(f"patches/{patch.name}: Test {test} does not exist.")
        return wrong

    def pre(self, upstream: Release) -> dict[str, str]:
        return {path: sha256(upstream.read(path)) for path in self.touched if path in upstream}

    def lock(self, upstream: Release) -> dict[str, str]:
        return {key: symbol.digest for key, symbol in self.seams(upstream).items() if symbol}

    def refresh(self, upstream: Release) -> None:
        """Take up patch files as they lie (new ones last), in normal form, and save."""
        there = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.patch"))
        names = [n for n in self.names if n in there] + [n for n in there if n not in self.names]
        texts = {n: re.sub(r"(?m)^(@@ [^@\n]* @@).*", r"\1", (self.folder / n).read_text()) for n in names}
        self.save([Patch.parse(n, text) for n, text in texts.items()], upstream)

    def save(self, patches: list[Patch], upstream: Release) -> None:
        """Write `patches` as the series, and the files generated from it, for the release `upstream`.

        Raises:
            Stop: they do not apply; nothing is written then.
        """
        new = Series(self.root)
        new.names, new.patches = [p.name for p in patches], patches
        new.refuse_excess()
        new.refuse_collisions(upstream)
        post = {path: sha256(data) for path, data in new.patched(upstream).items()}
        for name, table in (("pre.sha256", new.pre(upstream)), ("post.sha256", post), ("seams.lock", new.lock(upstream))):
            write(self.folder / name, "".join(f"{table[k]}  {k}\n" for k in sorted(table)))
        for patch in patches:
            write(self.folder / patch.name, patch.format())
        write(self.folder / "series", "".join(f"{n}\n" for n in new.names))
        self.names, self.patches = new.names, patches
        self.__dict__.pop("touched", None)


def defined(source: bytes) -> set[str]:
    """Names that a module of ours defines: symbols, and what it assigns at the top."""
    names = set(symbols(source))
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, and only when it changes."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_text(text)
    tmp.replace(path)
