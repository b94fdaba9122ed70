"""Builds the cpu image from scratch, without a Docker engine, and serves from it like a deployment would.

The first container is locked down: read-only, no capabilities, an arbitrary uid. The second one may write
anywhere, and the test lists what it wrote.
"""

import json
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from tools.image.build import Store, build, ca_bundle, size
from tools.serve import QUESTION
from tools.upstream import ROOT, Pins

register_cpu_ci(est_time=900, suite="image")

MODEL = "SmolLM2-135M-Instruct"
START_SECONDS = 600
GRACE_SECONDS = 240  # a busy machine answers slowly; an idle server ends at once
MAX_BYTES = 5e9  # of the image, unpacked
LOCKED = ["--read-only", "--cap-drop=all", "--security-opt", "no-new-privileges", "--user", "123456"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestCpuImage(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.store = Store(ROOT / "build" / "image-test")
        cls.store.remove()
        cls.addClassCleanup(cls.store.remove)
        cls.store = Store(cls.store.folder)
        cls.image = build("cpu", cls.store)
        cls.mount = Path(cls.store.text("podman", "image", "mount", cls.image))
        cls.inspected = json.loads(cls.store.text("podman", "image", "inspect", cls.image))[0]

    def start(self, name, *options):
        """Start the server in a container and wait until it is healthy; return its port and its cache."""
        port = free_port()
        cache = Path(tempfile.mkdtemp(dir=self.store.folder))
        cache.chmod(0o2770)  # group 0 may write, as in a volume that is made from the image
        self.run_detached(name, *options, "-v", f"{cache}:/cache", self.image, "serve", "--port", str(port))
        self.addCleanup(self.store.run, "podman", "rm", "-f", name, check=False, capture_output=True)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.healthy(name):
                return port, cache
            if self.store.text("podman", "inspect", "--format", "{{.State.Running}}", name) != "true":
                break
            time.sleep(3)
        self.fail(f"the server did not start:\n{self.logs(name)[-4000:]}")

    def run_detached(self, name, *arguments):
        self.store.run("podman", "run", "-d", "--name", name, *arguments, stdout=subprocess.DEVNULL)

    def healthy(self, name):
        done = self.store.run("podman", "healthcheck", "run", name, check=False, capture_output=True)
        return done.returncode == 0

    def logs(self, name):
        done = self.store.run("podman", "logs", name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout

    def execute(self, name, *command):
        done = self.store.run("podman", "exec", name, *command, check=False, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    def ask(self, port, **further):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 48,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body | further).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=240)

    def test_serves_locked_down_and_drains(self):
        port, cache = self.start("locked", *LOCKED, "--tmpfs", "/tmp:exec")

        with self.ask(port) as response:
            answer = json.load(response)
        text = answer["choices"][0]["message"]["content"]
        self.assertIn("def ", text)
        self.assertIn("fib", text.lower())
        self.assertIn("DDTREE", self.logs("locked"))

        status, report, errors = self.execute("locked", "sglang-image", "check-env", "--json")
        self.assertEqual(status, 0, report + errors)
        report = json.loads(report)
        rows = {row["check"]: row["status"] for row in report["rows"]}
        self.assertEqual({rows["versions"], rows["caches"], rows["sbom"], rows["imports"]}, {"ok"}, report)
        self.assertEqual(report["build"]["version"], Pins.load().version)

        status, out, _ = self.execute("locked", "id", "-u")
        self.assertEqual(out.strip(), "123456")
        status, _, errors = self.execute("locked", "touch", "/opt/venv/probe")
        self.assertNotEqual(status, 0)

        # Every cache is in the folder of this build. Only downloads would be next to it.
        build_id = report["build"]["build_id"]
        self.assertEqual({p.name for p in cache.iterdir()} - {"huggingface", "modelscope"}, {build_id})

        # The container is stopped while it streams an answer. It finishes the answer and ends with status 0.
        first, rest = threading.Event(), []

        def read():
            with self.ask(port, stream=True, max_tokens=64, ignore_eos=True) as response:
                for line in response:
                    if line.strip():
                        rest.append(line.decode().strip())
                        first.set()

        reader = threading.Thread(target=read)
        reader.start()
        self.assertTrue(first.wait(120), "no token came")
        self.store.run("podman", "stop", "-t", GRACE_SECONDS, "locked", capture_output=True)
        reader.join(30)
        self.assertEqual(rest[-1:], ["data: [DONE]"])
        state = json.loads(self.store.text("podman", "inspect", "locked"))[0]["State"]
        self.assertEqual(state["ExitCode"], 0, self.logs("locked")[-3000:])
        self.assertFalse(self.healthy("locked"))

    def test_writes_only_to_cache_and_tmp(self):
        port, _ = self.start("free")
        with self.ask(port, max_tokens=8) as response:
            self.assertEqual(json.load(response)["model"], MODEL)
        self.store.run("podman", "stop", "-t", GRACE_SECONDS, "free", capture_output=True)
        # podman itself makes mount points and files such as /etc/resolv.conf. An idle container shows which.
        self.run_detached(
            "idle", "-v", f"{tempfile.mkdtemp(dir=self.store.folder)}:/cache", self.image, "true"
        )
        self.addCleanup(self.store.run, "podman", "rm", "-f", "idle", check=False, capture_output=True)
        self.store.run("podman", "wait", "idle", capture_output=True)
        changed, expected = (
            {line.split(" ", 1)[1] for line in self.store.text("podman", "diff", name).splitlines()}
            for name in ("free", "idle")
        )
        written = {p for p in changed - expected if p != "/tmp" and not p.startswith(("/tmp/", "/cache"))}
        self.assertEqual(written, set())

    def test_commands_and_errors(self):
        def run(*command):
            done = self.store.run(
                "podman", "run", "--rm", *LOCKED, "--tmpfs", "/tmp", "--tmpfs", "/cache", self.image, *command,
                check=False, capture_output=True,
            )  # fmt: skip
            return done.returncode, done.stdout, done.stderr

        status, out, _ = run("python", "-c", "import os; print(os.environ['TRITON_CACHE_DIR'], os.getgid())")
        self.assertEqual(status, 0)
        self.assertRegex(out, r"^/cache/[0-9a-f]{12}/triton 0$")
        status, _, errors = run("no-such-command")
        self.assertEqual(status, 127)
        self.assertIn("expected serve, check-env", errors)
        status, _, errors = run("health")
        self.assertEqual(status, 1)
        self.assertIn("no SGLang server", errors)

    def test_configuration_and_labels(self):
        config = self.inspected["Config"]
        self.assertEqual(config["User"], "10001:0")
        self.assertEqual(config["Volumes"], {"/cache": {}})
        self.assertEqual(config["StopSignal"], "SIGTERM")
        self.assertIn("30000/tcp", config["ExposedPorts"])
        health = self.inspected["Healthcheck"]
        self.assertGreaterEqual(health["StartPeriod"], 600 * 10**9)
        labels = self.inspected["Labels"]
        record = json.loads((self.mount / "usr/share/sglang/build.json").read_text())
        self.assertEqual(labels["io.sglang.upstream.version"], Pins.load().sglang)
        self.assertEqual(labels["io.sglang.patchset.sha256"], record["patchset"])
        self.assertEqual(labels["io.sglang.build-id"], record["build_id"])
        self.assertFalse(any(name.startswith("NCCL_") for name in config["Env"]))
        self.assertLess(size(self.store, self.image), MAX_BYTES)

    def test_nothing_of_the_build_is_left(self):
        for path in (
            "run/secrets",
            "build",
            "kernels",
            "torch-cpu",
            "opt/tools",
            "opt/.uv-cache",
            "root/.cache",
        ):
            folder = self.mount / path
            self.assertFalse(folder.exists() and any(folder.iterdir()), path)
        # The image has none of the certificates that the build got, except those that are Debian's own.
        bundle = ca_bundle()
        if bundle is None:
            return
        debian = (self.mount / "etc/ssl/certs/ca-certificates.crt").read_text()
        lines = {line for line in bundle.read_text().splitlines() if len(line) == 64} - set(
            debian.splitlines()
        )
        if not lines:
            return
        needles = Path(tempfile.mkdtemp(dir=self.store.folder), "lines")
        needles.write_text("\n".join(sorted(lines)[:200]) + "\n")
        done = subprocess.run(
            ["grep", "-rlF", "--binary-files=text", "-f", needles, "--include=*.pem", "--include=*.crt",
             "--include=*.cert", "--include=*.json", "--include=*.conf", "--include=*.txt", self.mount],
            capture_output=True, text=True,
        )  # fmt: skip
        certifi = [line for line in done.stdout.splitlines() if not line.endswith("certifi/cacert.pem")]
        self.assertEqual(certifi, [])


if __name__ == "__main__":
    unittest.main()
