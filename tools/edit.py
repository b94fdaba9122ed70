"""Write a patch by editing upstream's files in a tree that runs: `edit` makes the tree, `export` writes the patch."""

from __future__ import annotations

import datetime
from pathlib import Path

from .devtree import dev
from .patch import Patch, merge, must_parse
from .series import Series, write
from .symbols import changed
from .upstream import Pins, Release, Stop
from .workspace import Workspace

HEADER = "HEADER"  # the patch's header, beside the packages in the tree
TEMPLATE = """\
Description: what this adds, and why upstream's registries and hooks do not suffice
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
    """Make `folder` a tree to run in which `git diff` is the patch `name` (which need not exist yet).

    Raises:
        Stop: folder is in use; nothing is touched then.
    """
    if not name.endswith(".patch") or name.count("/") != 1:
        raise Stop(
            f"a patch is named FOLDER/PURPOSE.patch, for example cpu/optional-torchvision.patch, not {name}."
        )
    if folder.exists() and any(folder.iterdir()):
        raise Stop(f"{folder} is in use: export and delete it, or name another one with --dir.")
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
    """Write the patch that is being edited in `folder` to patches/ and bring the generated files up to date.

    An empty Seam field is filled in with the symbols that the patch changes.

    Raises:
        Stop: it breaks a rule; patches/ is as it was then.
    """
    tree = Workspace(folder)
    if not (folder / ".git").exists() or not (folder / HEADER).exists():
        raise Stop(f"{folder} was not made by `python -m tools.patchset edit`: make it so.")
    name = tree.text("config", NAME)
    strays = [line[3:] for line in tree.text("status", "--porcelain").splitlines() if line.startswith("??")]
    if strays:
        raise Stop(
            f"{folder}/{strays[0]} is a new file: ours belong under python/, run edit again to link them."
        )
    hunks = tree.patch(Patch(name, {}), "upstream-files", "HEAD").hunks
    if not hunks:
        raise Stop(f"there is nothing to export: `git -C {folder} diff` is empty.")
    header = (folder / HEADER).read_text().rstrip() + "\n"
    header = header.replace("\nSeam:\n", f"\nSeam: {', '.join(seams(name, hunks, upstream))}\n")
    patch = Patch.parse(name, header + Patch(name, {}, hunks).format())
    patches = [patch if p.name == name else p for p in series.patches]
    series.save(patches if patch in patches else [*patches, patch], upstream)
    return patch


def seams(name: str, hunks: dict, upstream: Release) -> list[str]:
    """module:Qual.name of everything that the `hunks` of patch `name` change."""
    out = []
    for path in sorted(hunks):
        before = upstream.read(path)
        after, _ = merge(before, [Patch(name, {}, hunks)], path)
        must_parse(path, after, name)
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        out += [f"{module}:{symbol}" for symbol in sorted(changed(before, after))]
    return out
