"""The PEP 517 backend: `pip install .` gives upstream's wheel with our patches and modules in it.

Config settings (`pip install . --config-settings NAME=VALUE`):
    cache: the folder of upstream's wheels.
    python: the interpreter to build for, e.g. cp312, if it is not the running one.
    profile: `cpu` states the CPU profile's dependencies; `cuda`, the default, upstream's.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import importlib.util
import io
import os
import tarfile
import zipfile
from pathlib import Path

from tools import distinfo
from tools.errors import exit_on_error
from tools.series import Series
from tools.upstream import ROOT, Pins, Release, cache_dir, need_space

Settings = dict[str, str] | None
Date = tuple[int, int, int, int, int, int]

SDIST = ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "upstream.toml", "patches", "python", "tools")
EPOCH: Date = (1980, 1, 1, 0, 0, 0)  # the date of our files; upstream's files keep theirs


def cache_of(settings: Settings) -> Path:
    """Return the folder of upstream's wheels."""
    return Path((settings or {}).get("cache") or cache_dir())


def inputs(settings: Settings) -> tuple[Pins, Series, Release, str]:
    """Return the pins, the series, the upstream release and the profile of a build.

    Raises:
        ToolError: the profile is unknown, or the upstream wheel cannot be had.
    """
    settings = settings or {}
    pins, profile = Pins.load(), settings.get("profile", "cuda")
    distinfo.check_profile(profile)
    return pins, Series(), Release.get(pins, python=settings.get("python"), cache=cache_of(settings)), profile


def write_wheel(path: Path, series: Series, pins: Pins, upstream: Release, profile: str = "cuda") -> None:
    """Write our wheel. The same inputs give the same bytes.

    Args:
        path: the file, which appears complete or not at all.
        series: our patches and modules.
        pins: our version.
        upstream: the release that the series is for.
        profile: `cpu` or `cuda`. The wheel states this profile's dependencies.

    Raises:
        ToolError: the series does not fit the release, or the disk is too small.
    """
    patched = series.assemble(upstream)
    info = distinfo.files(pins, series, upstream, profile)
    record = f"{distinfo.folder(pins)}/RECORD"
    need_space(path.parent, 2 * upstream.wheel.size, f"Building {path.name}")
    tmp = path.with_name(f".{path.name}.new")
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")  # upstream has commas in file names
    try:
        with zipfile.ZipFile(tmp, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out:

            def add(name: str, data: bytes, mode: int = 0o644, date: Date = EPOCH) -> None:
                entry = zipfile.ZipInfo(name, date)
                entry.create_system, entry.external_attr = 3, (0o100000 | mode) << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(entry, data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                table.writerow((name, f"sha256={digest}", len(data)))

            packages = {n for n in upstream.entries if not n.startswith(upstream.dist_info + "/")}
            for name in sorted(packages | set(series.overlay)):
                if name in series.overlay:
                    add(name, series.overlay[name].read_bytes())
                elif name in patched:
                    add(name, patched[name], upstream.mode(name))
                else:
                    add(name, upstream.read(name), upstream.mode(name), upstream.entries[name].date_time)
            for name, data in info.items():
                add(name, data)
            table.writerow((record, "", ""))
            add(record, rows.getvalue().encode())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def wheel_name(pins: Pins, upstream: Release) -> str:
    """Return the file name of our wheel."""
    return upstream.wheel.file.replace(f"sglang-{pins.sglang}-", f"sglang-{pins.version}-", 1)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Ask for pip if there is a wheel to download: pip's own build environment has no pip."""
    with exit_on_error():
        wheel = Pins.load().wheel(python=(config_settings or {}).get("python"))
    cached = (cache_of(config_settings) / wheel.file).exists()
    return [] if cached or importlib.util.find_spec("pip") else ["pip"]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the .dist-info folder and return its name (PEP 517)."""
    with exit_on_error():
        pins, series, upstream, profile = inputs(config_settings)
        for name, data in distinfo.files(pins, series, upstream, profile).items():
            path = Path(metadata_directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return distinfo.folder(pins)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel and return its file name (PEP 517)."""
    with exit_on_error():
        pins, series, upstream, profile = inputs(config_settings)
        path = Path(wheel_directory, wheel_name(pins, upstream))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wheel(path, series, pins, upstream, profile)
    return path.name


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """Ask for nothing (PEP 517)."""
    return []


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Pack what a wheel is built from. Building from it downloads upstream's wheel again."""
    pins = Pins.load()
    stem = f"sglang-{pins.version}"
    about = f"Metadata-Version: 2.2\nName: sglang\nVersion: {pins.version}\nRequires-Python: >=3.11\n"
    about += "Dynamic: Requires-Dist\nDynamic: Provides-Extra\n"
    names = (*SDIST, *distinfo.CPU_REQUIREMENTS)
    tops = [ROOT / name for name in names if (ROOT / name).exists()]
    files = {f for top in tops for f in (top.rglob("*") if top.is_dir() else [top]) if f.is_file()}
    members = {f.relative_to(ROOT): f.read_bytes() for f in files}
    members = {
        r: data for r, data in members.items() if not any(p.startswith((".", "__pycache__")) for p in r.parts)
    }
    members[Path("PKG-INFO")] = about.encode()
    path = Path(sdist_directory, f"{stem}.tar.gz")
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(members):
                entry = tarfile.TarInfo(f"{stem}/{name.as_posix()}")
                entry.size, entry.mode = len(members[name]), 0o644
                tar.addfile(entry, io.BytesIO(members[name]))
    return path.name
