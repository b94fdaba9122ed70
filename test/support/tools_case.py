"""A small checkout with a small upstream wheel, for tests of the tools. Neither needs sglang or a network."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import textwrap
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from tools import patchset
from tools.series import Series
from tools.upstream import Pins, Release, Wheel, python_tag

ROOT = Path(__file__).resolve().parents[2]
PYTHON = python_tag()

UPSTREAM = {
    "sglang/__init__.py": "",
    "sglang/srt/engine.py": """\
        import os


        class Engine:
            size = 3

            def start(self, port):
                self.port = port
                return self.port

            def stop(self):
                self.port = None


        def run(engine):
            return engine.start(1)
        """,
    "sglang/srt/cache/__init__.py": "table = {}\n",
    "sglang/data/settings, final.json": "{}\n",
}
PATCH = """\
Description: Count the starts
 and nothing else
Author: sglang-ddtree authors
Forwarded: not-needed
Last-Update: 2026-11-29
Seam: sglang.srt.engine:Engine.start
Calls: sglang.srt.ours:count
Remove-When: upstream counts them
Test: test/unit/test_tools_patches.py
--- a/sglang/srt/engine.py
+++ b/sglang/srt/engine.py
@@ -7,0 +8,2 @@
+        from sglang.srt.ours import count
+        count()
"""


def register_cpu_ci(est_time: float, suite: str) -> None:
    """Stand in for upstream's function, whose calls collect_tests reads from the source, without sglang."""


def make_wheel(folder: Path, version: str, files: dict[str, str]) -> Wheel:
    """Write an upstream wheel of `files` (indented text) into `folder`; return its row for upstream.toml."""
    info = f"sglang-{version}.dist-info"
    tag = f"{PYTHON}-{PYTHON}-manylinux_2_34_x86_64"
    meta = f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\nLicense-File: LICENSE\nRequires-Dist: torch\n"
    meta += 'Requires-Dist: sglang-kernel==0.4.10\nRequires-Dist: extra-package; extra == "more"\n'
    meta += "\nVersion: 1 is what the description says\n"
    files = {name: textwrap.dedent(text) for name, text in files.items()} | {
        f"{info}/METADATA": meta,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: x (1)\nRoot-Is-Purelib: false\nTag: {tag}\n",
        f"{info}/entry_points.txt": "[console_scripts]\nsglang = sglang.engine:Main.run\n",
        f"{info}/licenses/LICENSE": "the licence\n",
    }
    path = folder / f"sglang-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as out:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name.endswith("engine.py") else 0o100644) << 16
            out.writestr(entry, text)
        out.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(path.name, hashlib.sha256(data).hexdigest(), len(data))


class ToolsCase(unittest.TestCase):
    """self.root is a checkout with one module of ours and no patch. self.cache holds upstream's wheels."""

    def setUp(self):
        self.tmp = Path(tempfile.mkdtemp(prefix="ddtree-test-"))
        self.addCleanup(shutil.rmtree, self.tmp)
        self.root, self.cache = self.tmp / "checkout", self.tmp / "cache/sglang-ddtree"
        shutil.copytree(ROOT / "tools", self.root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("LICENSE", "NOTICE", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        self.write("python/sglang/srt/ours.py", "def count():\n    pass\n")
        self.write("test/unit/test_tools_patches.py", "")
        for name in ("series", "pre.sha256", "post.sha256", "seams.lock"):
            self.write(f"patches/{name}", "")
        self.release({"0.5.23": UPSTREAM})

    def release(self, versions: dict[str, dict[str, str]]) -> None:
        """Publish upstream `versions`. The first one is the pin."""
        wheels = tuple(make_wheel(self.cache, version, files) for version, files in versions.items())
        pins = Pins(next(iter(versions)), "0.4.10", "ddtree.1", wheels)
        self.write("upstream.toml", pins.format())

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def add(self, text: str = PATCH, name: str = "cpu/count-starts.patch") -> None:
        """Add a patch and refresh, which must succeed."""
        self.write(f"patches/{name}", text)
        self.patchset("refresh")

    def patchset(self, *args: object, status: int = 0, **env: str) -> str:
        """Run the command line on the checkout, which must exit with `status`; return what it prints."""
        said = io.StringIO()
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.cache.parent)} | env):
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                try:
                    got = patchset.main([str(a) for a in args], self.root)
                except SystemExit as stopped:
                    got = stopped.code
        self.assertEqual(got, status, said.getvalue())
        return said.getvalue()

    def refused(self, *args: object, says: str, **env: str) -> None:
        """Run the command line, which must fail with one sentence that has `says` in it and change nothing."""
        before = self.snapshot()
        said = self.patchset(*args, status=1, **env)
        sentences = [line for line in said.splitlines() if not line.startswith("fetching ")]
        self.assertEqual(len(sentences), 1, said)
        self.assertRegex(sentences[0], "^error: .*[.]$")
        self.assertIn(says, sentences[0])
        self.assertEqual(self.snapshot(), before)

    def snapshot(self) -> dict[str, bytes | str]:
        """Return every file of the checkout and the cache."""
        files = (
            p for p in sorted(self.tmp.rglob("*")) if "__pycache__" not in p.parts and ".git" not in p.parts
        )
        return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in files if not p.is_dir()}

    @property
    def series(self) -> Series:
        return Series(self.root)

    @property
    def upstream(self) -> Release:
        return Release.get(Pins.load(self.root), cache=self.cache)
