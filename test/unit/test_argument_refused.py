"""A server that refuses an argument ends with one line. Other errors keep their traceback."""

import contextlib
import io
import subprocess
import sys
import unittest
from unittest import mock

from sglang.srt.arg_groups.argument_refused import ArgumentRefused, show_refusals_without_traceback
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")


def run_server(error: Exception) -> None:
    """Stand in for the function of this name through which upstream's command line starts a server."""
    raise error


def start_engine(error: Exception) -> None:
    raise error


class TestShowRefusals(CustomTestCase):
    def shown(self, start, error):
        """What an uncaught error prints, and whether Python's own hook was called."""
        python = mock.Mock()
        with mock.patch.object(sys, "excepthook", python):
            show_refusals_without_traceback.__wrapped__()
            try:
                start(error)
            except type(error):
                with contextlib.redirect_stderr(io.StringIO()) as printed:
                    sys.excepthook(*sys.exc_info())
        return printed.getvalue(), python.called

    def test_a_refusal_of_the_server_is_one_line(self):
        self.assertEqual(
            self.shown(run_server, ArgumentRefused("--x: expected 1, got 2.")),
            ("error: --x: expected 1, got 2.\n", False),
        )

    def test_another_error_keeps_its_traceback(self):
        self.assertEqual(self.shown(run_server, ValueError("a fault")), ("", True))

    def test_a_refusal_of_an_engine_keeps_its_traceback(self):
        self.assertEqual(self.shown(start_engine, ArgumentRefused("--x")), ("", True))

    def test_upstreams_command_line(self):
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/m"]
        ran = subprocess.run(
            [*command, "--speculative-algorithm", "DDTREE"], capture_output=True, text=True, timeout=300
        )
        self.assertEqual(ran.returncode, 1)
        self.assertIn("error: DDTREE: --speculative-draft-model-path: expected", ran.stderr.splitlines()[-1])
        self.assertNotIn("Traceback", ran.stderr)


if __name__ == "__main__":
    unittest.main()
