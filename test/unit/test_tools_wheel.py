"""The wheel that `pip install .` builds: upstream's files, ours, nothing else, the same bytes each time."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from support.tools_case import ROOT, ToolsCase, register_cpu_ci

from tools import build_wheel, distinfo
from tools.series import Series, module_path
from tools.symbols import changed
from tools.upstream import Pins, Release

register_cpu_ci(est_time=60, suite="unit")


class TestOfSmallCheckout(ToolsCase):
    METADATA = "sglang-0.5.23+ddtree.1.dist-info/METADATA"

    @property
    def pins(self) -> Pins:
        return Pins.load(self.root)

    def write_cpu_requirements(self) -> None:
        self.write("requirements/torch-cpu.lock", "# by hand\ntorch==2.0.1+cpu \\\n    --hash=sha256:0\n")
        self.write("requirements/cpu.in", "# What\nfirst==1.0\nsecond==2.0  # pinned\n")

    def build(self, folder: str = "dist") -> zipfile.ZipFile:
        path = self.patchset("build", self.tmp / folder).strip()
        return zipfile.ZipFile(path)

    def entry_points(self) -> str:
        with self.build() as wheel:
            return wheel.read("sglang-0.5.23+ddtree.1.dist-info/entry_points.txt").decode()

    def test_metadata_is_upstreams_with_our_version_and_licences(self):
        with self.build() as wheel:
            text = wheel.read(self.METADATA).decode()
        meta = email.message_from_string(text)
        self.assertEqual(meta["Version"], "0.5.23+ddtree.1")
        self.assertEqual(
            meta.get_all("Requires-Dist"),
            ["torch", "sglang-kernel==0.4.10", 'extra-package; extra == "more"'],
        )
        self.assertEqual(meta.get_all("License-File"), ["LICENSE", "LICENSE-ddtree", "NOTICE"])
        self.assertEqual(meta.get_payload(), "Version: 1 is what the description says\n")

    def test_metadata_of_the_cpu_profile_states_what_it_installs(self):
        self.write_cpu_requirements()
        info = distinfo.files(self.pins, self.series, self.upstream, "cpu")
        meta = email.message_from_bytes(info[self.METADATA])
        self.assertEqual(
            meta.get_all("Requires-Dist"),
            [
                'extra-package; extra == "more"',
                "torch==2.0.1",
                "sglang-kernel==0.4.10",
                "first==1.0",
                "second==2.0",
            ],
        )
        self.assertEqual(meta["Version"], "0.5.23+ddtree.1")
        self.assertEqual(meta.get_payload(), "Version: 1 is what the description says\n")

    def test_an_unknown_profile_is_refused(self):
        with mock.patch("sys.stderr", new_callable=io.StringIO) as said, self.assertRaises(SystemExit):
            build_wheel.build_wheel(str(self.tmp), {"profile": "tpu"})
        self.assertEqual(said.getvalue(), "error: profile: expected cpu or cuda, got tpu.\n")

    def test_notice_names_what_was_changed(self):
        self.add()
        with self.build() as wheel:
            notice = wheel.read("sglang-0.5.23+ddtree.1.dist-info/licenses/NOTICE").decode()
        self.assertIn("\n  sglang/srt/engine.py: cpu/count-starts.patch\n", notice)

    def test_entry_point_comes_with_its_module(self):
        self.assertEqual(
            self.entry_points().split(), ["[console_scripts]", "sglang", "=", "sglang.engine:Main.run"]
        )
        self.write("python/sglang/srt/speculative/ddtree/plugin.py", "def register(): pass\n")
        self.assertIn(
            "[sglang.srt.plugins]\nddtree = sglang.srt.speculative.ddtree.plugin:register\n",
            self.entry_points(),
        )

    def test_modes_and_our_files(self):
        self.add()
        self.write("python/sglang/srt/__pycache__/ours.pyc", "")
        with self.build() as wheel:
            modes = {i.filename: (i.external_attr >> 16) & 0o777 for i in wheel.infolist()}
        self.assertEqual(modes["sglang/srt/engine.py"], 0o755)
        self.assertEqual(modes["sglang/srt/ours.py"], 0o644)
        self.assertFalse([name for name in modes if "__pycache__" in name])

    def test_same_bytes_wherever_and_whenever(self):
        self.add()
        one = Path(self.build("a").filename).read_bytes()
        for path in (self.root / "python").rglob("*.py"):
            path.chmod(0o600)
            path.touch()
        self.assertEqual(Path(self.build("b").filename).read_bytes(), one)

    def test_sdist_builds_the_same_wheel(self):
        self.add()
        self.write("README.md", "")
        self.write_cpu_requirements()
        settings = {"cache": str(self.cache), "profile": "cpu"}  # needs requirements/ in the sdist
        hook = f"from tools import build_wheel as b; b.build_sdist('.'); b.build_wheel('.', {settings})"
        subprocess.run([sys.executable, "-c", hook], cwd=self.root, check=True)
        sdist = self.root / "sglang-0.5.23+ddtree.1.tar.gz"
        with tarfile.open(sdist) as tar:
            tar.extractall(self.tmp / "unpacked")
        unpacked = self.tmp / "unpacked/sglang-0.5.23+ddtree.1"
        subprocess.run([sys.executable, "-c", hook], cwd=unpacked, check=True)
        for pattern in ("*.whl", "*.tar.gz"):
            ours, theirs = next(self.root.glob(pattern)), next(unpacked.glob(pattern))
            self.assertEqual(ours.name, theirs.name)
            if pattern == "*.whl":
                self.assertEqual(ours.read_bytes(), theirs.read_bytes())

    def test_pip_is_asked_for_only_to_download(self):
        settings = {"cache": str(self.tmp / "empty")}
        with mock.patch("importlib.util.find_spec", return_value=None):
            self.assertEqual(build_wheel.get_requires_for_build_wheel(settings), ["pip"])
            with mock.patch.object(Path, "exists", return_value=True):
                self.assertEqual(build_wheel.get_requires_for_build_wheel(settings), [])


class TestReal(unittest.TestCase):
    """The wheel of this checkout, built twice by pip like a user would, and installed."""

    @classmethod
    def setUpClass(cls):
        tmp = tempfile.TemporaryDirectory(prefix="ddtree-test-")
        cls.addClassCleanup(tmp.cleanup)
        cls.tmp = Path(tmp.name)
        cls.pins, cls.series = Pins.load(), Series()
        cls.upstream = Release.get(cls.pins)
        for folder in ("one", "two"):
            cls.pip("wheel", "--wheel-dir", str(cls.tmp / folder), str(ROOT))
        cls.path = next((cls.tmp / "one").iterdir())
        cls.wheel = zipfile.ZipFile(cls.path)
        cls.addClassCleanup(cls.wheel.close)
        cls.names = {i.filename for i in cls.wheel.infolist()}
        cls.info = f"sglang-{cls.pins.version}.dist-info"

    @staticmethod
    def pip(command: str, *args: str) -> None:
        options = ["--quiet", "--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", command, *options, *args], capture_output=True, text=True
        )
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr)

    def test_twice_the_same_bytes(self):
        two = next((self.tmp / "two").iterdir())
        self.assertEqual(self.path.name, two.name)
        self.assertTrue(self.path.read_bytes() == two.read_bytes(), "the two wheels differ")

    def test_record(self):
        rows = list(csv.reader(io.StringIO(self.wheel.read(f"{self.info}/RECORD").decode())))
        self.assertEqual({name for name, _, _ in rows}, self.names)
        self.assertEqual(len(rows), len(self.names))
        for name, digest, size in rows:
            if name == f"{self.info}/RECORD":
                self.assertEqual((digest, size), ("", ""))
                continue
            data = self.wheel.read(name)
            want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            self.assertEqual((digest, size), (f"sha256={want}", str(len(data))), name)

    def test_changes_nothing_but_what_the_patches_claim(self):
        # With our features off (docs/design.md), only the added lines remain, in these files and functions.
        inside = {n for n in self.names if not n.startswith(self.info)}
        theirs = {n for n in self.upstream.entries if not n.startswith(self.upstream.dist_info)}
        self.assertEqual(theirs - inside, set())
        self.assertEqual(inside - theirs, set(self.series.overlay))
        differ = {n for n in theirs if self.wheel.read(n) != self.upstream.read(n)}
        claims = [
            (module_path(m, self.upstream.__contains__), name)
            for p in self.series.patches
            for m, name in p.seams
        ]
        self.assertEqual(differ, {path for path, _ in claims})
        actual = {(n, s) for n in differ for s in changed(self.upstream.read(n), self.wheel.read(n))}
        self.assertEqual(actual, set(claims))

    def test_every_upstream_line_is_still_there_in_order(self):
        for name in self.series.touched:
            ours = iter(self.wheel.read(name).split(b"\n"))
            for line in self.upstream.read(name).split(b"\n"):
                self.assertTrue(any(line == other for other in ours), f"{name} has lost {line!r}")

    def test_metadata(self):
        def fields(data: bytes) -> list[tuple[str, str]]:
            found = email.message_from_bytes(data).items()
            return [(k, v) for k, v in found if k not in ("Version", "License-File")]

        theirs = self.upstream.read(f"{self.upstream.dist_info}/METADATA")
        ours = self.wheel.read(f"{self.info}/METADATA")
        self.assertEqual(fields(ours), fields(theirs))
        self.assertIn(f"\nVersion: {self.pins.version}\n".encode(), ours)
        for name in email.message_from_bytes(ours).get_all("License-File"):
            self.assertIn(f"{self.info}/licenses/{name}", self.names)
        text = self.wheel.read(f"{self.info}/entry_points.txt")
        self.assertIn(b"sglang = sglang.cli.main:main", text)

    def test_installs(self):
        site = self.tmp / "site"
        self.pip("install", "--no-compile", "--target", str(site), str(self.path))
        code = "import importlib.metadata as m; d = m.distribution('sglang'); "
        code += (
            "print(d.version, len(d.files), all(f.locate().exists() for f in d.files if '..' not in str(f)))"
        )
        environ = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        version, count, complete = done.stdout.split()
        self.assertEqual((version, complete), (self.pins.version, "True"))
        self.assertGreaterEqual(int(count), len(self.names))


if __name__ == "__main__":
    unittest.main()
