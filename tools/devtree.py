"""Assembles a tree that runs the checkout: upstream's files, the patched files, and links to ours."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools import distinfo
from tools.errors import ToolError
from tools.series import Series
from tools.upstream import Pins, Release, need_space

STAMP = "patchset.json"  # in the .dist-info of a development tree: what it was assembled from


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Let make(temporary path) create a file or link, then move it to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.new")
    tmp.unlink(missing_ok=True)
    make(tmp)
    os.replace(tmp, path)


def link_to(target: Path, path: Path) -> None:
    """Make `path` a link to `target`."""
    path.symlink_to(target)


def extract(upstream: Release, folder: Path) -> None:
    """Unpack the packages of the wheel with their modes, without its .dist-info."""
    need_space(folder, upstream.size, f"Unpacking {upstream.wheel.file}")
    for name in upstream.entries:
        if not name.startswith(upstream.dist_info + "/"):
            upstream.zip.extract(name, folder)
            (folder / name).chmod(upstream.mode(name))


def dev(series: Series, pins: Pins, upstream: Release, folder: Path) -> None:
    """Make `folder` a site directory: upstream's files, the patched files, and links to ours.

    Edits to our files are live. Call this again after adding a file or changing a patch. An existing tree is
    updated file by file, so that processes running from it survive. A new tree appears complete or not at all.

    Raises:
        ToolError: the series does not fit, the disk is too small, or `folder` holds something else.
    """
    patched = series.assemble(upstream)
    info = distinfo.folder(pins)
    stamp = {"wheel": upstream.wheel.sha256, "patched": sorted(patched), "overlay": sorted(series.overlay)}
    fill = {**patched, **distinfo.files(pins, series, upstream), f"{info}/INSTALLER": b"patchset\n"}
    fill[f"{info}/{STAMP}"] = json.dumps(stamp, indent=1).encode()

    def fill_in(path: Path, name: str, data: bytes) -> None:
        def make(tmp: Path) -> None:
            tmp.write_bytes(data)
            tmp.chmod(upstream.mode(name) if name in upstream else 0o644)

        replace(path, make)

    def put(base: Path) -> None:
        for name, data in fill.items():
            if not (base / name).is_file() or (base / name).read_bytes() != data:
                fill_in(base / name, name, data)
        for name, ours in series.overlay.items():
            if not (base / name).is_symlink() or os.readlink(base / name) != str(ours):
                replace(base / name, partial(link_to, ours))

    try:
        old = json.loads((folder / info / STAMP).read_text())
    except (OSError, ValueError):
        old = {}
    if old.get("wheel") == upstream.wheel.sha256:
        for name in set(old["patched"]) - set(patched):
            fill_in(folder / name, name, upstream.read(name))
        for name in set(old["overlay"]) - set(series.overlay):
            (folder / name).unlink(missing_ok=True)
        put(folder)
        return
    if folder.exists() and any(folder.iterdir()) and not list(folder.glob(f"sglang-*.dist-info/{STAMP}")):
        raise ToolError(
            f"{folder} holds something that is not a development tree: name another folder, or empty this one."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".dev-") as tmp:
        new = Path(tmp, "site")
        new.mkdir()
        extract(upstream, new)
        put(new)
        if folder.exists():
            folder.rename(Path(tmp, "old"))
        new.rename(folder)
