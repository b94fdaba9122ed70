"""The suite runner: it counts, collects, and runs upstream's test files against the installed package."""

import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import unittest
from pathlib import Path
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "test" / "run_suite.py"
spec = importlib.util.spec_from_file_location("run_suite", SCRIPT)
run_suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_suite)

REGISTERED = 'register_cpu_ci(est_time=1, suite="unit")\nif __name__ == "__main__":\n    unittest.main()\n'


class TestCheck(CustomTestCase):
    """`make test` checks SUITE before it makes an environment, so this must work without one."""

    def check(self, suite):
        command = [sys.executable, "-S", str(SCRIPT), "--check", "--suite", suite]
        ran = subprocess.run(command, capture_output=True, text=True)
        return ran.returncode, ran.stderr

    def test_a_suite(self):
        for suite in ("default", "unit"):
            self.assertEqual(self.check(suite), (0, ""))

    def test_an_unknown_suite(self):
        expected = "error: --suite: expected default or one of unit, kernel, e2e, gpu, image, got units\n"
        self.assertEqual(self.check("units"), (2, expected))


class TestTally(CustomTestCase):
    def count(self, *runs):
        tally = run_suite.Tally()
        for closing, status in runs:
            tally.add(f"...\n{closing}\n", status, "label")
        return tally["passed"], tally["failed"], tally["skipped"]

    def test_runs_are_added_up(self):
        runs = (("3 passed, 1 skipped in 2.00s", 0), ("1 failed, 2 passed, 2 errors in 1.00s", 1))
        self.assertEqual(self.count(*runs), (5, 3, 1))

    def test_a_warning_after_the_count_does_not_hide_it(self):
        late = "sys:1: DeprecationWarning: builtin type swigvarlink has no __module__ attribute"
        self.assertEqual(
            self.count((f"2 failed, 3 passed, 18 warnings in 86.30s (0:01:26)\n{late}", 1)), (3, 2, 0)
        )
        self.assertEqual(
            self.count((f"=== 3 passed, 1 warning, 4 subtests passed in 1.30s ===\n{late}", 0)), (3, 0, 0)
        )

    def test_a_crash_and_an_empty_run_are_failures(self):
        self.assertEqual(self.count(("Segmentation fault", -11)), (0, 1, 0))
        self.assertEqual(self.count(("no tests ran in 0.01s", 5)), (0, 1, 0))
        self.assertEqual(self.count(("no tests ran in 0.01s", 0)), (0, 1, 0))


class TestEnvironment(CustomTestCase):
    def test_tests_and_their_processes_find_the_shared_folders(self):
        configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
            "pythonpath"
        ]
        self.assertEqual([ROOT / folder for folder in configured], list(run_suite.SHARED))
        code = "import support.tools_case, tools.upstream"
        done = subprocess.run(
            [sys.executable, "-c", code], env=run_suite.environment(), cwd="/", capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)


class TestCollect(CustomTestCase):
    def collect(self, text):
        with tempfile.TemporaryDirectory() as root, mock.patch.object(run_suite, "ROOT", Path(root)):
            file = Path(root, "test", "unit", "test_sample.py")
            file.parent.mkdir(parents=True)
            file.write_text(text)
            return run_suite.collect()

    def test_registered_file(self):
        self.assertEqual([path.name for path, _ in self.collect(REGISTERED)["unit"]], ["test_sample.py"])

    def test_what_would_hide_a_failure_is_refused(self):
        with self.assertRaisesRegex(ValueError, "No CI registry found in .*test_sample.py"):
            self.collect("import unittest\n")
        with self.assertRaisesRegex(ValueError, "missing `if __name__"):
            self.collect(REGISTERED.partition("\n")[0])
        with self.assertRaisesRegex(ValueError, "suite: expected one of unit, .*, got units"):
            self.collect(REGISTERED.replace('"unit"', '"units"'))
        with self.assertRaisesRegex(ValueError, "disabled tests hide failures"):
            self.collect(REGISTERED.replace('"unit"', '"unit", disabled="flaky"'))


class TestUpstreamFile(CustomTestCase):
    def run_file(self, text, *arguments):
        with tempfile.TemporaryDirectory() as checkout:
            # The package of a checkout around the test must not be taken for the installed one.
            Path(checkout, "sglang").mkdir()
            Path(checkout, "sglang", "__init__.py").write_text(
                "raise AssertionError('not the installed package')"
            )
            file = Path(checkout, "test_sample.py")
            file.write_text(textwrap.dedent(text))
            command = [sys.executable, SCRIPT, "--upstream", file, *arguments]
            return subprocess.run(command, capture_output=True, text=True, cwd=checkout)

    def test_it_runs_against_the_installed_package_with_our_model(self):
        done = self.run_file(
            """
            import unittest
            import sglang
            from sglang.test.test_utils import DEFAULT_SMALL_MODEL_NAME_FOR_TEST, CustomTestCase

            class TestSample(CustomTestCase):
                def test_sample(self):
                    self.assertIn("site-packages", sglang.__file__)
                    self.assertEqual(DEFAULT_SMALL_MODEL_NAME_FOR_TEST, "some/model")

            if __name__ == "__main__":
                unittest.main()
            """,
            "--model",
            "some/model",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Ran 1 test", done.stderr)

    def test_its_failure_is_passed_on(self):
        done = self.run_file("raise SystemExit(3)")
        self.assertEqual(done.returncode, 3)

    def test_a_missing_file_is_one_sentence(self):
        done = subprocess.run(
            [sys.executable, SCRIPT, "--upstream", "absent.py"], capture_output=True, text=True, cwd=ROOT
        )
        self.assertEqual(done.returncode, 2)
        self.assertEqual(
            done.stderr.strip(),
            "error: --upstream: expected a test file, got absent.py, which does not exist.",
        )


if __name__ == "__main__":
    unittest.main()
