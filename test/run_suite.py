"""Runs the test suites. Test files register themselves like upstream's: register_cpu_ci, register_cuda_ci.

    .venv/bin/python test/run_suite.py                      all that this host can run (gpu only with CUDA)
    .venv/bin/python test/run_suite.py --suite unit         one suite
    .venv/bin/python test/run_suite.py --list               the files of each suite
    .venv/bin/python test/run_suite.py --upstream FILE      one of upstream's test files, on the installed package
        [--model MODEL]                                     with MODEL in place of upstream's default models

The last line counts the tests: `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = (ROOT / "test", ROOT)  # the same as pythonpath in pyproject.toml
TEST_GLOBS = ("test/**/test_*.py", "sgl-kernel/tests/test_*.py", "benchmark/**/test_*.py")
# Each file of these suites runs in its own process, because it starts servers or holds a device.
SEPARATE_PROCESSES = ("e2e", "gpu", "image")
SUITES = ("unit", "kernel", "e2e", "gpu", "image")
ON_REQUEST = ("image",)  # builds a container image as root: `make image-test`
CLOSING = re.compile(r"(?m)^.*\b(?:\d+ \w+|no tests ran)\b.* in \d+\.\d+s.*$")
COUNTED = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")


def collect() -> dict[str, list[tuple[Path, float]]]:
    """Return suite -> [(file, estimated seconds)], from the files' own registrations.

    Raises:
        ValueError: a test file registers nothing or an unknown suite, is disabled, or lacks a __main__ block.
    """
    from sglang.test.ci.ci_register import HWBackend, collect_tests

    suites: dict[str, list[tuple[Path, float]]] = {}
    files = sorted({str(path) for pattern in TEST_GLOBS for path in ROOT.glob(pattern)})
    for registry in collect_tests(files, sanity_check=True):
        if registry.disabled is not None:
            raise ValueError(f"{registry.filename}: disabled tests hide failures; fix the test or remove it.")
        if registry.effective_suite not in SUITES:
            raise ValueError(
                f"{registry.filename}: suite: expected one of {', '.join(SUITES)}, got {registry.effective_suite}, "
                "which no run includes."
            )
        if registry.backend in (HWBackend.CPU, HWBackend.CUDA):
            suites.setdefault(registry.effective_suite, []).append(
                (Path(registry.filename), registry.est_time)
            )
    return suites


def environment() -> dict[str, str]:
    """Return the environment of a test: this interpreter's commands come first on PATH."""
    values = dict(os.environ)
    values["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{values.get('PATH', '')}"
    # test/ gives `support` and the root gives `tools`, also to the processes that a test starts. sglang and
    # sgl_kernel must come from site-packages, so the caller's PYTHONPATH is dropped.
    values["PYTHONPATH"] = os.pathsep.join(map(str, SHARED))
    values.setdefault("PYTHONUNBUFFERED", "1")
    return values


class Tally(dict[str, int]):
    """Counts of passed, failed and skipped tests over several pytest runs."""

    def add(self, output: str, status: int, label: str) -> None:
        """Read pytest's closing line. A run that fails without a failed test counts as one failure."""
        closing = (CLOSING.findall(output) or [""])[-1]  # Python may print a warning after it
        counted = {"passed": 0, "failed": 0, "skipped": 0}
        for number, what in COUNTED.findall(closing):
            counted["failed" if what.startswith("error") else what] += int(number)
        if status != 0 and counted["failed"] == 0:
            counted["failed"] = 1
        if counted["passed"] + counted["failed"] + counted["skipped"] == 0:
            print(f"{label}: no test ran", flush=True)
            counted["failed"] = 1
        for key, value in counted.items():
            self[key] = self.get(key, 0) + value


def run_pytest(files: list[Path], label: str, tally: Tally) -> None:
    """Run the files in one pytest process, show its output and count its tests."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfEs", "--durations=5"]
    command += ["-p", "no:cacheprovider", *map(str, files)]
    print(f"\n=== {label}: {len(files)} file(s)", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={"HF_HUB_OFFLINE": "1", **environment()},  # our tests make their models; upstream's may download
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    for line in process.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    tally.add("".join(lines), process.wait(), label)
    print(f"=== {label}: {time.monotonic() - started:.0f} s", flush=True)


def run_suites(names: list[str], suites: dict[str, list[tuple[Path, float]]]) -> int:
    """Run the suites; return the exit status."""
    tally = Tally()
    for name in names:
        files = [path for path, _ in suites[name]]
        if name in SEPARATE_PROCESSES:
            for path in files:
                run_pytest([path], f"{name} {path.name}", tally)
        else:
            run_pytest(files, name, tally)
    print(
        f"\n{tally.get('passed', 0)} passed, {tally.get('failed', 0)} failed, {tally.get('skipped', 0)} skipped"
    )
    return 1 if tally.get("failed", 0) or not tally.get("passed", 0) else 0


# Runs in its own process. Upstream's tests take their models from constants of sglang.test.test_utils.
_UPSTREAM_RUNNER = """
import runpy, sys
import sglang.test.test_utils as test_utils
model, file = sys.argv[1:3]
if model:
    for name in vars(test_utils).copy():
        if name.startswith("DEFAULT_") and "MODEL_NAME_FOR_TEST" in name:
            setattr(test_utils, name, model)
sys.argv = [file, *sys.argv[3:]]
runpy.run_path(file, run_name="__main__")
"""


def run_upstream(file: Path, model: str, further: list[str]) -> int:
    """Run one of upstream's test files in an empty folder, so that no checkout around it is imported."""
    if not file.is_file():
        print(f"error: --upstream: expected a test file, got {file}, which does not exist.", file=sys.stderr)
        return 2
    values = environment()
    values.pop("PYTHONPATH")
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.call(
            [sys.executable, "-c", _UPSTREAM_RUNNER, model, str(file.resolve()), *further],
            cwd=empty,
            env=values,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="test/run_suite.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--suite",
        default="default",
        help="unit, kernel, e2e, gpu, image, or default: all that this host can run, except image",
    )
    parser.add_argument("--list", action="store_true", help="list the suites and their files")
    parser.add_argument("--check", action="store_true", help="check the arguments and stop; needs no .venv")
    parser.add_argument(
        "--upstream", type=Path, metavar="FILE", help="run this one of upstream's test files instead"
    )
    parser.add_argument(
        "--model", default="", help="with --upstream: the model that replaces upstream's default models"
    )
    arguments, further = parser.parse_known_args(argv)
    if arguments.upstream:
        return run_upstream(arguments.upstream, arguments.model, further)
    if further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if arguments.suite not in ("default", *SUITES):
        print(
            f"error: --suite: expected default or one of {', '.join(SUITES)}, got {arguments.suite}",
            file=sys.stderr,
        )
        return 2
    if arguments.check:
        return 0

    import torch

    suites = collect()
    if arguments.list:
        for name, entries in sorted(suites.items()):
            print(f"{name}: about {sum(seconds for _, seconds in entries):.0f} s")
            for path, seconds in entries:
                print(f"  {path.relative_to(ROOT)} ({seconds:.0f} s)")
        return 0
    if arguments.suite == "default":
        names = [name for name in SUITES if name in suites and name not in ON_REQUEST]
        if not torch.cuda.is_available() and "gpu" in names:
            names.remove("gpu")
            print(f"No CUDA device, so {len(suites['gpu'])} file(s) of suite gpu do not run.")
    else:
        names = [arguments.suite]
    return run_suites(names, suites)


if __name__ == "__main__":
    sys.exit(main())
