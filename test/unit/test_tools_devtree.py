"""The development tree: it is complete and live, is updated in place, and never appears half made."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from support.tools_case import PATCH, UPSTREAM, ToolsCase, register_cpu_ci

from tools import devtree

register_cpu_ci(est_time=5, suite="unit")


class TestDev(ToolsCase):
    def setUp(self):
        super().setUp()
        self.add()
        self.site = self.root / "build/dev"
        self.patchset("dev")

    def run_in_it(self, code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": str(self.site)}, capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def test_it_runs_and_edits_are_live(self):
        start = "from sglang.srt.engine import Engine; Engine().start(1)"
        self.write("python/sglang/srt/ours.py", "def count(): print('counted')\n")
        self.assertEqual(self.run_in_it(start), "counted")
        self.write("python/sglang/srt/ours.py", "def count(): print('counted again')\n")
        self.assertEqual(self.run_in_it(start), "counted again")

    def test_it_is_a_distribution(self):
        code = "import importlib.metadata as m; print(m.version('sglang'), m.requires('sglang')[0], "
        code += "*m.entry_points(group='console_scripts', name='sglang'))"
        self.assertTrue(self.run_in_it(code).startswith("0.5.23+ddtree.1 torch EntryPoint(name='sglang'"))

    def test_upstreams_files_and_modes(self):
        for name in UPSTREAM:
            if name != "sglang/srt/engine.py":
                self.assertEqual((self.site / name).read_bytes(), self.upstream.read(name))
        self.assertTrue((self.site / "sglang/srt/engine.py").stat().st_mode & 0o100)
        self.assertFalse((self.site / "sglang/__init__.py").stat().st_mode & 0o100)

    def test_brought_up_to_date_in_place(self):
        kept = (self.site / "sglang/__init__.py").stat().st_ino
        (self.root / "patches/cpu/count-starts.patch").unlink()
        self.patchset("refresh")
        (self.root / "python/sglang/srt/ours.py").unlink()
        self.write("python/sglang/srt/more/new.py", "")
        self.patchset("dev")
        self.assertEqual(
            (self.site / "sglang/srt/engine.py").read_bytes(), self.upstream.read("sglang/srt/engine.py")
        )
        self.assertFalse((self.site / "sglang/srt/ours.py").is_symlink())
        self.assertTrue((self.site / "sglang/srt/more/new.py").is_symlink())
        self.assertEqual((self.site / "sglang/__init__.py").stat().st_ino, kept)

    def test_a_new_release_replaces_the_tree(self):
        (self.root / "patches/cpu/count-starts.patch").unlink()
        self.patchset("refresh")
        files = {k: v for k, v in UPSTREAM.items() if not k.startswith("sglang/data")}
        self.release({"0.6.0": files})
        self.patchset("refresh")
        self.patchset("dev")
        self.assertFalse((self.site / "sglang/data").exists())
        self.assertEqual([p.name for p in self.site.glob("*.dist-info")], ["sglang-0.6.0+ddtree.1.dist-info"])
        self.assertEqual([p.name for p in self.site.parent.iterdir()], ["dev"])

    def test_a_failure_leaves_the_old_tree(self):
        files = {k: v for k, v in UPSTREAM.items() if k != "sglang/srt/engine.py"}
        self.release({"0.6.0": files})
        self.refused("dev", says="run the rebase")
        self.write("patches/cpu/count-starts.patch", PATCH)
        self.release({"0.5.23": UPSTREAM | {"sglang/other.py": ""}})
        full = OSError(28, "No space left on device", "f")
        with mock.patch.object(devtree, "replace", side_effect=full):
            self.refused("dev", says="No space left on device: 'f'")

    def test_a_folder_that_is_something_else(self):
        self.write("mine/notes.txt", "")
        self.refused("dev", Path(self.root, "mine"), says="is not a development tree")


if __name__ == "__main__":
    unittest.main()
