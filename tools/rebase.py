"""Moves the series to another upstream release: finds what changed, moves the patches, writes them again."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.errors import ToolError
from tools.patch import Patch, merge
from tools.series import Series, module_path, write
from tools.symbols import MODULE, symbols
from tools.upstream import Pins, Release, Wheel, pip_download, sha256
from tools.workspace import Workspace

SAME, MOVED, CHANGED, GONE = "file same", "file changed, seam same", "seam changed", "symbol gone"


@dataclass(frozen=True)
class Verdict:
    """What happened to one seam between two releases.

    state: SAME, MOVED, CHANGED or GONE.
    elsewhere: modules that define a symbol of that name, if it is gone.
    """

    patch: str
    seam: str
    state: str
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f"; that name is defined in {', '.join(self.elsewhere)}" if self.elsewhere else ""
        return f"{self.state:24} {self.seam}  ({self.patch}){hint}"


def triage(series: Series, old: Release, new: Release) -> list[Verdict]:
    """Compare every seam of the series in the two releases. The worst come first."""

    def look(module: str, name: str) -> str:
        path = module_path(module, new.__contains__)
        if path is None:
            return GONE
        before, after = old.read(module_path(module, old.__contains__) or path), new.read(path)
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
    """Return the first modules that define a function or class called `name`."""
    pattern = re.compile(rf"^\s*(async def|def|class) {re.escape(name)}\b".encode(), re.M)
    modules = (n for n in sorted(upstream.entries) if n.endswith(".py"))
    return tuple(itertools.islice((n for n in modules if pattern.search(upstream.read(n))), most))


def listed(pins: Pins, version: str, cache: Path) -> tuple[Pins, list[Wheel]]:
    """Return `pins` with `version` as the pin. Wheels that upstream.toml lacks are downloaded.

    Returns:
        The new pins, and the wheels that were not listed before. Nobody has vouched for the hashes of these,
        so the caller must say so.
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
    """Return the version of sglang-kernel that the release pins.

    Raises:
        ToolError: it pins none.
    """
    text = upstream.read(f"{upstream.dist_info}/METADATA").decode()
    found = re.search(r"(?m)^Requires-Dist: sglang-kernel==([^\s;]+)", text)
    if not found:
        raise ToolError(
            f"the METADATA of {upstream.wheel.file} pins no sglang-kernel: adapt tools/rebase.py."
        )
    return found[1]


def prepare(series: Series, old: Release, new: Release, folder: Path) -> Workspace:
    """Make a repository with three branches.

    Returns:
        The repository. Branches `old` and `new` hold the files; `series` has one commit per patch on `old`.
    """
    if folder.exists():
        raise ToolError(f"{folder} holds a rebase: finish it with --continue, or delete it.")
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
        ToolError: with the patch and the files. The repository is left as it is, for a person to resolve.
    """
    if space.git("rebase", "-q", "--empty=keep", "--onto", "new", "old", "series", check=False).returncode:
        name = space.text("log", "-1", "--format=%s", "REBASE_HEAD")
        files = ", ".join(sorted(set(space.text("diff", "--name-only", "--diff-filter=U").split("\n"))))
        raise ToolError(
            f"{name} no longer fits {files}: resolve it in {space.folder} (git add, git rebase --continue), then run the "
            "same command with --continue."
        )


def harvest(space: Workspace, series: Series, new: Release) -> list[Patch]:
    """Return the patches as they are on the branch `series` now.

    Raises:
        ToolError: a patch was dropped, does more than add lines, or is now in another symbol.
    """
    if (space.folder / ".git/rebase-merge").exists():
        raise ToolError(f"the rebase in {space.folder} is not finished: git rebase --continue there first.")
    commits = space.text("rev-list", "--reverse", "new..series").split()
    subjects = [space.text("log", "-1", "--format=%s", c) for c in commits]
    if subjects != [p.name for p in series.patches]:
        lost = sorted({p.name for p in series.patches} - set(subjects)) or subjects
        raise ToolError(
            f"the rebase in {space.folder} lost {', '.join(lost)}: the only way to drop a patch is to delete its file."
        )
    out = []
    for patch, commit in zip(series.patches, commits, strict=True):
        moved = space.patch(patch, "new", f"{commit}~", commit)
        if not moved.hunks:
            raise ToolError(
                f"{patch.name} adds nothing to sglang {new.wheel.version}: upstream has it, or the seam is gone."
            )
        out.append(patch if result(patch, new) == result(moved, new) else moved)
    for path in sorted({path for p in out for path in p.hunks}):
        if merge(new.read(path), out, path)[0] != (space.folder / path).read_bytes():
            raise ToolError(
                f"the patches to {path} interleave: separate their commits in {space.folder}, then --continue."
            )
    wrong = [w for p in out for w in series.lint_seams(p, new)]
    if wrong:
        raise ToolError("after the rebase " + wrong[0])
    return out


def result(patch: Patch, upstream: Release) -> dict[str, bytes] | None:
    """Return the files that `patch` alone gives, or None if it does not apply.

    Two hunks can give the same file: git moves a hunk up if the line before it equals its last line.
    """
    try:
        return {path: merge(upstream.read(path), [patch], path)[0] for path in patch.hunks}
    except (KeyError, ToolError):
        return None


def rebase(
    series: Series,
    pins: Pins,
    version: str,
    cache: Path,
    folder: Path,
    resume: bool,
    python: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Move the series and upstream.toml from the pinned release to `version`.

    Args:
        series: our patches.
        pins: the pinned release.
        version: the release to move to.
        cache: the folder of upstream's wheels.
        folder: where the temporary repository goes.
        resume: whether to go on after a conflict that was resolved in `folder`.
        python: the interpreter's tag, e.g. cp311; default: the running one.
        say: takes each message.

    Raises:
        ToolError: the rebase failed. patches/ and upstream.toml are unchanged.
    """
    if version == pins.sglang:
        raise ToolError(f"upstream.toml is already at sglang {version}: name another version.")
    old = Release.get(pins, python=python, cache=cache)
    series.assemble(old)
    moved, unknown = listed(pins, version, cache)
    new = Release.get(moved, python=python, cache=cache)
    for wheel in unknown:
        say(f"new: {wheel.file} sha256 {wheel.sha256}: compare it with what upstream publishes")
    verdicts = triage(series, old, new)
    say("\n".join(map(str, verdicts)) or "no patches")
    if resume and not (folder / ".git").exists():
        raise ToolError(f"{folder} holds no rebase to finish: run the command without --continue.")
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
