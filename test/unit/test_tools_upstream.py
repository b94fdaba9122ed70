"""Fetching the pinned wheel: each failure is one sentence and leaves the cache unchanged."""

from __future__ import annotations

import ast
import subprocess
import sys
import unittest
from collections import namedtuple
from unittest import mock

from support.tools_case import PYTHON, ROOT, UPSTREAM, ToolsCase, make_wheel, register_cpu_ci

from tools import upstream
from tools.errors import ToolError
from tools.upstream import Pins, fetch

register_cpu_ci(est_time=20, suite="unit")


class TestPins(unittest.TestCase):
    def test_the_repositorys(self):
        pins = Pins.load()
        self.assertEqual(pins.format(), (ROOT / "upstream.toml").read_text())
        self.assertEqual(pins.version, f"{pins.sglang}+{pins.revision}")
        self.assertEqual({w.python for w in pins.wheels if w.version == pins.sglang}, {"cp311", "cp312"})
        for wheel in pins.wheels:
            self.assertRegex(wheel.sha256, "^[0-9a-f]{64}$")
            self.assertRegex(wheel.tag, "^manylinux_.*_x86_64$")

    def test_the_stub_of_the_kernels_has_their_version(self):
        version = f'"{Pins.load().kernel}+cpu"'
        host = ROOT / "sgl-kernel" / "cpu_stub"
        self.assertIn(f"\nversion = {version}\n", (host / "pyproject.toml").read_text())
        self.assertIn(f"\n__version__ = {version}\n", (host / "sgl_kernel" / "__init__.py").read_text())

    def test_a_python_upstream_has_no_wheel_for(self):
        with self.assertRaisesRegex(
            ToolError, "no sglang .* wheel for cp399, only for: cp311, cp312; use one of these Pythons"
        ):
            Pins.load().wheel(python="cp399")

    def test_another_machine(self):
        with (
            mock.patch("platform.machine", return_value="aarch64"),
            self.assertRaisesRegex(ToolError, "linux on aarch64"),
        ):
            Pins.load().wheel()

    def test_an_old_python(self):
        # An old interpreter sees tools/__init__.py only, and must be able to parse it.
        source = (ROOT / "tools/__init__.py").read_text()
        ast.parse(source, feature_version=(3, 6))
        code = f"import sys; sys.version_info = (3, 10, 13); exec({source!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(
            done.stderr, r"^sglang-ddtree needs Python 3.11 or newer .* This is Python 3\.10 at .*\.\n$"
        )


class TestFetch(ToolsCase):
    def setUp(self):
        super().setUp()
        self.wheel = Pins.load(self.root).wheel()
        self.index = self.tmp / "index"  # what pip finds; the cache is empty
        self.index.mkdir()
        (self.cache / self.wheel.file).rename(self.index / self.wheel.file)
        self.offline = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "PIP_CONFIG_FILE": "/dev/null",
        }

    def test_download_once(self):
        path = self.cache / self.wheel.file
        self.assertIn(str(path), self.patchset("fetch", **self.offline))
        self.assertEqual(path.read_bytes(), (self.index / self.wheel.file).read_bytes())
        (self.index / self.wheel.file).unlink()
        self.assertEqual(self.patchset("fetch", **self.offline), f"{path}\n")
        self.assertEqual([p.name for p in self.cache.iterdir()], [self.wheel.file])

    def test_cache_option(self):
        self.patchset("--cache", self.tmp / "other", "fetch", **self.offline)
        self.assertTrue((self.tmp / "other" / self.wheel.file).exists())
        self.assertFalse((self.cache / self.wheel.file).exists())

    def test_the_index_serves_another_file(self):
        make_wheel(self.index, "0.5.23", UPSTREAM | {"sglang/evil.py": "import os\n"})
        self.refused("fetch", says="nothing was kept", **self.offline)

    def test_the_cached_file_was_changed(self):
        (self.cache / self.wheel.file).write_bytes(b"PK")
        for command in (["fetch"], ["dev", self.tmp / "d"], ["build", self.tmp / "d"]):
            self.refused(*command, says="delete", **self.offline)

    def test_the_index_has_it_no_more(self):
        (self.index / self.wheel.file).rename(self.tmp / "gone.whl")
        self.refused("fetch", says=f"the package index has no sglang==0.5.23 for {PYTHON}", **self.offline)

    def test_no_network(self):
        nowhere = {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_EXTRA_INDEX_URL": "",
        }
        nowhere |= {"PIP_FIND_LINKS": "", "PIP_RETRIES": "1"}
        for command in (["fetch"], ["build", self.tmp / "d"]):
            self.refused(*command, says="no network: pip could not reach the package index", **nowhere)

    def test_no_pip(self):
        done = mock.Mock(returncode=1, stdout=f"{sys.executable}: No module named pip\n")
        with mock.patch("subprocess.run", return_value=done):
            self.refused("fetch", says="has no pip to fetch sglang==0.5.23", **self.offline)

    def test_too_little_disk(self):
        usage = namedtuple("usage", "total used free")(0, 0, 1 << 10)
        with (
            mock.patch("shutil.disk_usage", return_value=usage),
            mock.patch.object(upstream, "pip_download") as pip,
        ):
            self.refused("fetch", says="free: make room there", **self.offline)
            pip.assert_not_called()
        fetch(self.wheel, self.index)
        self.patchset("fetch", **self.offline)
        with mock.patch("shutil.disk_usage", return_value=usage._replace(free=10)):
            for command in (["dev", self.tmp / "d"], ["build", self.tmp / "d"]):
                self.refused(*command, says="free: make room there", **self.offline)


if __name__ == "__main__":
    unittest.main()
