"""Write a patch by editing a runnable tree of upstream's files: `edit` makes it, `export` reads it."""

from __future__ import annotations

import datetime
from pathlib import Path

from tools.devtree import dev
from tools.errors import ToolError
from tools.patch import Hunk, Patch, merge, must_parse
from tools.series import Series, write
from tools.symbols import changed
from tools.upstream import Pins, Release
from tools.workspace import Workspace

HEADER = "HEADER"  # the file in the tree that holds the patch's header
TEMPLATE = """\
Description: what this adds, and why upstream's registries and hooks are not enough
Author: The sglang-ddtree developers
Forwarded: no
Last-Update: {today}
Seam:
Calls: sglang.srt.our_module:function
Remove-When: upstream ...
Test: test/unit/test_....py
"""
NAME = "patchset.name"


def edit(series: Series, pins: Pins, upstream: Release, name: str, folder: Path) -> None:
    """Make `folder` a runnable tree in which `git diff` is the patch `name`, which need not exist yet.

    Raises:
        ToolError: the folder is in use. Nothing is changed.
    """
    if not name.endswith(".patch") or name.count("/") != 1:
        raise ToolError(
            f"patch: expected a name like FOLDER/PURPOSE.patch (cpu/optional-torchvision.patch), got {name}."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ToolError(f"{folder} is in use: export and delete it, or name another folder with --dir.")
    dev(series, pins, upstream, folder)
    tree = Workspace(folder)
    tree.init()
    exclude = [
        "*.so",
        "__pycache__/",
        "/*.dist-info/",
        f"/{HEADER}",
        *(f"/{path}" for path in series.overlay),
    ]
    write(folder / ".git/info/exclude", "\n".join(exclude) + "\n")
    tree.put({path: upstream.read(path) for path in series.touched})
    tree.commit(f"sglang {pins.sglang}")
    tree.git("tag", "upstream-files")
    tree.commit_series(upstream, [p for p in series.patches if p.name != name])
    tree.git("config", NAME, name)
    mine = next((p for p in series.patches if p.name == name), None)
    if mine:
        tree.put({path: merge(upstream.read(path), series.patches, path)[0] for path in mine.hunks})
    header = (
        Patch(name, mine.fields).format()
        if mine
        else TEMPLATE.format(today=datetime.date.today().isoformat())
    )
    write(folder / HEADER, header)


def export(series: Series, upstream: Release, folder: Path) -> Patch:
    """Write the patch that is being edited in `folder` to patches/ and update the generated files.

    An empty Seam field is filled in with the symbols that the patch changes.

    Raises:
        ToolError: the patch breaks a rule. patches/ is unchanged.
    """
    tree = Workspace(folder)
    if not (folder / ".git").exists() or not (folder / HEADER).exists():
        raise ToolError(f"{folder} was not made by `python -m tools.patchset edit`: run that first.")
    name = tree.text("config", NAME)
    strays = [line[3:] for line in tree.text("status", "--porcelain").splitlines() if line.startswith("??")]
    if strays:
        raise ToolError(
            f"{folder}/{strays[0]} is a new file: put it under python/ and run edit again to link it."
        )
    hunks = tree.patch(Patch(name, {}), "upstream-files", "HEAD").hunks
    if not hunks:
        raise ToolError(f"there is nothing to export: `git -C {folder} diff` is empty.")
    header = (folder / HEADER).read_text().rstrip() + "\n"
    header = header.replace("\nSeam:\n", f"\nSeam: {', '.join(seams(name, hunks, upstream))}\n")
    patch = Patch.parse(name, header + Patch(name, {}, hunks).format())
    patches = [patch if p.name == name else p for p in series.patches]
    series.save(patches if patch in patches else [*patches, patch], upstream)
    return patch


def seams(name: str, hunks: dict[str, list[Hunk]], upstream: Release) -> list[str]:
    """Return module:Qual.name of everything that the `hunks` of patch `name` change."""
    out = []
    for path in sorted(hunks):
        before = upstream.read(path)
        after, _ = merge(before, [Patch(name, {}, hunks)], path)
        must_parse(path, after, name)
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        out += [f"{module}:{symbol}" for symbol in sorted(changed(before, after))]
    return out
