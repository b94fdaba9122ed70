"""The .dist-info of our distribution: upstream's, with our version, plug-in entry points, licence and notice.

The wheel of the CUDA profile states upstream's dependencies. That of the CPU profile states its own, those
that the lock files install, so that `pip check` can hold an installation against them.
"""

from __future__ import annotations

import configparser
import io
import re
import tomllib
from pathlib import Path

from tools.errors import ToolError
from tools.series import Series, module_path
from tools.upstream import Pins, Release

# File in this repository: its name next to upstream's LICENSE.
LICENSES = {"LICENSE": "LICENSE-ddtree", "NOTICE": "NOTICE"}
PROFILES = ("cpu", "cuda")
# What the CPU profile installs besides our own wheels: torch, and the rest.
CPU_REQUIREMENTS = ("requirements/torch-cpu.lock", "requirements/cpu.in")


def check_profile(profile: str) -> None:
    """Check the name of a profile.

    Raises:
        ToolError: there is no such profile.
    """
    if profile not in PROFILES:
        raise ToolError(f"profile: expected {' or '.join(PROFILES)}, got {profile}.")


def folder(pins: Pins) -> str:
    """Return the name of our .dist-info folder."""
    return f"sglang-{pins.version}.dist-info"


def torch_cpu(root: Path) -> str:
    """Return the CPU profile's torch, e.g. torch==2.13.0. No +cpu: the index's default build works too."""
    found = re.search(r"(?m)^(torch==[\w.]+)", (root / CPU_REQUIREMENTS[0]).read_text())
    if not found:
        raise ToolError(f"{CPU_REQUIREMENTS[0]}: expected a line torch==VERSION, found none.")
    return found[1]


def cpu_requirements(root: Path, pins: Pins) -> list[str]:
    """Return what the CPU profile consists of, as NAME==VERSION.

    Raises:
        ToolError: torch-cpu.lock pins no torch.
    """
    lines = (line.split("#")[0].strip() for line in (root / CPU_REQUIREMENTS[1]).read_text().splitlines())
    return [torch_cpu(root), f"sglang-kernel=={pins.kernel}", *(line for line in lines if line)]


def metadata(pins: Pins, upstream: Release, requirements: list[str] | None = None) -> bytes:
    """Return upstream's METADATA with our version and licence files.

    Args:
        pins: our version.
        upstream: the release.
        requirements: dependencies in place of upstream's. Extras stay as they are.

    Raises:
        ToolError: upstream's METADATA has another layout than this function knows.
    """
    text = upstream.read(f"{upstream.dist_info}/METADATA").decode()
    head, body = text.split("\n\n", 1) if "\n\n" in text else (text, "")
    head, versions = re.subn(rf"(?m)^Version: {re.escape(pins.sglang)}$", f"Version: {pins.version}", head)
    ours = "".join(f"License-File: {name}\n" for name in LICENSES.values())
    head, licenses = re.subn(r"(?m)^License-File: .*\n", lambda m: m.group() + ours, head, count=1)
    if (versions, licenses) != (1, 1):
        raise ToolError(
            f"the METADATA of {upstream.wheel.file} has an unknown layout: adapt tools/distinfo.py to it."
        )
    if requirements is not None:
        head = re.sub(r"(?m)^Requires-Dist: (?!.*\bextra ==).*\n?", "", head).rstrip("\n")
        head = "\n".join([head, *(f"Requires-Dist: {requirement}" for requirement in requirements)])
    return f"{head}\n\n{body}".encode()


def entry_points(series: Series, upstream: Release) -> bytes:
    """Return upstream's entry points, and those of pyproject.toml whose module exists."""
    table = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    table.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
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
    """Return the list of upstream files that the series changes, for the NOTICE."""
    by = {path: ", ".join(p.name for p in series.patches if path in p.hunks) for path in series.touched}
    return "\nChanged files, and the patches that change them:\n" + "".join(
        f"  {p}: {n}\n" for p, n in by.items()
    )


def files(pins: Pins, series: Series, upstream: Release, profile: str = "cuda") -> dict[str, bytes]:
    """Return every file of our .dist-info except RECORD, by path in the wheel.

    Args:
        pins: our version.
        series: our patches and modules.
        upstream: the release.
        profile: `cpu` or `cuda`. METADATA states this profile's dependencies.
    """
    names = [
        n for n in upstream.entries if n.startswith(upstream.dist_info + "/") and not n.endswith("/RECORD")
    ]
    out = {n.removeprefix(upstream.dist_info): upstream.read(n) for n in names}
    requirements = cpu_requirements(series.root, pins) if profile == "cpu" else None
    out["/METADATA"] = metadata(pins, upstream, requirements)
    out["/entry_points.txt"] = entry_points(series, upstream)
    out["/WHEEL"] = re.sub(
        rb"(?m)^Generator: .*$", b"Generator: sglang-ddtree tools.build_wheel", out["/WHEEL"]
    )
    for source, name in LICENSES.items():
        out[f"/licenses/{name}"] = (series.root / source).read_bytes()
    out["/licenses/NOTICE"] += changes(series).encode()
    return {folder(pins) + n: data for n, data in sorted(out.items())}
