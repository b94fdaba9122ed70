"""Builds a target of docker/Dockerfile with buildah, where there is no Docker engine and no registry of images.

    python3 -m tools.image.build cpu|cuda [--store FOLDER] [--record FILE] [--kernels FOLDER]

Needs root, and Debian's buildah, podman, runc, debootstrap and fuse-overlayfs. The base image is made by debootstrap from
the mirror that this host's apt uses, or is BASE_IMAGE where that is set. Standard library only.
"""

from __future__ import annotations

import argparse
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

from tools.architectures import architectures
from tools.image.info import build_info
from tools.upstream import ROOT

COMMANDS = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "podman": "podman",
    "runc": "runc",
    "tar": "tar",
}  # command: Debian package
SUITE = "bookworm"
BASE = f"localhost/debian-base:{SUITE}"
ARCHITECTURES = {"cpu": "", "cuda": architectures("image")}
FREE_BYTES = {"cpu": 15 << 30, "cuda": 40 << 30}
# What debian:*-slim leaves out, for packages installed later, too; licences stay.
SLIM = """\
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
"""
# podman's defaults ask for more than an unprivileged host gives: cgroups, limits, a network of its own.
CONTAINERS_CONF = """\
[containers]
netns = "host"
default_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


class ImageError(Exception):
    """A reason why there is no image; its text is one sentence that says what to do."""


def check_host(target: str, store: Path) -> None:
    """Raises ImageError unless the commands, the rights and the disk space are there."""
    missing = sorted({package for command, package in COMMANDS.items() if shutil.which(command) is None})
    if missing:
        raise ImageError(
            f"building an image needs {', '.join(missing)}: apt-get install --no-install-recommends "
            f"{' '.join(missing)} fuse-overlayfs"
        )
    if os.geteuid() != 0:
        raise ImageError("building an image needs root here (debootstrap, chroot): run it as root.")
    store.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store).free
    if free < FREE_BYTES[target]:
        raise ImageError(
            f"the {target} image needs {FREE_BYTES[target] >> 30} GB free at {store}, which has {free >> 30}: make room."
        )


def mirror(sources: Path = Path("/etc/apt")) -> str:
    """The first Debian mirror that this host's apt is set to.

    Raises:
        ImageError: it is set to none.
    """
    files = [*sorted(sources.glob("sources.list.d/debian*.sources")), *sources.glob("sources.list")]
    for file in files:
        if found := re.search(
            r"(?m)^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(\S+/debian/?)(?:\s|$)", file.read_text()
        ):
            return found[1]
    raise ImageError(
        f"{sources}: expected a Debian mirror there, found none; set BASE_IMAGE to an image instead."
    )


def ca_bundle() -> Path | None:
    """The certificates that this host trusts, in one file."""
    paths = ssl.get_default_verify_paths()
    candidates = [os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


class Store:
    """Images and containers in a folder of their own, apart from the host's."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        self.options = ["--storage-driver", "overlay", "--root", folder / "root", "--runroot", folder / "run"]

    def command(self, tool: str, *arguments) -> list[str]:
        return [str(word) for word in (tool, *self.options, *arguments)]

    def run(self, tool: str, *arguments, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Runs `buildah` or `podman` on this store.

        Raises:
            ImageError: it failed, and `check` is true.
        """
        environment = os.environ | {"CONTAINERS_CONF": str(self.folder / "containers.conf")}
        done = subprocess.run(self.command(tool, *arguments), env=environment, text=True, **options)
        if check and done.returncode:
            said = (done.stderr or done.stdout or "its output is above").strip().splitlines()[-1]
            raise ImageError(f"{tool} {arguments[0]} failed (exit status {done.returncode}): {said}")
        return done

    def text(self, tool: str, *arguments) -> str:
        return self.run(tool, *arguments, capture_output=True).stdout.strip()

    def has(self, image: str) -> bool:
        return self.run("podman", "image", "exists", image, check=False).returncode == 0

    def remove(self) -> None:
        """Removes all images, containers and mounts, then the folder."""
        if not self.folder.exists():
            return
        for arguments in (("rm", "-a", "-f"), ("image", "umount", "-a"), ("rmi", "-a", "-f")):
            self.run("podman", *arguments, check=False, capture_output=True)
        subprocess.run(["umount", self.folder / "root" / "overlay"], capture_output=True)
        discard(self.folder / "base")
        shutil.rmtree(self.folder, ignore_errors=True)


def discard(root: Path) -> None:
    """Removes a root file system; a debootstrap that was interrupted leaves /proc and /sys mounted in it."""
    for name in ("proc", "sys"):
        subprocess.run(["umount", "-l", root / name], capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


def make_base(store: Store) -> str:
    """Returns the name of a slim Debian image in `store`, made by debootstrap unless it is there.

    It takes this host's Debian sources along, which debootstrap does not: they have the security updates.
    """
    if store.has(BASE):
        return BASE
    root = store.folder / "base"
    discard(root)
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, root, mirror()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
    """Puts torch's CPU wheel into `folder`/wheels, from where this host's pip finds it.

    Raises:
        ImageError: no index or folder that pip is configured with has it.
    """
    wheels = folder / "wheels"
    if not list(wheels.glob("torch-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--require-hashes",
            "-d",
            wheels,
        ]
        command += ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"]
        command += ["-r", ROOT / "requirements" / "torch-cpu.lock"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ImageError(
                "torch's CPU wheel (requirements/torch-cpu.lock) could not be had: let PIP_FIND_LINKS or "
                f"PIP_EXTRA_INDEX_URL name where it is; pip says: {done.stderr.strip().splitlines()[-1]}"
            )
    return folder


def revision() -> str:
    """The commit of this checkout, with '-modified' where files differ from it; 'unknown' outside git."""
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
    """Builds `target` in `store`; returns the image's name.

    Args:
        target: 'cpu' or 'cuda'.
        store: where the image goes.
        kernels: a folder whose wheels/ has our kernels, compiled before; None compiles them.

    Raises:
        ImageError: with the reason.
    """
    check_host(target, store.folder)
    info = build_info(target, ARCHITECTURES[target])
    commit = revision()
    image = f"localhost/sglang-ddtree:{target}"
    base = os.environ.get("BASE_IMAGE") or make_base(store)
    command = [
        "bud",
        "--isolation",
        "chroot",
        "--layers",
        "--format",
        "docker",
        "--target",
        target,
        "-t",
        image,
    ]
    command += ["-f", ROOT / "docker/Dockerfile", "--ignorefile", ROOT / "docker/Dockerfile.dockerignore"]
    if target == "cpu":
        command += ["--build-context", f"torch-cpu={fetch_torch(store.folder / 'torch-cpu')}"]
    if kernels:  # takes the place of the stage that compiles them
        command += ["--build-context", f"{target}-kernels={kernels}"]
    if bundle := ca_bundle():
        command += ["--secret", f"id=ca_bundle,src={bundle}"]
    values = {
        "BASE_IMAGE": base,
        "VERSION": info["version"].replace("+", "-"),  # as an image's tag would have it
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
    """Bytes of all layers of `image`, unpacked."""
    return int(store.text("podman", "image", "inspect", "--format", "{{.Size}}", image))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tools.image.build", description=__doc__.splitlines()[0])
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
    try:
        store = Store(arguments.store.resolve())
        image = build(arguments.target, store, arguments.kernels and arguments.kernels.resolve())
    except (ImageError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds, total = time.monotonic() - started, size(store, image)
    print(f"{image}: {total / 1e9:.2f} GB unpacked, {seconds:.0f} s")
    if arguments.record:
        info = build_info(arguments.target, ARCHITECTURES[arguments.target])
        record = {"image": image, "seconds": round(seconds), "bytes": total, "revision": revision(), **info}
        record["kernels"] = "compiled before" if arguments.kernels else "compiled"
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
