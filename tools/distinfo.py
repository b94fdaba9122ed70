"""The .dist-info of our distribution: upstream's, with our version, plug-in entry points, licence and notice."""

from __future__ import annotations

import configparser
import io
import re
import tomllib

from .series import Series, module_path
from .upstream import Pins, Release, Stop

LICENSES = {
    "LICENSE": "LICENSE-ddtree",
    "NOTICE": "NOTICE",
}  # file in this repository: name beside upstream's LICENSE


def folder(pins: Pins) -> str:
    return f"sglang-{pins.version}.dist-info"


def metadata(pins: Pins, upstream: Release) -> bytes:
    """Upstream's METADATA with our version and our licence files; dependencies and extras stay as they are."""
    text = upstream.read(f"{upstream.dist_info}/METADATA").decode()
    head, body = text.split("\n\n", 1) if "\n\n" in text else (text, "")
    head, versions = re.subn(rf"(?m)^Version: {re.escape(pins.sglang)}$", f"Version: {pins.version}", head)
    ours = "".join(f"License-File: {name}\n" for name in LICENSES.values())
    head, licenses = re.subn(r"(?m)^License-File: .*\n", lambda m: m.group() + ours, head, count=1)
    if (versions, licenses) != (1, 1):
        raise Stop(
            f"the METADATA of {upstream.wheel.file} is not laid out as known: adapt tools/distinfo.py."
        )
    return f"{head}\n\n{body}".encode()


def entry_points(series: Series, upstream: Release) -> bytes:
    """Upstream's entry points and those of pyproject.toml whose module is there."""
    table = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    table.optionxform = str  # names keep their case
    table.read_string(upstream.read(f"{upstream.dist_info}/entry_points.txt").decode())
    groups = tomllib.loads((series.root / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, entries in groups.items():
        for name, target in entries.items():
            if module_path(target.split(":")[0], series.overlay.__contains__):
                if not table.has_section(group):
                    table.add_section(group)
                table.set(group, name, target)
    out = io.StringIO()
    table.write(out)
    return out.getvalue().encode()


def changes(series: Series) -> str:
    """The files of upstream's that the series changes, for the NOTICE."""
    by = {path: ", ".join(p.name for p in series.patches if path in p.hunks) for path in series.touched}
    return "\nChanged files, and the patches that change them:\n" + "".join(
        f"  {p}: {n}\n" for p, n in by.items()
    )


def files(pins: Pins, series: Series, upstream: Release) -> dict[str, bytes]:
    """Every file of our .dist-info but RECORD, by path in the wheel."""
    names = [
        n for n in upstream.entries if n.startswith(upstream.dist_info + "/") and not n.endswith("/RECORD")
    ]
    out = {n.removeprefix(upstream.dist_info): upstream.read(n) for n in names}
    out["/METADATA"] = metadata(pins, upstream)
    out["/entry_points.txt"] = entry_points(series, upstream)
    out["/WHEEL"] = re.sub(
        rb"(?m)^Generator: .*$", b"Generator: sglang-ddtree tools.build_wheel", out["/WHEEL"]
    )
    for source, name in LICENSES.items():
        out[f"/licenses/{name}"] = (series.root / source).read_bytes()
    out["/licenses/NOTICE"] += changes(series).encode()
    return {folder(pins) + n: data for n, data in sorted(out.items())}
