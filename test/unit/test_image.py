"""The parts of the container image, without building one: entry point, pruning, CUDA layout, build record."""

import contextlib
import http.server
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from tools.errors import ToolError
from tools.image import build, cuda, info, native, prune
from tools.upstream import ROOT

register_cpu_ci(est_time=15, suite="unit")

ENTRYPOINT = ROOT / "docker" / "entrypoint.py"
spec = importlib.util.spec_from_file_location("entrypoint", ENTRYPOINT)
entrypoint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(entrypoint)

# A server: it says that it runs, finishes its work after SIGTERM, and ends with the status of its argument.
DRAINS = """
import signal, sys, time
def stop(*_):
    time.sleep(0.3)
    print("drained", flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


class Scratch(CustomTestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def write(self, path, text=""):
        path = self.folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


class TestArguments(Scratch):
    def test_setting_takes_the_last_flag_or_else_the_config_file(self):
        config = self.write("config.yaml", "model-path: /m\nhost: '10.0.0.5'  # inner\nport: 8000\n")
        cases = [
            (["--port", "1", "--port=2"], "port", "2"),
            (["--port"], "port", None),
            (["--config", str(config)], "port", "8000"),
            (["--config", str(config)], "host", "10.0.0.5"),
            (["--config", str(config)], "model-path", "/m"),
            (["--config", str(config), "--port", "9"], "port", "9"),
            (["--config", "/none.yaml"], "port", None),
            (["--portable", "3"], "port", None),
        ]
        for arguments, name, expected in cases:
            with self.subTest(arguments=arguments, name=name):
                self.assertEqual(entrypoint.setting(name, arguments), expected)

    def test_serves_on_all_interfaces_unless_told_otherwise(self):
        config = self.write("config.yaml", "host: 10.0.0.5\n")
        command = entrypoint.server_command(["--model-path", "m"])
        self.assertEqual(
            command[1:], ["-m", "sglang.launch_server", "--host", "0.0.0.0", "--model-path", "m"]
        )
        for given in (["--host", "::"], ["--host=::"], ["--config", str(config)]):
            self.assertNotIn("0.0.0.0", entrypoint.server_command(given))

    def test_the_images_own_model_is_used_only_if_none_is_named(self):
        with mock.patch.dict(os.environ, {"SGLANG_IMAGE_MODEL_ARGS": "--model-path /models/demo --x 'a b'"}):
            self.assertEqual(
                entrypoint.server_command(["--port", "5"])[3:],
                ["--model-path", "/models/demo", "--x", "a b", "--host", "0.0.0.0", "--port", "5"],
            )
            for given in (["--model-path", "m"], ["--model=m"], ["--help"]):
                self.assertNotIn("/models/demo", entrypoint.server_command(given))

    def test_caches_are_under_the_build_id_unless_the_user_chose(self):
        with (
            mock.patch.object(entrypoint, "BUILD", self.write("build.json", '{"build_id": "abc"}')),
            mock.patch.object(entrypoint, "CACHE", Path("/cache")),
        ):
            values = entrypoint.cache_environment({"HOME": "/", "TRITON_CACHE_DIR": "/mine", "HF_TOKEN": "t"})
        self.assertEqual(values["TRITON_CACHE_DIR"], "/mine")
        self.assertEqual(values["HF_TOKEN"], "t")
        self.assertEqual(values["HOME"], "/cache/abc/home")
        self.assertEqual(values["FLASHINFER_WORKSPACE_BASE"], "/cache/abc/flashinfer")
        self.assertEqual(values["HF_HOME"], "/cache/huggingface")
        placed = set(entrypoint.BUILD_CACHES) - {"TRITON_CACHE_DIR"}
        self.assertTrue(all(values[name].startswith("/cache/abc/") for name in placed))

    def test_every_cache_that_upstream_names_is_set(self):
        import sglang.srt.environ as environ

        self.assertLessEqual(set(environ.third_party_cache_defaults()), set(entrypoint.BUILD_CACHES))


class TestSupervise(Scratch):
    def stop(self, program, *arguments, wait_for=b"ready"):
        """Run `program` under the entry point's supervise() and send SIGTERM; return (status, output)."""
        script = self.write("server.py", program)
        runner = (
            "import importlib.util as u, os, sys; s = u.spec_from_file_location('e', sys.argv[1]); "
            "e = u.module_from_spec(s); s.loader.exec_module(e); "
            "sys.exit(e.supervise([sys.executable, *sys.argv[2:]], dict(os.environ)))"
        )
        command = [sys.executable, "-c", runner, ENTRYPOINT, script, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.assertIn(wait_for, process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read().decode()
        return process.wait(20), rest

    def test_drains_and_ends_with_0(self):
        self.assertEqual(self.stop(DRAINS, "0"), (0, "drained\n"))

    def test_a_failed_drain_is_not_hidden(self):
        self.assertEqual(self.stop(DRAINS, "3")[0], 3)

    def test_a_server_without_a_handler_yet_ends_with_0(self):
        self.assertEqual(self.stop("import time; print('ready', flush=True); time.sleep(60)")[0], 0)

    def test_other_deaths_keep_their_status(self):
        for program, expected in (("raise SystemExit(4)", 4), ("import os; os.kill(os.getpid(), 9)", 137)):
            script = self.write("dies.py", program)
            old = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
            try:
                self.assertEqual(
                    entrypoint.supervise([sys.executable, str(script)], dict(os.environ)), expected
                )
            finally:
                for signum, handler in zip((signal.SIGTERM, signal.SIGINT), old):
                    signal.signal(signum, handler)

    def test_an_unknown_command_says_what_was_expected(self):
        done = subprocess.run([sys.executable, ENTRYPOINT, "no-such"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 127)
        self.assertIn("no-such: No such file or directory; expected serve, check-env", done.stderr)


class TestHealth(Scratch):
    def process(self, *words):
        (self.folder / "proc" / "7").mkdir(parents=True)
        (self.folder / "proc" / "7" / "cmdline").write_bytes(b"\0".join(w.encode() for w in words) + b"\0")
        patcher = mock.patch.object(entrypoint, "PROC", self.folder / "proc")
        patcher.start()
        self.addCleanup(patcher.stop)

    def health(self):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            return entrypoint.health(), errors.getvalue()

    def test_asks_the_bound_address(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/health" else 404)
                self.end_headers()

            def log_message(self, *_):
                pass

        # Not at 127.0.0.1, where a probe of the loopback address would find it.
        server = http.server.HTTPServer(("127.0.0.2", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_address[1])
        self.process("python", "-m", "sglang.launch_server", "--host", "127.0.0.2", f"--port={port}")
        self.assertEqual(self.health(), (0, ""))
        server.shutdown()
        server.server_close()
        status, errors = self.health()
        self.assertEqual(status, 1)
        self.assertIn(f"http://127.0.0.2:{port}/health", errors)

    def test_no_server_is_not_healthy(self):
        self.process("python", "-m", "something.else", "--port", "1")
        status, errors = self.health()
        self.assertEqual(status, 1)
        self.assertIn("no SGLang server", errors)

    def test_finds_each_way_to_start_one(self):
        for words in (
            ["sglang", "serve", "--port", "5"],
            ["python", "-m", "sglang.launch_server", "--port", "5"],
        ):
            self.process(*words)
            self.assertEqual(entrypoint.running_server(), ["--port", "5"])
            (self.folder / "proc/7/cmdline").unlink()
            (self.folder / "proc/7").rmdir()

    def test_url(self):
        for arguments, expected in (
            ([], "http://127.0.0.1:30000/health"),
            (["--host", "0.0.0.0", "--port", "8"], "http://127.0.0.1:8/health"),
            (["--host", "::"], "http://[::1]:30000/health"),
            (["--host", "10.0.0.5", "--ssl-certfile", "c"], "https://10.0.0.5:30000/health"),
        ):
            self.assertEqual(entrypoint.health_url(arguments), expected)


class TestPrune(Scratch):
    def setUp(self):
        super().setUp()
        self.write("pack/big.so", "x" * 1000)
        self.write("pack/user.py", "import pack.big")
        self.write("pack/other.py", "pass")
        self.rule = {
            "paths": ["pack/big.so"],
            "names": ["pack.big"],
            "importers": ["pack/user.py"],
            "why": "w",
        }

    def test_removes_and_reports(self):
        record, links = prune.prune(self.folder, {"remove": [self.rule]})
        self.assertFalse((self.folder / "pack/big.so").exists())
        self.assertEqual((links["verb"], links["bytes"]), ("link", 0))
        self.assertEqual((record["verb"], record["bytes"], record["why"]), ("remove", 1000, "w"))

    def refused(self, **changes):
        with self.assertRaises(ToolError) as caught:
            prune.prune(self.folder, {"remove": [self.rule | changes]})
        self.assertTrue((self.folder / "pack/big.so").exists(), "refused, but something is gone")
        return str(caught.exception)

    def test_an_importer_that_is_not_listed_stops_it(self):
        self.assertIn("pack/user.py names pack.big", self.refused(importers=[]))

    def test_a_library_that_links_to_it_is_an_importer(self):
        self.write("pack/linked.so.1", "\0NEEDED pack.big\0")
        self.assertIn("pack/linked.so.1 names pack.big", self.refused())

    def test_a_listed_file_that_is_not_an_importer_stops_it(self):
        self.assertIn(
            "pack/other.py no longer names", self.refused(importers=["pack/user.py", "pack/other.py"])
        )

    def test_a_pattern_that_matches_nothing_stops_it(self):
        self.assertIn("pack/gone.so", self.refused(paths=["pack/big.so", "pack/gone.so"]))

    def test_a_file_that_goes_may_name_itself(self):
        self.write("pack/inner/again.py", "pack.big")
        prune.prune(self.folder, {"remove": [self.rule | {"paths": ["pack/big.so", "pack/inner"]}]})
        self.assertFalse((self.folder / "pack/inner").exists())

    def test_copies_become_one_file(self):
        first, second = self.write("a/lib.so", "x" * 5000), self.write("b/lib.so.1", "x" * 5000)
        other, program = self.write("c/lib.so", "y" * 5000), self.write("d/tool", "x" * 5000)
        program.chmod(0o755)
        record = prune.link_copies(self.folder)
        self.assertEqual((record["bytes"], record["paths"]), (5000, ["1 copies of other files"]))
        self.assertTrue(first.samefile(second))
        self.assertFalse(first.samefile(program), "its mode would be lost")
        self.assertEqual(other.read_text(), "y" * 5000)

    def test_the_list_has_a_reason_for_each_rule(self):
        import tomllib

        for verb, rules in tomllib.loads((ROOT / "docker/prune.toml").read_text()).items():
            for rule in rules:
                self.assertTrue(rule["paths"])
                if verb == "remove":
                    self.assertTrue(rule["names"] and rule["why"])


class TestParts(Scratch):
    def test_driver_functions_are_those_of_the_header(self):
        header = """
            #define cuMemAlloc                          cuMemAlloc_v2
            #define CUDA_VERSION 13000
            CUresult CUDAAPI cuInit(unsigned int Flags);
            CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
            typedef void (CUDA_CB *CUhostFn)(void *userData);
        """
        self.assertEqual(cuda.driver_functions(header), ["cuInit", "cuMemAlloc", "cuMemAlloc_v2"])

    def test_a_toolkit_of_wheels_is_completed_once(self):
        self.write("include/cuda.h", "CUresult CUDAAPI cuInit(unsigned int Flags);")
        self.write("lib/libcudart.so.13")
        for _ in range(2):
            cuda.complete(self.folder)
        self.assertEqual(os.readlink(self.folder / "lib64"), "lib")
        self.assertEqual(os.readlink(self.folder / "lib/libcudart.so"), "libcudart.so.13")
        main = self.write("main.c", "int cuInit(unsigned); int main(void) { return cuInit(0); }")
        program = self.folder / "main"
        subprocess.run(["cc", main, "-o", program, f"-L{self.folder}/lib64/stubs", "-lcuda"], check=True)
        # It links under the driver's own name and returns the error of a stub.
        (self.folder / "libcuda.so.1").symlink_to("lib/stubs/libcuda.so")
        done = subprocess.run([program], env={"LD_LIBRARY_PATH": str(self.folder)})
        self.assertEqual(done.returncode, cuda.CUDA_ERROR_STUB_LIBRARY)

    def test_one_package_of_a_lock(self):
        lock = self.write("x.lock", "a==1 \\\n    --hash=sha256:1\ntorch==2 \\\n    --hash=sha256:2\nz==3\n")
        self.assertEqual(native.locked(lock, "torch"), "torch==2 \\\n    --hash=sha256:2\n")
        with self.assertRaisesRegex(ToolError, "x.lock: expected a pin of tor, found none"):
            native.locked(lock, "tor")

    def test_the_build_id_follows_target_and_architectures(self):
        records = [
            info.build_info(*arguments) for arguments in (("cpu",), ("cuda", "9.0"), ("cuda", "12.0f"))
        ]
        self.assertEqual(len({record["build_id"] for record in records}), 3)
        self.assertEqual(len({record["patchset"] for record in records}), 1)
        self.assertRegex(records[0]["build_id"], "^[0-9a-f]{12}$")

    def test_the_mirror_is_that_of_the_host(self):
        with self.assertRaises(ToolError):
            build.mirror(self.folder)
        self.write("sources.list", "deb [arch=amd64] http://mirror.example/debian bookworm main\n")
        self.assertEqual(build.mirror(self.folder), "http://mirror.example/debian")
        self.write(
            "sources.list.d/debian.sources", "Types: deb\nURIs: http://other.example/debian\nSuites: x\n"
        )
        self.assertEqual(build.mirror(self.folder), "http://other.example/debian")

    def test_a_missing_tool_is_named_with_its_package(self):
        with mock.patch.object(
            build.shutil, "which", lambda name: None if name == "debootstrap" else "/bin/x"
        ):
            with self.assertRaises(ToolError) as caught:
                build.check_host("cpu", self.folder)
        self.assertIn("apt-get install --no-install-recommends debootstrap", str(caught.exception))

    def test_the_kernels_stage_has_the_tools_that_it_runs(self):
        stages = (ROOT / "docker/Dockerfile").read_text().partition(" AS cpu-kernels")[0]
        copied = re.findall(r"(?m)^COPY (tools/.*) \S+$", stages)
        for name in " ".join(copied).split():
            self.write(name, (ROOT / name).read_text())
        done = subprocess.run(
            [sys.executable, "-c", "import tools.image.native"],
            cwd=self.folder,
            env={},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_dockerfile_declares_what_the_build_passes(self):
        text = (ROOT / "docker/Dockerfile").read_text()
        for name in ("VERSION", "UPSTREAM", "PATCHSET", "BUILD_ID", "REVISION", "CREATED"):
            self.assertEqual(text.count(f"ARG {name}="), 2, name)
        self.assertEqual(text.count(f'ARG CUDA_ARCHITECTURES="{build.ARCHITECTURES["cuda"]}"'), 2)


if __name__ == "__main__":
    unittest.main()
