"""How many threads a CPU server takes, and how they wait."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from sglang.srt.cpu_host import threads
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="unit")


class TestChooseThreads(CustomTestCase):
    def choose(self, argv=(), *, cores=8, busy=0.0, quota=float("inf"), preset=None):
        with (
            mock.patch.dict(os.environ, preset or {}, clear=True),
            mock.patch.object(os, "sched_getaffinity", return_value=set(range(cores))),
            mock.patch.object(threads, "_busy", return_value=busy),
            mock.patch.object(threads, "_quota", return_value=quota),
        ):
            threads.choose_threads(list(argv))
            return os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]

    def test_free_cores(self):
        self.assertEqual(self.choose(), ("8", "passive"))
        self.assertEqual(self.choose(busy=2.9), ("5", "passive"))
        self.assertEqual(self.choose(busy=8), ("1", "passive"))

    def test_a_quota_of_the_container_counts(self):
        self.assertEqual(self.choose(quota=2.5, busy=0.4), ("2", "passive"))
        self.assertEqual(self.choose(quota=0.5), ("1", "passive"))

    def test_ranks_share_them(self):
        self.assertEqual(self.choose(["--tp", "2", "--dp-size=2"]), ("2", "passive"))
        self.assertEqual(self.choose(["--tensor-parallel-size", "16"]), ("1", "passive"))

    def test_what_the_user_set_stays(self):
        preset = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}
        self.assertEqual(self.choose(preset=preset), ("3", "active"))

    def test_a_server_says_so_if_it_does_not_use_every_core(self):
        server = ["--model-path", "model"]
        with self.assertLogs(threads.logger, "INFO") as logged:
            self.choose(server, busy=3)
            self.choose(["serve", "model"], busy=3)
            self.choose(server)
            self.choose(["TARGET", "DRAFTER"], busy=3)  # of a tool
        levels = [record.levelname for record in logged.records]
        self.assertEqual(levels, ["WARNING", "WARNING", "INFO", "INFO"])
        self.assertIn("CPU threads per rank: 5 (ranks: 1)", logged.output[0])


class TestWhatIsRead(CustomTestCase):
    def file(self, text):
        written = tempfile.NamedTemporaryFile("w", delete=False)
        self.addCleanup(os.unlink, written.name)
        with written:
            written.write(text)
        return Path(written.name)

    def test_quota(self):
        for text, expected in (
            ("150000 100000\n", 1.5),
            ("max 100000\n", float("inf")),
            ("", float("inf")),
        ):
            with mock.patch.object(threads, "_QUOTA", self.file(text)):
                self.assertEqual(threads._quota(), expected)
        with mock.patch.object(threads, "_QUOTA", Path("/nonexistent")):
            self.assertEqual(threads._quota(), float("inf"))

    def test_busy_cores(self):
        """Core 0 works half of the time, core 1 waits for a disk, core 2 belongs to others, core 3 appears later."""
        before = self.file("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 0 100 0 0 0 0 7 0\ncpu1 0 0 0 50 5 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\n")  # fmt: skip
        after = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 15 5 0 110 0 0 0 0 17 0\ncpu1 0 0 0 55 10 0 0 0 0 0\ncpu2 50 0 0 0 0 0 0 0 0 0\ncpu3 1 0 0 0 0 0 0 0 0 0\n"  # fmt: skip
        with (
            mock.patch.object(threads, "_STATISTICS", before),
            mock.patch.object(threads.time, "sleep", lambda seconds: before.write_text(after)),
        ):
            self.assertEqual(threads._busy({0, 1, 3}), 0.5)

    def test_a_host_that_does_not_tell_is_idle(self):
        with mock.patch.object(threads, "_STATISTICS", Path("/nonexistent")):
            self.assertEqual(threads._busy({0, 1}), 0)


class TestImport(CustomTestCase):
    def test_torch_of_a_server_on_a_cpu_has_them(self):
        code = "import sglang, os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        }
        output = subprocess.run(
            [sys.executable, "-c", code, "--device", "cpu"],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        used, chosen, waiting = output.split()[-3:]
        self.assertEqual((used, waiting), (chosen, "passive"))


if __name__ == "__main__":
    unittest.main()
