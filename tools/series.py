"""The patch series and the overlay: what we add to an upstream release, and the rules for it.

Where two patches add lines at the same place, the series gives the order.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.errors import ToolError
from tools.patch import Patch, merge, must_parse
from tools.symbols import changed, owner, symbols
from tools.upstream import ROOT, Release, sha256

BUDGET = 16  # patches in the whole distribution
SEAM_LINES = 5  # lines that a patch may add to one function: an import and one call
REFRESH = "run `python -m tools.patchset refresh`."


def module_path(module: str, has: Callable[[str], object]) -> str | None:
    """Return the file of a dotted module inside the wheel, or None. has(path) says whether a file exists."""
    stem = module.replace(".", "/")
    return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if has(p)), None)


@dataclass
class Series:
    """What a checkout adds to the package: the patches and our modules."""

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
        """Return the patch `name`.

        Raises:
            ToolError: it is missing or not a patch.
        """
        try:
            return Patch.parse(name, (self.folder / name).read_text())
        except FileNotFoundError:
            raise ToolError(
                f"patches/series lists {name}, which does not exist: add it or drop the line."
            ) from None

    @cached_property
    def touched(self) -> list[str]:
        """The upstream paths that the patches change."""
        return sorted({path for p in self.patches for path in p.hunks})

    @cached_property
    def overlay(self) -> dict[str, Path]:
        """Our own files, by their path in the wheel."""
        base = self.root / "python"
        files = {f.relative_to(base): f for f in sorted((base / "sglang").rglob("*")) if f.is_file()}
        hidden = ("__pycache__", ".")
        return {r.as_posix(): f for r, f in files.items() if not any(p.startswith(hidden) for p in r.parts)}

    def refuse_excess(self) -> None:
        """Raise ToolError if there are more patches than BUDGET."""
        if len(self.names) > BUDGET:
            count = len(self.names)
            raise ToolError(f"the series has {count} patches and the budget is {BUDGET}: merge or drop some.")

    def refuse_collisions(self, upstream: Release) -> None:
        """Raise ToolError if a file of ours would hide or replace one of upstream's."""
        for path in self.overlay:
            stem = path.removesuffix("/__init__.py").removesuffix(".py")
            same = [q for q in (path, f"{stem}.py", f"{stem}/__init__.py") if q in upstream]
            same += [str(q) for q in Path(path).parents if str(q) in upstream]
            same += [path] if path in upstream.folders else []
            if same:
                raise ToolError(
                    f"python/{path} would replace {same[0]} of sglang {upstream.wheel.version}: "
                    "rename ours, or change upstream's by a patch."
                )

    def patched(self, upstream: Release) -> dict[str, bytes]:
        """Return the upstream files that the series changes, with its lines in them. Each is valid Python.

        Raises:
            ToolError: a patched file is not in this release, or a patch breaks its syntax.
        """
        out = {}
        for path in self.touched:
            names = ", ".join(p.name for p in self.patches if path in p.hunks)
            if path not in upstream:
                version = upstream.wheel.version
                raise ToolError(f"sglang {version} has no {path}, which {names} changes: run the rebase.")
            out[path], _ = merge(upstream.read(path), self.patches, path)
            must_parse(path, out[path], names)
        return out

    def assemble(self, upstream: Release) -> dict[str, bytes]:
        """Return `patched` after checking the overlay and the recorded hashes too. Every build calls this.

        Raises:
            ToolError: the series does not fit this release, or our files collide with upstream's.
        """
        self.refuse_collisions(upstream)
        for path, want in self.recorded("pre.sha256").items():
            if path in upstream and sha256(upstream.read(path)) != want:
                version = upstream.wheel.version
                raise ToolError(
                    f"{path} of sglang {version} is not the file that the patches are for: run the rebase."
                )
        out = self.patched(upstream)
        for name in ("pre.sha256", "post.sha256"):
            if set(self.recorded(name)) != set(out):
                raise ToolError(f"patches/{name} does not belong to this series: {REFRESH}")
        for path, want in self.recorded("post.sha256").items():
            if sha256(out[path]) != want:
                raise ToolError(f"{path} differs from patches/post.sha256 once patched: {REFRESH}")
        return out

    def recorded(self, name: str) -> dict[str, str]:
        """Return a generated file, one `DIGEST  KEY` per line, as {KEY: DIGEST}."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return {key: digest for digest, key in (line.split(None, 1) for line in lines)}

    def lint(self, upstream: Release) -> list[str]:
        """Return one sentence per rule that is broken although the tree would build."""
        there = {p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.patch")}
        wrong = [
            f"patches/{name} is not in the series: {REFRESH}" for name in sorted(there - set(self.names))
        ]
        for name, now in (("pre.sha256", self.pre(upstream)), ("seams.lock", self.lock(upstream))):
            if now != self.recorded(name):
                wrong.append(f"patches/{name} is stale: {REFRESH}")
        for patch in self.patches:
            if (self.folder / patch.name).read_text() != patch.format():
                wrong.append(f"patches/{patch.name} is not in normal form: {REFRESH}")
            wrong += self.lint_seams(patch, upstream) + self.lint_names(patch)
        return wrong

    def lint_seams(self, patch: Patch, upstream: Release) -> list[str]:
        """Return one sentence per seam that does not exist, is not what the lines change, or is too long."""
        wrong: list[str] = []
        claimed: set[tuple[str, str]] = set()
        actual: set[tuple[str, str]] = set()
        for module, name in patch.seams:
            path = module_path(module, upstream.__contains__)
            if path and name in symbols(upstream.read(path)):
                claimed.add((path, name))
            else:
                wrong.append(f"Seam {module}:{name} is not in sglang {upstream.wheel.version}.")
        for path in patch.hunks:
            before = upstream.read(path)
            after, numbers = merge(before, [patch], path)
            actual |= {(path, name) for name in changed(before, after)}
            known = {name: symbol for name, symbol in symbols(after).items() if name in symbols(before)}
            sizes = Counter(owner(known, number) for number in numbers[patch.name])
            wrong += [
                f"{count} lines are added to {seam} of {path}, at most {SEAM_LINES} are allowed: move the logic to python/."
                for seam, count in sizes.items()
                if count > SEAM_LINES
            ]
        for path, name in sorted(actual ^ claimed):
            does = "changes" if (path, name) in actual else "does not change"
            wrong.append(f"it {does} {name} of {path}, unlike its Seam field.")
        return [f"patches/{patch.name}: {sentence}" for sentence in wrong]

    def lint_names(self, patch: Patch) -> list[str]:
        """Return one sentence per name in Calls or Test that this repository lacks."""
        wrong = []
        for module, name in patch.calls:
            path = module_path(module, self.overlay.__contains__)
            if not path or name not in defined(self.overlay[path].read_bytes()):
                wrong.append(f"patches/{patch.name}: Calls {module}:{name} is not under python/.")
        for test in patch.entries("Test"):
            if not (self.root / test.split("::")[0]).exists():
                wrong.append(f"patches/{patch.name}: Test {test} does not exist.")
        return wrong

    def pre(self, upstream: Release) -> dict[str, str]:
        """Return the content of pre.sha256 for this release."""
        return {path: sha256(upstream.read(path)) for path in self.touched if path in upstream}

    def lock(self, upstream: Release) -> dict[str, str]:
        """Return the content of seams.lock for this release: a digest per symbol that the patches change."""
        out = {}
        for module, name in (seam for patch in self.patches for seam in patch.seams):
            path = module_path(module, upstream.__contains__)
            table = symbols(upstream.read(path)) if path else {}
            if name in table:
                out[f"{module}:{name}"] = table[name].digest
        return out

    def refresh(self, upstream: Release) -> None:
        """Read the patch files that exist (new ones last), put them into normal form, and save."""
        there = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.patch"))
        names = [n for n in self.names if n in there] + [n for n in there if n not in self.names]
        texts = {n: re.sub(r"(?m)^(@@ [^@\n]* @@).*", r"\1", (self.folder / n).read_text()) for n in names}
        self.save([Patch.parse(n, text) for n, text in texts.items()], upstream)

    def save(self, patches: list[Patch], upstream: Release) -> None:
        """Write `patches` as the series for the release `upstream`, and the files generated from it.

        Raises:
            ToolError: they do not apply. Nothing is written.
        """
        new = Series(self.root)
        new.names, new.patches = [p.name for p in patches], patches
        new.refuse_excess()
        new.refuse_collisions(upstream)
        post = {path: sha256(data) for path, data in new.patched(upstream).items()}
        tables = {"pre.sha256": new.pre(upstream), "post.sha256": post, "seams.lock": new.lock(upstream)}
        for name, table in tables.items():
            write(self.folder / name, "".join(f"{table[k]}  {k}\n" for k in sorted(table)))
        for patch in patches:
            write(self.folder / patch.name, patch.format())
        write(self.folder / "series", "".join(f"{n}\n" for n in new.names))
        self.names, self.patches = new.names, patches
        self.__dict__.pop("touched", None)


def defined(source: bytes) -> set[str]:
    """Return what a module of ours offers: its symbols, and what it assigns or imports at the top."""
    names = set(symbols(source))
    for node in ast.parse(source).body:
        targets: list[object] = (
            [*node.targets] if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        )
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all, and only if its content changes."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_text(text)
    tmp.replace(path)
