"""The pinned upstream release: which wheels, where they lie, what is in them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PINS_HEAD = """\
# What we build on. Our version is SGLANG+REVISION. Each wheel is fetched by this name and refused unless it has this
# sha256; size is in bytes. `python -m tools.patchset rebase VERSION` writes this file; older releases stay listed for as
# long as a test rebases from them.
"""


class Stop(Exception):
    """A mistake of the user's or the network's, told in one sentence that says what to do."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def need_space(folder: Path, size: int, what: str) -> None:
    """Raise Stop unless the file system that (will) hold `folder` has `size` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Stop(f"{what} needs {size >> 20} MiB and {folder} has {free >> 20} MiB free: make room there.")


@dataclass(frozen=True)
class Wheel:
    """One wheel of upstream's, as upstream.toml lists it (size in bytes)."""

    file: str
    sha256: str
    size: int

    @property
    def version(self) -> str:
        return self.file.split("-")[1]

    @property
    def python(self) -> str:
        return self.file.split("-")[2]

    @property
    def tag(self) -> str:
        """Its platform tag, e.g. manylinux_2_34_x86_64."""
        return self.file.removesuffix(".whl").split("-")[4]


@dataclass(frozen=True)
class Pins:
    """upstream.toml: the release we are built on, its wheels, our revision."""

    sglang: str
    kernel: str
    revision: str
    wheels: tuple[Wheel, ...]

    @classmethod
    def load(cls, root: Path = ROOT) -> Pins:
        doc = tomllib.loads((root / "upstream.toml").read_text())
        wheels = tuple(Wheel(**w) for w in doc["wheel"])
        return cls(doc["sglang"], doc["sglang-kernel"], doc["revision"], wheels)

    def format(self) -> str:
        """The text of upstream.toml."""
        head = f'revision = "{self.revision}"\nsglang = "{self.sglang}"\nsglang-kernel = "{self.kernel}"\n'
        rows = sorted(self.wheels, key=lambda w: w.file)
        table = [f'[[wheel]]\nfile = "{w.file}"\nsha256 = "{w.sha256}"\nsize = {w.size}\n' for w in rows]
        return PINS_HEAD + "\n".join([head, *table])

    @property
    def version(self) -> str:
        return f"{self.sglang}+{self.revision}"

    def wheel(self, version: str | None = None, python: str | None = None) -> Wheel:
        """The listed wheel of `version` (default: the pin) for `python` (default: the running one, e.g. cp311)."""
        version = version or self.sglang
        if python is None and (sys.platform, platform.machine()) != ("linux", "x86_64"):
            here = f"{sys.platform} on {platform.machine()}"
            raise Stop(
                f"upstream's wheels listed in upstream.toml are for linux on x86_64 and this is {here}: use such."
            )
        python = python or "cp%d%d" % sys.version_info[:2]
        listed = [w for w in self.wheels if w.version == version]
        for w in listed:
            if w.python == python:
                return w
        have = ", ".join(w.python for w in listed) or "none"
        raise Stop(
            f"upstream.toml lists no sglang {version} wheel for {python}, only for: {have}; use such a Python."
        )


def cache_dir() -> Path:
    """Where wheels are kept between builds, outside any clone."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-ddtree"


def pip_download(requirement: str, python: str, tag: str, folder: Path) -> None:
    """Download one wheel, without its dependencies, through pip and the index that pip is configured with.

    Raises:
        Stop: no network, or the index does not have it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += [f"--python-version={python.removeprefix('cp')}", f"--abi={python}", f"--platform={tag}"]
    command += ["--implementation=cp", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return
    where = f"or put the wheel into {folder.parent}"
    if "No module named pip" in done.stdout:
        raise Stop(
            f"{sys.executable} has no pip to fetch {requirement} with: run `python -m ensurepip`, {where}."
        )
    # With no network pip retries and at last says "No matching distribution": the retries are what tells them apart.
    signs = ("Retrying (", "Connection", "ProxyError", "SSLError", "timed out")
    if any(sign in done.stdout for sign in signs):
        raise Stop(f"no network: pip could not reach the package index for {requirement}; connect, {where}.")
    if "No matching distribution" in done.stdout:
        raise Stop(f"the package index has no {requirement} for {python}: use an index that has it, {where}.")
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    raise Stop(f"pip could not download {requirement} ({last}); mend that, {where}.")


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """Give the path of `wheel` in the cache, downloading it if it is not there yet.

    Raises:
        Stop: it cannot be had, or its sha256 is not the pinned one. Nothing is left behind then.
    """
    cache = cache or cache_dir()
    path = cache / wheel.file
    if path.exists():
        verify(path, wheel, f"delete {path} and run this again")
        return path
    need_space(cache, 2 * wheel.size, f"Downloading {wheel.file}")
    cache.mkdir(parents=True, exist_ok=True)
    print(f"fetching {wheel.file} ({wheel.size >> 20} MiB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        pip_download(f"sglang=={wheel.version}", wheel.python, wheel.tag, Path(tmp))
        got = Path(tmp, wheel.file)
        if not got.exists():
            names = ", ".join(sorted(os.listdir(tmp)))
            raise Stop(
                f"the package index served {names} where upstream.toml lists {wheel.file}: use another index."
            )
        verify(got, wheel, "the index served another file, nothing was kept; use another index")
        os.replace(got, path)
    return path


def verify(path: Path, wheel: Wheel, advice: str) -> None:
    got = sha256(path.read_bytes())
    if got != wheel.sha256:
        raise Stop(f"{wheel.file} has sha256 {got} where upstream.toml has {wheel.sha256}: {advice}.")


class Release:
    """The content of one upstream wheel, by path inside it (`sglang/srt/...`)."""

    def __init__(self, path: Path, wheel: Wheel):
        self.path, self.wheel = path, wheel
        try:
            self.zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise Stop(f"{path} is not a wheel: delete it and run this again.") from None

    @classmethod
    def get(cls, pins: Pins, version=None, python=None, cache: Path | None = None) -> Release:
        """The release that `pins.wheel(version, python)` names, fetched if need be."""
        wheel = pins.wheel(version, python)
        return cls(fetch(wheel, cache), wheel)

    @cached_property
    def entries(self) -> dict[str, zipfile.ZipInfo]:
        return {i.filename: i for i in self.zip.infolist() if not i.is_dir()}

    @cached_property
    def folders(self) -> set[str]:
        return {str(parent) for name in self.entries for parent in Path(name).parents}

    @property
    def size(self) -> int:
        return sum(i.file_size for i in self.entries.values())

    @property
    def dist_info(self) -> str:
        return f"sglang-{self.wheel.version}.dist-info"

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str) -> bytes:
        return self.zip.read(name)

    def mode(self, name: str) -> int:
        return (self.entries[name].external_attr >> 16) & 0o777
