"""Makes `.venv`: picks the profile, installs its dependencies from the lock files, builds and installs our wheels.

    python3 -m tools.environment [--profile auto|cpu|cuda] [--extra test]

`.venv` is a symbolic link to an environment under build/environments/. A new one is made beside the old and the link
moves only once the new one works, so a failed or interrupted build leaves the old `.venv` usable. An environment is
reused while nothing that it was made from has changed. Standard library only: it runs before there is a `.venv`.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools import kernels
from tools.upstream import ROOT, Pins

ENVIRONMENTS = ROOT / "build" / "environments"
LINK = ROOT / ".venv"
LOG = ROOT / "build" / "install.log"
STAMP = "distribution.sha256"  # in an environment that is complete: the digest of what it was made from

SUPPORTED_PYTHONS = ((3, 11), (3, 12))
UV = "uv==0.13.9"  # pip takes seven times as long for the CUDA profile
TORCH_CPU = "torch==2.13.0"
SGLANG = Pins.load().sglang
# What an environment is made from, but for its tests and benchmarks.
SOURCES = (
    "requirements",
    "patches",
    "python",
    "sgl-kernel",
    "tools",
    "upstream.toml",
    "pyproject.toml",
    "LICENSE",
    "NOTICE",
)
NOT_SOURCES = ("tests", "benchmark", "build", "dist", "__pycache__")  # folders
FREE_BYTES = {"cpu": 7 << 30, "cuda": 25 << 30}  # installed size, downloads and unpacking together
# What pip and uv print when an index cannot be reached; with its retries off pip says only that it found no version.
NETWORK_SIGNS = (
    "Retrying (",
    "(from versions: none)",
    "Temporary failure in name resolution",
    "dns error",
    "timed out",
    "error sending request",
    "Network is unreachable",
    "no network:",
)


class SetupError(Exception):
    """A reason to stop that the user can act on; its text is one sentence with the fix."""


def check_python(version: tuple) -> None:
    """Raises SetupError unless `version` (major, minor, ...) is one that upstream publishes wheels for."""
    if tuple(version[:2]) not in SUPPORTED_PYTHONS:
        supported = " or ".join("%d.%d" % pair for pair in SUPPORTED_PYTHONS)
        raise SetupError(
            "Python %d.%d is not supported: SGLang %s needs Python %s; run make with PYTHON=python3.11, for example."
            % (version[0], version[1], SGLANG, supported)
        )


def check_disk(profile: str, folder: Path) -> None:
    """Raises SetupError if the file system of `folder` has less room than the profile needs."""
    free = shutil.disk_usage(folder).free
    need = FREE_BYTES[profile]
    if free < need:
        raise SetupError(
            "Too little disk: the %s profile needs %.0f GB free at %s, which has %.1f GB; free some space or clone "
            "onto a larger disk." % (profile, need / 1e9, folder, free / 1e9)
        )


def has_cuda_driver() -> bool:
    """Whether a CUDA driver can be loaded on this host."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_profile(asked: str) -> str:
    """Returns 'cpu' or 'cuda'; 'auto' follows the driver."""
    return ("cuda" if has_cuda_driver() else "cpu") if asked == "auto" else asked


def check_compiler() -> None:
    """Raises SetupError if there is no C++ compiler to build our kernels with."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise SetupError(
            "No C++ compiler: our kernels are built with %s, which is not on PATH; install one (Debian: apt-get install "
            "g++) or name yours in CXX." % compiler
        )


def source_files() -> list[Path]:
    """The files that an environment is made from, in order. Needs no git: the checkout may be an unpacked archive."""
    files = []
    for top in SOURCES:
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            folders = file.relative_to(ROOT).parts[:-1]
            made = any(f in NOT_SOURCES or f.startswith(".") or f.endswith(".egg-info") for f in folders)
            if file.is_file() and not made and file.suffix not in (".so", ".o"):
                files.append(file)
    return files


def source_digest(profile: str) -> str:
    """Digest of all that an environment is made from: the sources, the profile, the Python, and the place, since
    environments cannot be moved."""
    digest = hashlib.sha256(("%s %s %s" % (profile, sys.version, ROOT)).encode())
    for file in source_files():
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class Steps:
    """Runs commands with their output shown and kept, and turns a failure into one sentence."""

    def __init__(self, total: int, log: Path):
        self.total, self.done, self.log = total, 0, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()

    def say(self, text: str) -> None:
        self.done += 1
        print("[%d/%d] %s" % (self.done, self.total, text), flush=True)

    def run(self, command: list, what: str, **kwargs) -> None:
        """Runs `command`; raises SetupError if it fails."""
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        environment.pop(
            "PYTHONPATH", None
        )  # a caller's packages must not leak into the environment that is made
        environment.update(kwargs.pop("env", {}))
        last = collections.deque(maxlen=60)
        with open(self.log, "a") as log:
            log.write("$ %s\n" % " ".join(map(str, command)))
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                **kwargs,
            )
            for line in process.stdout:
                log.write(line)
                last.append(line)
                if not line.startswith("WARNING: Location"):
                    print("      " + line.rstrip()[:160], flush=True)
            status = process.wait()
        if status == 0:
            return
        text = "".join(last)
        if any(sign in text for sign in NETWORK_SIGNS):
            raise SetupError(
                "%s failed because the package index could not be reached; check the network (or the PIP_INDEX_URL and "
                "UV_INDEX_URL settings) and run the command again." % what
            )
        if "No space left on device" in text:
            raise SetupError(
                "%s failed because the disk is full; free some space and run the command again." % what
            )
        raise SetupError("%s failed (exit status %d); the whole output is in %s." % (what, status, self.log))


def make(profile: str, extras: list[str]) -> Path:
    """Makes or reuses the environment and points `.venv` at it.

    Args:
        profile: 'cpu' or 'cuda'.
        extras: names of further lock files under requirements/ to install.

    Returns:
        The folder that `.venv` points to.

    Raises:
        SetupError: with the reason; `.venv` is as it was.
    """
    check_python(sys.version_info)
    if LINK.exists() and not LINK.is_symlink():
        raise SetupError(
            "%s is a folder that this tool did not make; move it away and run the command again." % LINK
        )
    digest = source_digest(profile)
    folder = ENVIRONMENTS / ("%s-%s" % (profile, digest[:12]))
    current = LINK.resolve() if LINK.is_symlink() else None
    if not (folder / STAMP).is_file():
        check_compiler()
        check_disk(profile, ROOT)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            _install(folder, profile)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / STAMP).write_text(digest + "\n")
    for extra in extras:  # these only add to a complete environment, so they may go in place
        if not (folder / extra).with_suffix(".installed").is_file():
            Steps(1, LOG).run(
                [*_uv(folder), "--require-hashes", "-r", "requirements/%s.lock" % extra],
                "Installing " + extra,
                cwd=ROOT,
            )
            (folder / extra).with_suffix(".installed").touch()
    _link(folder)
    for old in ENVIRONMENTS.iterdir():  # one spare is kept: the one that `.venv` pointed to until now
        if old not in (folder, current):
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _link(folder: Path) -> None:
    fresh = LINK.with_name(".venv.new")
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(os.path.relpath(folder, LINK.parent))
    os.replace(fresh, LINK)


def _uv(folder: Path) -> list:
    return [folder / "bin" / "uv", "pip", "install", "--python", folder / "bin" / "python"]


def _install(folder: Path, profile: str) -> None:
    steps = Steps(total=5, log=LOG)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--no-input"]
    uv = _uv(folder)

    steps.say(
        "Environment for the %s profile, Python %d.%d" % (profile, sys.version_info[0], sys.version_info[1])
    )
    steps.run([sys.executable, "-m", "venv", folder], "Making the virtual environment")
    steps.run([*pip, "-q", UV], "Installing uv")

    steps.say("SGLang %s: the pinned wheel, our patches and modules" % SGLANG)
    wheels = folder / "wheels"
    steps.run(
        [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, "."],
        "Building the sglang wheel",
        cwd=ROOT,
    )
    wheel = next(wheels.glob("sglang-*.whl"))

    if profile == "cpu":
        steps.say("torch and about 120 packages (3 GB installed)")
        # pip, not uv: a host may have torch's CPU build where only pip's configuration looks. Set PIP_INDEX_URL or
        # PIP_FIND_LINKS to take it from elsewhere; the index's default build works too, it is only larger.
        steps.run([*pip, "-q", TORCH_CPU], "Installing torch")
        steps.run(
            [*uv, "--no-deps", "--require-hashes", "-r", "requirements/cpu.lock"],
            "Installing the CPU profile",
            cwd=ROOT,
        )
        steps.run([*uv, "--no-deps", wheel], "Installing the sglang wheel")
    else:
        steps.say("upstream's full dependencies (11 GB installed)")
        steps.run([*uv, wheel], "Installing the CUDA profile")
    steps.run(
        [*uv, "--require-hashes", "-r", "requirements/build.lock"], "Installing the build tools", cwd=ROOT
    )

    steps.say("our kernels (sgl-kernel)")
    scripts = folder / "bin"
    if profile == "cpu":
        steps.run(
            [*pip, "-q", "--no-deps", "--no-build-isolation", "./sgl-kernel/cpu_stub"],
            "Installing the CPU stand-in for sglang-kernel",
            cwd=ROOT,
        )
        cuda, environment = "OFF", {"PATH": "%s:%s" % (scripts, os.environ.get("PATH", ""))}
    else:  # ON, not AUTO: a server on a GPU is of no use without them
        home = kernels.toolkit(python, lambda command: steps.run(command, "Fetching NVIDIA's compiler"))
        cuda, environment = "ON", kernels.compiler_environment(home, scripts)
    settings = "--config-settings=cmake.define.DDTREE_CUDA=%s" % cuda
    steps.run(
        [*pip, "-q", "--no-deps", "--no-build-isolation", settings, "./sgl-kernel"],
        "Building our kernels",
        cwd=ROOT,
        env=environment,
    )

    steps.say("Checking that it starts")
    steps.run(
        [
            python,
            "-c",
            "import sglang, sglang.srt.server_args, sgl_kernel.ddtree; print('sglang', sglang.__version__)",
        ],
        "Importing sglang",
        cwd=folder,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tools.environment", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--extra", action="append", default=[], choices=("test",), help="further lock files to install"
    )
    arguments = parser.parse_args(argv)
    try:
        folder = make(choose_profile(arguments.profile), arguments.extra)
    except SetupError as error:
        print("error: %s" % error, file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        print("error: %s; .venv is as it was." % error, file=sys.stderr)
        return 1
    print("Ready: .venv -> %s" % os.path.relpath(folder, ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
