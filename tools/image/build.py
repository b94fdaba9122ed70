"""Builds a target of docker/Dockerfile with buildah. Needs no Docker engine and no image registry.

    python3 -m tools.image.build cpu|cuda [--store FOLDER] [--record FILE] [--kernels FOLDER]

It needs root, and Debian's buildah, podman, runc, debootstrap and fuse-overlayfs. debootstrap makes the base
image from the mirror that this host's apt uses, unless BASE_IMAGE names another image. It uses only the
standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.architectures import architectures
from tools.commands import run_checked
from tools.errors import ArgumentParser, ToolError, exit_on_error
from tools.image.info import build_info
from tools.upstream import ROOT

COMMANDS = ("buildah", "debootstrap", "podman", "runc", "tar")  # each in the Debian package of its name
SUITE = "bookworm"
BASE = f"localhost/debian-base:{SUITE}"
ARCHITECTURES = {"cpu": "", "cuda": architectures("image")}
FREE_BYTES = {"cpu": 15 << 30, "cuda": 40 << 30}
# What debian:*-slim leaves out, also from packages that are installed later. Licences stay.
SLIM = """\
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
"""
# podman's defaults need cgroups, limits and a network of its own, which an unprivileged host does not give.
CONTAINERS_CONF = """\
[containers]
netns = "host"
default_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


def check_host(target: str, store: Path) -> None:
    """Check that the host can build `target` into the folder `store`.

    Raises:
        ToolError: commands, rights or disk space are missing.
    """
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise ToolError(
            f"building an image needs {', '.join(missing)}: apt-get install --no-install-recommends "
            f"{' '.join(missing)} fuse-overlayfs"
        )
    if os.geteuid() != 0:
        raise ToolError("building an image needs root (debootstrap, chroot): run it as root.")
    store.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store).free
    if free < FREE_BYTES[target]:
        raise ToolError(
            f"the {target} image needs {FREE_BYTES[target] >> 30} GiB free at {store}, which has {free >> 30} GiB: make room."
        )


def mirror(sources: Path = Path("/etc/apt")) -> str:
    """Return the first Debian mirror that this host's apt uses.

    Raises:
        ToolError: it uses none.
    """
    files = [*sorted(sources.glob("sources.list.d/debian*.sources")), *sources.glob("sources.list")]
    for file in files:
        if found := re.search(
            r"(?m)^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(\S+/debian/?)(?:\s|$)", file.read_text()
        ):
            return found[1]
    raise ToolError(
        f"{sources}: expected a Debian mirror in it, found none; set BASE_IMAGE to an image instead."
    )


def ca_bundle() -> Path | None:
    """Return the file with the certificates that this host trusts."""
    paths = ssl.get_default_verify_paths()
    candidates = [os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


class Store:
    """Images and containers in one folder, separate from the host's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        self.options = ("--storage-driver", "overlay", "--root", folder / "root", "--runroot", folder / "run")

    def command(self, tool: str, *arguments: object) -> list[str]:
        """Return the command that runs `tool` on this store."""
        return [str(word) for word in (tool, *self.options, *arguments)]

    def run(
        self, tool: str, *arguments: object, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `buildah` or `podman` on this store.

        Args:
            tool: `buildah` or `podman`.
            arguments: the command's arguments.
            check: whether a failure raises.
            options: passed to subprocess.run.

        Raises:
            ToolError: it failed, and `check` is true.
        """
        environment = os.environ | {"CONTAINERS_CONF": str(self.folder / "containers.conf")}
        done = subprocess.run(self.command(tool, *arguments), env=environment, text=True, **options)
        if check and done.returncode:
            said = (done.stderr or done.stdout or "its output is above").strip().splitlines()[-1]
            raise ToolError(f"{tool} {arguments[0]} failed (exit status {done.returncode}): {said}")
        return done

    def text(self, tool: str, *arguments: object) -> str:
        """Return what the command prints."""
        return self.run(tool, *arguments, capture_output=True).stdout.strip()

    def has(self, image: str) -> bool:
        """Return whether the store holds `image`."""
        return self.run("podman", "image", "exists", image, check=False).returncode == 0

    def remove(self) -> None:
        """Remove all images, containers and mounts, then the folder."""
        if not self.folder.exists():
            return
        for arguments in (("rm", "-a", "-f"), ("image", "umount", "-a"), ("rmi", "-a", "-f")):
            self.run("podman", *arguments, check=False, capture_output=True)
        subprocess.run(["umount", self.folder / "root" / "overlay"], capture_output=True)
        discard(self.folder / "base")
        shutil.rmtree(self.folder, ignore_errors=True)


def discard(root: Path) -> None:
    """Remove a root file system. An interrupted debootstrap leaves /proc and /sys mounted in it."""
    for name in ("proc", "sys"):
        subprocess.run(["umount", "-l", root / name], capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


def make_base(store: Store) -> str:
    """Return the name of a slim Debian image in `store`. Make it with debootstrap if it is not there.

    debootstrap does not set up the security updates, so the image gets this host's Debian sources.
    """
    if store.has(BASE):
        return BASE
    root = store.folder / "base"
    discard(root)
    debootstrap = [
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates",
        SUITE,
        str(root),
        mirror(),
    ]
    run_checked(debootstrap, quiet=True)
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    if sources.exists():
        shutil.copy(sources, root / "etc/apt/sources.list.d/")
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    for folder in (
        "var/cache/apt/archives",
        "var/lib/apt/lists",
        "usr/share/man",
        "usr/share/locale",
        "var/log",
    ):
        for path in (root / folder).glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in root.glob("usr/share/doc/*/*"):  # licences stay
        if path.name != "copyright":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        store.run("podman", "import", "-q", "-", BASE, stdin=tar.stdout, stdout=subprocess.DEVNULL)
    discard(root)
    return BASE


def fetch_torch(folder: Path) -> Path:
    """Download torch's CPU wheel to `folder`/wheels from wherever this host's pip finds it; return `folder`.

    Raises:
        ToolError: none of the indexes and folders that pip is configured with has it.
    """
    wheels = folder / "wheels"
    if not list(wheels.glob("torch-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
        command += [
            "-d",
            str(wheels),
            "--only-binary=:all:",
            "--python-version=3.11",
            "--platform=manylinux_2_28_x86_64",
        ]
        command += ["-r", str(ROOT / "requirements" / "torch-cpu.lock")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ToolError(
                "torch's CPU wheel (requirements/torch-cpu.lock) could not be downloaded: set PIP_FIND_LINKS or "
                f"PIP_EXTRA_INDEX_URL to a place that has it; pip says: {done.stderr.strip().splitlines()[-1]}"
            )
    return folder


def revision() -> str:
    """Return the commit of this checkout, with '-modified' if files differ from it; 'unknown' outside git."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty=-modified",
        "--exclude=*",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def build(target: str, store: Store, kernels: Path | None = None) -> str:
    """Build `target` in `store`; return the image's name.

    Args:
        target: 'cpu' or 'cuda'.
        store: where the image goes.
        kernels: a folder whose wheels/ has our kernels, compiled earlier; None compiles them.

    Raises:
        ToolError: the build failed.
    """
    check_host(target, store.folder)
    info = build_info(target, ARCHITECTURES[target])
    commit = revision()
    image = f"localhost/sglang-ddtree:{target}"
    base = os.environ.get("BASE_IMAGE") or make_base(store)
    command: list[object] = ["bud", "--isolation", "chroot", "--layers", "--format", "docker"]
    command += ["--target", target, "-t", image]
    command += ["-f", ROOT / "docker/Dockerfile", "--ignorefile", ROOT / "docker/Dockerfile.dockerignore"]
    if target == "cpu":
        command += ["--build-context", f"torch-cpu={fetch_torch(store.folder / 'torch-cpu')}"]
    if kernels:  # replaces the stage that compiles them
        command += ["--build-context", f"{target}-kernels={kernels}"]
    if bundle := ca_bundle():
        command += ["--secret", f"id=ca_bundle,src={bundle}"]
    values = {
        "BASE_IMAGE": base,
        "VERSION": info["version"].replace("+", "-"),  # an image's tag has no +
        "UPSTREAM": info["upstream"],
        "PATCHSET": info["patchset"],
        "BUILD_ID": info["build_id"],
        "REVISION": commit,
        "CREATED": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    for name, value in values.items():
        command += ["--build-arg", f"{name}={value}"]
    store.run("buildah", *command, ROOT)
    return image


def size(store: Store, image: str) -> int:
    """Return the bytes of all layers of `image`, unpacked."""
    return int(store.text("podman", "image", "inspect", "--format", "{{.Size}}", image))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(prog="python3 -m tools.image.build", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=sorted(ARCHITECTURES))
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "image", help="default: %(default)s")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write time, size and build information as JSON"
    )
    parser.add_argument(
        "--kernels", type=Path, metavar="FOLDER", help="take our kernels' wheel from FOLDER/wheels"
    )
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    with exit_on_error():
        store = Store(arguments.store.resolve())
        image = build(arguments.target, store, arguments.kernels and arguments.kernels.resolve())
        seconds, total = time.monotonic() - started, size(store, image)
    print(f"{image}: {total / 1e9:.2f} GB unpacked, {seconds:.0f} s")
    if arguments.record:
        info = build_info(arguments.target, ARCHITECTURES[arguments.target])
        record: dict[str, object] = {
            "image": image,
            "seconds": round(seconds),
            "bytes": total,
            "revision": revision(),
            **info,
        }
        record["kernels"] = "compiled earlier" if arguments.kernels else "compiled"
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
