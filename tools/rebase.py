"""Carry the series to another upstream release: look where it changed, move the patches, write them down again."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .patch import Patch, merge
from .series import Series, module_path, write
from .symbols import MODULE, symbols
from .upstream import Pins, Release, Stop, Wheel, pip_download, sha256
from .workspace import Workspace

SAME, MOVED, CHANGED, GONE = "file same", "file changed, seam same", "seam changed", "symbol gone"


@dataclass(frozen=True)
class Verdict:
    """What happened to one seam between two releases. state: SAME, MOVED, CHANGED or GONE; elsewhere: where a symbol
    that is gone may be now."""

    patch: str
    seam: str
    state: str
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f"; that name is defined in {', '.join(self.elsewhere)}" if self.elsewhere else ""
        return f"{self.state:24} {self.seam}  ({self.patch}){hint}"


def triage(series: Series, old: Release, new: Release) -> list[Verdict]:
    """Compare every seam of the series in the two releases, the worst first."""

    def look(module: str, name: str) -> str:
        path = module_path(module, new.__contains__)
        if path is None:
            return GONE
        before = old.read(path) if path in old else old.read(module_path(module, old.__contains__))
        after = new.read(path)
        if before == after:
            return SAME
        a, b = symbols(before)[name], symbols(after).get(name)
        return GONE if b is None else MOVED if a.digest == b.digest else CHANGED

    found = []
    for patch, module, name in ((p, m, n) for p in series.patches for m, n in p.seams):
        state = look(module, name)
        hint = definers(new, name.rpartition(".")[2]) if state == GONE and name != MODULE else ()
        found.append(Verdict(patch.name, f"{module}:{name}", state, hint))
    order = [GONE, CHANGED, MOVED, SAME]
    return sorted(found, key=lambda v: (order.index(v.state), v.patch, v.seam))


def definers(upstream: Release, name: str, most: int = 3) -> tuple[str, ...]:
    """The first modules that define a function or class called `name`."""
    pattern = re.compile(rf"^\s*(async def|def|class) {re.escape(name)}\b".encode(), re.M)
    modules = (n for n in sorted(upstream.entries) if n.endswith(".py"))
    return tuple(itertools.islice((n for n in modules if pattern.search(upstream.read(n))), most))


def listed(pins: Pins, version: str, cache: Path) -> tuple[Pins, list[Wheel]]:
    """`pins` with `version` as the pin. Wheels that upstream.toml lacks are downloaded, their hashes taken as they come.

    Returns:
        The new pins, and the wheels that were not listed before (the caller says so: nobody has vouched for them).
    """
    known = {w.python for w in pins.wheels if w.version == version}
    new = []
    for old in (w for w in pins.wheels if w.version == pins.sglang and w.python not in known):
        file = old.file.replace(f"-{pins.sglang}-", f"-{version}-")
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / file).exists():
            with tempfile.TemporaryDirectory(dir=cache) as tmp:
                pip_download(f"sglang=={version}", old.python, old.tag, Path(tmp))
                got = next(Path(tmp).iterdir())
                file = got.name
                got.replace(cache / file)
        data = (cache / file).read_bytes()
        new.append(Wheel(file, sha256(data), len(data)))
    return Pins(version, pins.kernel, pins.revision, (*pins.wheels, *new)), new


def required_kernel(upstream: Release) -> str:
    """The version of sglang-kernel that the release pins. Raises Stop if it pins none."""
    text = upstream.read(f"{upstream.dist_info}/METADATA").decode()
    found = re.search(r"(?m)^Requires-Dist: sglang-kernel==([^\s;]+)", text)
    if not found:
        raise Stop(f"the METADATA of {upstream.wheel.file} pins no sglang-kernel: adapt tools/rebase.py.")
    return found[1]


def prepare(series: Series, old: Release, new: Release, folder: Path) -> Workspace:
    """A repository with the branches `old` and `new` (the files the series touches) and `series`, a commit a patch."""
    if folder.exists():
        raise Stop(f"{folder} holds a rebase: finish it with --continue, or delete it.")
    space = Workspace(folder)
    space.init()
    space.put({path: old.read(path) for path in series.touched})
    space.commit(f"sglang {old.wheel.version}")
    space.git("branch", "old")
    for path in series.touched:
        (folder / path).unlink()
    space.put({path: new.read(path) for path in series.touched if path in new})
    space.commit(f"sglang {new.wheel.version}")
    space.git("branch", "new")
    space.git("checkout", "-q", "-b", "series", "old")
    space.commit_series(old, series.patches)
    return space


def onto(space: Workspace) -> None:
    """git rebase --onto new old series, stopping at a conflict.

    Raises:
        Stop: names the patch and the files; the repository is left for a person.
    """
    if space.git("rebase", "-q", "--empty=keep", "--onto", "new", "old", "series", check=False).returncode:
        name = space.text("log", "-1", "--format=%s", "REBASE_HEAD")
        files = ", ".join(sorted(set(space.text("diff", "--name-only", "--diff-filter=U").split("\n"))))
        raise Stop(
            f"{name} does not fit {files} any more: mend it in {space.folder} (git add, git rebase --continue), then "
            "run the same command with --continue."
        )


def harvest(space: Workspace, series: Series, new: Release) -> list[Patch]:
    """The patches as they are on the branch `series` now.

    Raises:
        Stop: one was dropped, does more than add lines, or now lies in another symbol than its Seam says.
    """
    if (space.folder / ".git/rebase-merge").exists():
        raise Stop(f"the rebase in {space.folder} is not finished: git rebase --continue there first.")
    commits = space.text("rev-list", "--reverse", "new..series").split()
    subjects = [space.text("log", "-1", "--format=%s", c) for c in commits]
    if subjects != [p.name for p in series.patches]:
        lost = sorted({p.name for p in series.patches} - set(subjects)) or subjects
        raise Stop(
            f"the rebase in {space.folder} lost {', '.join(lost)}: a patch is dropped by deleting its file, only."
        )
    out = []
    for patch, commit in zip(series.patches, commits, strict=True):
        moved = space.patch(patch, "new", f"{commit}~", commit)
        if not moved.hunks:
            raise Stop(
                f"{patch.name} adds nothing to sglang {new.wheel.version}: upstream has it, or the seam is gone."
            )
        out.append(patch if result(patch, new) == result(moved, new) else moved)
    for path in sorted({path for p in out for path in p.hunks}):
        if merge(new.read(path), out, path)[0] != (space.folder / path).read_bytes():
            raise Stop(
                f"the patches to {path} interleave: mend their commits in {space.folder}, then --continue."
            )
    wrong = [w for p in out for w in series.lint_seams(p, new)]
    if wrong:
        raise Stop("after the rebase " + wrong[0])
    return out


def result(patch: Patch, upstream: Release) -> dict[str, bytes] | None:
    """What `patch` alone makes of its files; None where it does not apply. Two texts can say the same: git moves a hunk
    up when the line before it is also its last."""
    try:
        return {path: merge(upstream.read(path), [patch], path)[0] for path in patch.hunks}
    except (KeyError, Stop):
        return None


def rebase(
    series: Series, pins: Pins, version: str, cache: Path, folder: Path, resume: bool, python=None, say=print
):
    """Move the series and upstream.toml from the pinned release to `version`.

    Raises:
        Stop: patches/ and upstream.toml are as they were.
    """
    if version == pins.sglang:
        raise Stop(f"upstream.toml is at sglang {version} already: name another version.")
    old = Release.get(pins, python=python, cache=cache)
    series.assemble(old)
    moved, unknown = listed(pins, version, cache)
    new = Release.get(moved, python=python, cache=cache)
    for wheel in unknown:
        say(f"new: {wheel.file} sha256 {wheel.sha256}: compare it with what upstream publishes")
    verdicts = triage(series, old, new)
    say("\n".join(map(str, verdicts)) or "no patches")
    if resume and not (folder / ".git").exists():
        raise Stop(f"{folder} holds no rebase to finish: run the command without --continue.")
    space = Workspace(folder) if resume else prepare(series, old, new, folder)
    if not resume:
        onto(space)
    patches = harvest(space, series, new)
    series.save(patches, new)
    write(
        series.root / "upstream.toml",
        Pins(version, required_kernel(new), moved.revision, moved.wheels).format(),
    )
    shutil.rmtree(folder)
    review = [v.seam for v in verdicts if v.state in (CHANGED, GONE) and not v.seam.endswith(MODULE)]
    if review:
        say(
            f"rebased to sglang {version}; read these by hand, they changed around our lines: {', '.join(review)}"
        )
