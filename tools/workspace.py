"""Patches as commits in a temporary git repository, to edit one or to move the series to another release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tools.errors import ToolError
from tools.patch import Hunk, Patch, merge
from tools.upstream import Release

CONFIG = {"user.name": "patchset", "user.email": "patchset@localhost", "commit.gpgsign": "false"}
CONFIG |= {"core.autocrlf": "false", "core.hooksPath": "/dev/null", "core.safecrlf": "false"}
FILE = re.compile(r'"?\+\+\+ b/(.*?)"?')


class Workspace:
    """A git repository at `folder`. It is never the repository of a checkout around `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def git(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run git here.

        Raises:
            ToolError: git is missing, or it failed and `check` is true.
        """
        if not shutil.which("git"):
            raise ToolError("edit, export and rebase need git, which is not on PATH: install it.")
        keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        env = keep | {"GIT_DIR": str(self.folder / ".git"), "GIT_WORK_TREE": str(self.folder)}
        env |= {
            "GIT_EDITOR": "true",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "LC_ALL": "C",
        }
        done = subprocess.run(["git", *args], cwd=self.folder, env=env, capture_output=True)
        if check and done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            raise ToolError(f"git {args[0]} failed in {self.folder}: {said[-1] if said else 'no output'}.")
        return done

    def text(self, *args: str) -> str:
        """Return what git prints."""
        return self.git(*args).stdout.decode(errors="replace").strip()

    def init(self) -> None:
        """Create the repository."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "upstream")
        # Set in the repository, so that it also applies to a person who works there.
        for key, value in CONFIG.items():
            self.git("config", key, value)

    def commit(self, message: str) -> str:
        """Commit all changes and return the commit's id."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "--no-verify", "-m", message)
        return self.text("rev-parse", "HEAD")

    def put(self, files: dict[str, bytes]) -> None:
        """Write `files`, by path."""
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def commit_series(self, upstream: Release, patches: list[Patch]) -> None:
        """Add one commit per patch on top of HEAD, which holds upstream's files."""
        for i, patch in enumerate(patches):
            done = patches[: i + 1]
            self.put({path: merge(upstream.read(path), done, path)[0] for path in patch.hunks})
            self.commit(patch.name)

    def hunks(self, name: str, *revisions: str) -> dict[str, list[Hunk]]:
        """Return what `git diff revisions` adds, by path.

        Raises:
            ToolError: the diff does more than add lines to files.
        """
        options = ("-U0", "--no-renames", "--no-ext-diff", "--no-color")
        diff = self.git("diff", *options, *revisions).stdout.decode()
        out: dict[str, list[Hunk]] = {}
        path, after, due = "", 0, 0
        lines: list[str] = []
        for line in diff.split("\n"):
            if due and line.startswith("+"):
                lines.append(line[1:].removesuffix("\r"))
                due -= 1
                if not due:
                    out.setdefault(path, []).append(Hunk(after, tuple(lines)))
            elif match := FILE.fullmatch(line):
                path = match[1]
            elif line.startswith("@@"):
                old, new = line.split()[1:3]
                if not old.endswith(",0"):
                    raise ToolError(
                        f"{name} alters or removes line {old[1:].split(',')[0]} of {path}: a patch may only add lines."
                    )
                after, due, lines = int(old[1:].split(",")[0]), int((new + ",1").split(",")[1]), []
            elif line.startswith(("deleted file", "new file", "Binary files", "old mode")):
                raise ToolError(f"{name} does more than add lines ({line}): new files belong under python/.")
            elif line.startswith("\\"):
                raise ToolError(f"{name} leaves {path} without a newline at its end: add one.")
        return out

    def patch(self, patch: Patch, base: str, before: str, *after: str) -> Patch:
        """Return `patch` with new hunks.

        Args:
            patch: the result has its name and header.
            base: the commit that holds upstream's files without any patch. The hunks are written against it.
            before: the commit that holds the patches before this one.
            after: the commit that holds this one, too; default: the files in the folder.

        Raises:
            ToolError: it does more than add lines, or its lines are between those of another patch.
        """
        others = self.hunks(patch.name, base, before)
        hunks: dict[str, list[Hunk]] = {}
        for path, found in self.hunks(patch.name, before, *after).items():
            for hunk in found:
                line, shift = hunk.after, 0
                for other in others.get(path, ()):
                    start = other.after + shift  # in `before`, the lines of `other` follow line `start`
                    if start >= line:
                        break
                    if line < start + len(other.lines):
                        raise ToolError(
                            f"{patch.name} adds lines between those of another patch at {path}:{line}: move them."
                        )
                    shift += len(other.lines)
                at = line - shift
                mine = hunks.setdefault(path, [])
                if mine and mine[-1].after == at:  # the lines of another patch are in between
                    raise ToolError(
                        f"{patch.name} adds lines on both sides of another patch's at {path}:{line}: join them."
                    )
                mine.append(Hunk(at, hunk.lines))
        return Patch(patch.name, patch.fields, hunks)
