"""The patch tool: fetches upstream, checks, applies and edits the patches, and builds the wheel."""

from __future__ import annotations

import argparse
import sys
from operator import methodcaller
from pathlib import Path

from tools import devtree, provenance
from tools.build_wheel import wheel_name, write_wheel
from tools.edit import edit, export
from tools.errors import ArgumentParser, ToolError, exit_on_error
from tools.rebase import rebase
from tools.series import Series
from tools.upstream import ROOT, Pins, Release, cache_dir

EDIT_DIR_HELP = "folder of the tree (default: build/edit)"


def parse(argv: list[str] | None, root: Path) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = ArgumentParser(prog="python -m tools.patchset", description=__doc__)
    parser.add_argument(
        "--cache", type=Path, help="folder for upstream wheels (default: $XDG_CACHE_HOME/sglang-ddtree)"
    )
    parser.add_argument("--python", help="build for this interpreter, e.g. cp312 (default: the running one)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("fetch", help="download the pinned wheel into the cache and print its path")
    commands.add_parser("check", help="verify every rule of patches/README.md")
    command = commands.add_parser("apply", help="write the patched upstream files, and no others, into DIR")
    command.add_argument("dir", type=Path)
    command = commands.add_parser("edit", help="make a tree in which to write or change PATCH")
    command.add_argument("patch", help="FOLDER/PURPOSE.patch")
    command.add_argument("--dir", type=Path, default=root / "build/edit", help=EDIT_DIR_HELP)
    command = commands.add_parser("export", help="write the patch that is being edited to patches/")
    command.add_argument("--dir", type=Path, default=root / "build/edit", help=EDIT_DIR_HELP)
    commands.add_parser(
        "refresh", help="add new patch files to the series, regenerate hashes and seam digests"
    )
    command = commands.add_parser("dev", help="assemble a runnable tree with links to our files")
    command.add_argument("dir", nargs="?", type=Path, default=root / "build/dev")
    command = commands.add_parser("rebase", help="move the series and upstream.toml to another release")
    command.add_argument("version")
    command.add_argument(
        "--dir",
        type=Path,
        default=root / "build/rebase",
        help="folder for the temporary repository (default: build/rebase)",
    )
    command.add_argument(
        "--continue", dest="resume", action="store_true", help="go on after you resolved a conflict there"
    )
    command = commands.add_parser("provenance", help="find lines that we share with upstream")
    command.add_argument(
        "--also", type=Path, action="append", default=[], help="a further folder of sources to compare with"
    )
    command = commands.add_parser("build", help="build the wheel into DIR and print its path")
    command.add_argument("dir", nargs="?", type=Path, default=root / "dist")
    return parser.parse_args(argv)


def report(findings: list[str]) -> int:
    """Print what a check found, one sentence per line; return the exit status."""
    for sentence in findings:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if findings else 0


def run(args: argparse.Namespace, root: Path) -> int:
    """Run one command on the checkout `root`; return the exit status.

    Raises:
        ToolError: it could not be done.
    """
    series, pins = Series(root), Pins.load(root)
    upstream = Release.get(pins, python=args.python, cache=args.cache)
    match args.command:
        case "fetch":
            print(upstream.path)
        case "check":
            series.assemble(upstream)
            wrong = series.lint(upstream)
            if not wrong:
                print(f"{len(series.names)} patches on sglang {pins.sglang} keep all the rules")
            return report(wrong)
        case "apply":
            files = series.assemble(upstream)
            if args.dir.exists() and any(args.dir.iterdir()):
                raise ToolError(f"{args.dir} is not empty: name another folder.")
            for name, data in files.items():
                devtree.replace(args.dir / name, methodcaller("write_bytes", data))
        case "edit":
            folder = args.dir.resolve()
            edit(series, pins, upstream, args.patch, folder)
            print(f"Edit upstream's files and HEADER in {folder}; `git -C {folder} diff` is the patch, and")
            print(f"PYTHONPATH={folder} runs it. Then: python -m tools.patchset export --dir {args.dir}")
        case "export":
            patch = export(series, upstream, args.dir.resolve())
            print(f"wrote patches/{patch.name}")
            return report(series.lint_seams(patch, upstream) + series.lint_names(patch))
        case "refresh":
            series.refresh(upstream)
        case "dev":
            devtree.dev(series, pins, upstream, args.dir.resolve())
            print(f"PYTHONPATH={args.dir.resolve()}")
        case "rebase":
            cache = args.cache or cache_dir()
            rebase(series, pins, args.version, cache, args.dir.resolve(), args.resume, args.python)
        case "provenance":
            return report([str(copy) for copy in provenance.check(root, upstream, args.also)])
        case "build":
            path = args.dir.resolve() / wheel_name(pins, upstream)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_wheel(path, series, pins, upstream)
            print(path)
    return 0


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run one command on the checkout `root`; return the exit status."""
    with exit_on_error():
        return run(parse(argv, root), root)


if __name__ == "__main__":
    sys.exit(main())
