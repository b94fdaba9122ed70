"""The command line: fetch upstream, check and apply the patches, build. `python -m tools.patchset --help`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from . import distinfo
from .series import Series
from .upstream import ROOT, Pins, Release, Stop, need_space

STAMP = "patchset.json"  # in the .dist-info of a development tree: what it was assembled from


def replace(path: Path, make) -> None:
    """Let make(temporary path) create a file, then move it onto `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.new")
    tmp.unlink(missing_ok=True)
    make(tmp)
    os.replace(tmp, path)


def extract(upstream: Release, folder: Path) -> None:
    """Unpack the packages of the wheel, with their modes, without its .dist-info."""
    need_space(folder, upstream.size, f"Unpacking {upstream.wheel.file}")
    for name in upstream.entries:
        if not name.startswith(upstream.dist_info + "/"):
            upstream.zip.extract(name, folder)
            (folder / name).chmod(upstream.mode(name))


def dev(series: Series, pins: Pins, upstream: Release, folder: Path) -> None:
    """Make `folder` a site directory: upstream's files, the patched ones, and links to ours.

    A tree that is already there is brought up to date file by file, so that a process running from it survives;
    a new tree appears whole or not at all. Edits to our files are live; call again after adding one or changing a patch.
    """
    patched = series.assemble(upstream)
    info = distinfo.folder(pins)
    stamp = {"wheel": upstream.wheel.sha256, "patched": sorted(patched), "overlay": sorted(series.overlay)}
    fill = {**patched, **distinfo.files(pins, series, upstream), f"{info}/INSTALLER": b"patchset\n"}
    fill[f"{info}/{STAMP}"] = json.dumps(stamp, indent=1).encode()

    def put(base: Path) -> None:
        for name, data in fill.items():
            if not (base / name).is_file() or (base / name).read_bytes() != data:
                replace(base / name, lambda tmp, data=data: tmp.write_bytes(data))
        for name, ours in series.overlay.items():
            if not (base / name).is_symlink() or os.readlink(base / name) != str(ours):
                replace(base / name, lambda tmp, ours=ours: tmp.symlink_to(ours))

    try:
        old = json.loads((folder / info / STAMP).read_text())
    except (OSError, ValueError):
        old = {}
    if old.get("wheel") == upstream.wheel.sha256:
        for name in set(old["patched"]) - set(patched):
            replace(folder / name, lambda tmp, name=name: tmp.write_bytes(upstream.read(name)))
        for name in set(old["overlay"]) - set(series.overlay):
            (folder / name).unlink(missing_ok=True)
        put(folder)
        return
    if folder.exists() and any(folder.iterdir()) and not list(folder.glob(f"sglang-*.dist-info/{STAMP}")):
        raise Stop(f"{folder} holds something that is not a development tree: name another folder or empty it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".dev-") as tmp:
        new = Path(tmp, "site")
        new.mkdir()
        extract(upstream, new)
        put(new)
        if folder.exists():
            folder.rename(Path(tmp, "old"))
        new.rename(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patchset", description=__doc__)
    parser.add_argument("--cache", type=Path, help="folder for upstream wheels ($XDG_CACHE_HOME/sglang-ddtree)")
    parser.add_argument("--python", help="build for this interpreter, e.g. cp312 (the running one)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="get the pinned wheel into the cache")
    command = commands.add_parser("dev", help="assemble a tree to run, our files linked into it")
    command.add_argument("dir", nargs="?", type=Path, default=ROOT / "build/dev")
    commands.add_parser("check", help="verify every rule of patches/README.md")
    commands.add_parser("refresh", help="take up new patch files, regenerate hashes and seam digests")
    args = parser.parse_args(argv)
    try:
        series, pins = Series(), Pins.load()
        upstream = Release.get(pins, python=args.python, cache=args.cache)
        if args.command == "fetch":
            print(upstream.path)
        elif args.command == "dev":
            dev(series, pins, upstream, args.dir.resolve())
            print(f"PYTHONPATH={args.dir.resolve()}")
        elif args.command == "check":
            series.assemble(upstream)
            wrong = series.lint(upstream)
            print("\n".join(wrong), end="\n" if wrong else "")
            return 1 if wrong else 0
        elif args.command == "refresh":
            series.refresh(upstream)
    except Stop as stop:
        print(f"patchset: {stop}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
