"""Makes `.venv`: picks the profile, installs the locked dependencies, builds and installs our wheels.

    python3 -m tools.environment [--profile auto|cpu|cuda] [--extra test]

`.venv` is a symbolic link to an environment under build/environments/. A new environment is built next to the
old one, and the link moves only when the new one works, so a failed or interrupted build leaves the old
`.venv` usable. An environment is reused as long as nothing that it was made from has changed. This
module uses only the standard library, because it runs before `.venv` exists.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

from tools import distinfo, kernels
from tools.commands import Command, pip_wheel
from tools.errors import ArgumentParser, ToolError, exit_on_error
from tools.upstream import ROOT, Pins

ENVIRONMENTS = ROOT / "build" / "environments"
LINK = ROOT / ".venv"
LOG = ROOT / "build" / "install.log"
# Pip's note on its own cache, uv's note on the environment, and uv's line per installed package.
ONLY_LOGGED = ("WARNING: Location", "Using Python ", " + ")
STAMP = "made-from.json"  # in a complete environment: its digest, profile and Python

SUPPORTED_PYTHONS = ((3, 11), (3, 12))
UV = "uv==0.13.9"  # pip takes seven times as long for the CUDA profile
SGLANG = Pins.load().sglang
# What an environment is made from, without its tests and benchmarks.
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
# What one environment costs, on two cores.
COST = {"cpu": "3 GB, 3 to 6 minutes", "cuda": "11 GB, plus the time to compile our kernels"}
# What pip and uv print if they cannot reach an index. Without retries, pip only says "from versions: none".
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


def check_python(version: tuple[int, ...]) -> None:
    """Check that upstream publishes wheels for a Python.

    Args:
        version: (major, minor, ...).

    Raises:
        ToolError: it does not.
    """
    if tuple(version[:2]) not in SUPPORTED_PYTHONS:
        supported = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHONS)
        raise ToolError(
            f"Python {version[0]}.{version[1]} is not supported: SGLang {SGLANG} needs Python {supported}; run make with "
            "PYTHON=python3.11, for example."
        )


def check_disk(profile: str, folder: Path) -> None:
    """Check that the file system of `folder` has the space that the profile needs.

    Raises:
        ToolError: it has less.
    """
    free = shutil.disk_usage(folder).free
    need = FREE_BYTES[profile]
    if free < need:
        raise ToolError(
            f"Too little disk space: the {profile} profile needs {need / 1e9:.0f} GB free at {folder}, which has "
            f"{free / 1e9:.1f} GB; free some space or clone onto a larger disk."
        )


def has_cuda_driver() -> bool:
    """Return whether a CUDA driver can be loaded on this host."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_profile(asked: str) -> str:
    """Return 'cpu' or 'cuda'. 'auto' depends on the driver."""
    return ("cuda" if has_cuda_driver() else "cpu") if asked == "auto" else asked


def check_compiler() -> None:
    """Check that there is a C++ compiler for our kernels.

    Raises:
        ToolError: there is none.
    """
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise ToolError(
            f"No C++ compiler: our kernels are built with {compiler}, which is not on PATH; install one (Debian: apt-get "
            "install g++) or name yours in CXX."
        )


def source_files() -> list[Path]:
    """Return the files that an environment is made from, in order. Needs no git."""
    files = []
    for top in SOURCES:
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            folders = file.relative_to(ROOT).parts[:-1]
            made = any(f in NOT_SOURCES or f.startswith(".") or f.endswith(".egg-info") for f in folders)
            if file.is_file() and not made and file.suffix not in (".so", ".o"):
                files.append(file)
    return files


def running_python() -> str:
    """Return the version of the running interpreter, e.g. 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def source_digest(profile: str) -> str:
    """Return a digest of what an environment is made from.

    It covers the sources, the profile, the Python's ABI, and the path, because an environment cannot be moved.
    All Pythons of one ABI share an environment: `python3` and `python3.11` of different vendors can run the
    same packages.
    """
    digest = hashlib.sha256(f"{profile} {sysconfig.get_config_var('SOABI')} {ROOT}".encode())
    for file in source_files():
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class Steps:
    """Runs commands, shows and keeps their output, and turns a failure into one sentence."""

    def __init__(self, total: int, log: Path) -> None:
        self.total, self.done, self.log = total, 0, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()

    def say(self, text: str) -> None:
        """Announce the next step."""
        self.done += 1
        print(f"[{self.done}/{self.total}] {text}", flush=True)

    def run(
        self,
        command: Command,
        what: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """Run `command`.

        Args:
            command: the program and its arguments.
            what: what the command does, for the message.
            cwd: the folder to run in.
            env: variables to add to this process's.

        Raises:
            ToolError: it failed.
        """
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment.pop("PYTHONPATH", None)  # the caller's packages must not get into the new environment
        environment |= env or {}
        words = list(map(str, command))
        last: collections.deque[str] = collections.deque(maxlen=60)
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(words)}\n")
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=cwd,
                env=environment,
            )
            for line in process.stdout or ():
                log.write(line)
                last.append(line)
                if not line.startswith(ONLY_LOGGED):
                    print("      " + line.rstrip()[:160], flush=True)
            status = process.wait()
        if status:
            raise ToolError(self.failure("".join(last), what, status))

    def failure(self, output: str, what: str, status: int) -> str:
        """Return the sentence for a failed command."""
        if any(sign in output for sign in NETWORK_SIGNS):
            return (
                f"{what} failed because the package index could not be reached; check the network (or the PIP_INDEX_URL "
                "and UV_INDEX_URL settings) and run the command again."
            )
        if "No space left on device" in output:
            return f"{what} failed because the disk is full; free some space and run the command again."
        return f"{what} failed (exit status {status}); the whole output is in {self.log}."


def made_from(folder: Path) -> dict[str, str] | None:
    """Return the record of a complete environment whose interpreter still exists, or None."""
    try:
        record = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return record if (folder / "bin" / "python").exists() else None


def reason(profile: str, current: Path | None) -> str:
    """Return the sentences that say what will be installed and why.

    Args:
        profile: the new environment's profile.
        current: the folder that `.venv` points to.
    """
    here = f"Python {running_python()} ({sys.executable})"
    cost = f"{COST[profile]}; the whole output goes to {os.path.relpath(LOG, ROOT)}"
    old = made_from(current) if current else None
    if not current or not old:
        return f"Making .venv for the {profile} profile and {here}: {cost}."
    if (old["profile"], old["python"]) == (profile, running_python()):
        return f"The sources changed since .venv was made, so a new environment is made: {cost}."
    return (
        f".venv is for the {old['profile']} profile and Python {old['python']}. You asked for the {profile} profile and "
        f"{here}, which is a second environment: {cost}. The first one stays in {os.path.relpath(current, ROOT)}; "
        f"PROFILE={old['profile']} PYTHON=python{old['python']} takes you back to it."
    )


def make(profile: str, extras: list[str]) -> Path:
    """Make or reuse the environment and point `.venv` at it.

    Args:
        profile: 'cpu' or 'cuda'.
        extras: names of further lock files under requirements/ to install.

    Returns:
        The folder that `.venv` points to.

    Raises:
        ToolError: it cannot be made. `.venv` is unchanged.
    """
    check_python(sys.version_info[:3])
    if LINK.exists() and not LINK.is_symlink():
        raise ToolError(
            f"{LINK} is a folder that this tool did not make; move it away and run the command again."
        )
    digest = source_digest(profile)
    folder = ENVIRONMENTS / f"{profile}-{digest[:12]}"
    current = LINK.resolve() if LINK.is_symlink() else None
    if made_from(folder) is None:
        check_compiler()
        check_disk(profile, ROOT)
        print(reason(profile, current), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            _install(folder, profile)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        record = {"digest": digest, "profile": profile, "python": running_python()}
        (folder / STAMP).write_text(json.dumps(record) + "\n")
    for extra in extras:  # an extra only adds packages, so it can go into a complete environment
        done = folder / f"{extra}.installed"
        if not done.is_file():
            command = [*_uv(folder), "--require-hashes", "-r", f"requirements/{extra}.lock"]
            Steps(1, LOG).run(command, f"Installing {extra}", cwd=ROOT)
            done.touch()
    _link(folder)
    for other in ENVIRONMENTS.iterdir():  # one spare stays: the environment that `.venv` pointed to until now
        if other not in (folder, current):
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _link(folder: Path) -> None:
    fresh = LINK.with_name(".venv.new")
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(os.path.relpath(folder, LINK.parent))
    os.replace(fresh, LINK)


def _pip(folder: Path) -> list[str | Path]:
    return [folder / "bin" / "python", "-m", "pip", "install", "--no-input", "-q"]


def _uv(folder: Path) -> list[str | Path]:
    return [folder / "bin" / "uv", "pip", "install", "--python", folder / "bin" / "python"]


def _install(folder: Path, profile: str) -> None:
    steps = Steps(total=5, log=LOG)
    python = folder / "bin" / "python"
    steps.say(f"Environment for the {profile} profile, Python {running_python()}")
    steps.run([sys.executable, "-m", "venv", folder], "Making the virtual environment")
    steps.run([*_pip(folder), UV], "Installing uv")

    steps.say(f"SGLang {SGLANG}: the pinned wheel, our patches and modules")
    settings = f"--config-settings=profile={profile}"
    wheels = folder / "wheels"
    steps.run([*pip_wheel(python, wheels), settings, "."], "Building the sglang wheel", cwd=ROOT)
    _install_packages(steps, folder, profile, next(wheels.glob("sglang-*.whl")))

    steps.say("our kernels (sgl-kernel)")
    _install_kernels(steps, folder, profile)

    steps.say("Checking that it starts")
    if profile == "cpu":  # we chose all of its versions; upstream chose those of the CUDA profile
        steps.run([python, "-m", "pip", "check"], "Checking the versions of the packages")
    modules = "sglang, sglang.srt.server_args, sgl_kernel.ddtree"
    if profile == "cuda" and not has_cuda_driver():
        print(
            "      This host has no CUDA driver. Upstream's kernels need it, so they are not imported here."
        )
        modules = "sglang"
    code = f"import {modules}, importlib.metadata; print('sglang', importlib.metadata.version('sglang'))"
    steps.run([python, "-c", code], "Importing sglang", cwd=folder)


def _install_packages(steps: Steps, folder: Path, profile: str, wheel: Path) -> None:
    uv = _uv(folder)
    if profile == "cpu":
        steps.say("torch and about 120 packages (3 GB installed)")
        # pip, not uv: only pip's configuration may say where torch's CPU build is. PIP_INDEX_URL or
        # PIP_FIND_LINKS names another place. The index's default build works too, but it is larger.
        steps.run([*_pip(folder), distinfo.torch_cpu(ROOT)], "Installing torch")
        lock = ["--no-deps", "--require-hashes", "-r", "requirements/cpu.lock"]
        steps.run([*uv, *lock], "Installing the CPU profile", cwd=ROOT)
        steps.run([*uv, "--no-deps", wheel], "Installing the sglang wheel")
    else:
        steps.say("upstream's full dependencies (11 GB installed)")
        steps.run([*uv, wheel], "Installing the CUDA profile")
    lock = ["--require-hashes", "-r", "requirements/build.lock"]
    steps.run([*uv, *lock], "Installing the build tools", cwd=ROOT)


def _install_kernels(steps: Steps, folder: Path, profile: str) -> None:
    scripts = folder / "bin"
    pip = [*_pip(folder), "--no-deps", "--no-build-isolation"]
    if profile == "cpu":
        steps.run([*pip, "./sgl-kernel/cpu_stub"], "Installing the CPU stub of sglang-kernel", cwd=ROOT)
        cuda, environment = "OFF", {"PATH": f"{scripts}:{os.environ.get('PATH', '')}"}
    else:  # ON, not AUTO: a GPU server is useless without them
        download = partial(steps.run, what="Downloading NVIDIA's compiler")
        home = kernels.toolkit(scripts / "python", download)
        cuda, environment = "ON", kernels.compiler_environment(home, scripts)
    settings = f"--config-settings=cmake.define.DDTREE_CUDA={cuda}"
    steps.run([*pip, settings, "./sgl-kernel"], "Building our kernels", cwd=ROOT, env=environment)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(prog="python3 -m tools.environment", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--profile",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what to install; auto (the default) takes cuda if the host has a CUDA driver",
    )
    parser.add_argument(
        "--extra", action="append", default=[], choices=("test",), help="further lock files to install"
    )
    arguments = parser.parse_args(argv)
    with exit_on_error():
        try:
            folder = make(choose_profile(arguments.profile), arguments.extra)
        except OSError as error:  # a full disk, a folder that is read-only
            raise ToolError(f"{error}; .venv is unchanged.") from None
    print(f"Ready: .venv -> {os.path.relpath(folder, ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
