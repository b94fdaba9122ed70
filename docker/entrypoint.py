#!/usr/bin/python3 -I
"""The image's entry point: runs a command with every cache under /cache, and ends cleanly.

    serve [ARGUMENTS]   sglang.launch_server, on all interfaces unless --host says otherwise
    -FLAG ...           the same: `docker run IMAGE --model-path ...`
    check-env [--json]  python -m sglang.srt.environment_check
    health              exit status 0 if the server in this container is healthy, at any address (HEALTHCHECK)
    COMMAND ...         any other command is executed as given

It uses only the standard library and the system's Python, so that it runs even if the server's environment is broken.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

PYTHON = "/opt/venv/bin/python"
BUILD = Path("/usr/share/sglang/build.json")
CACHE = Path("/cache")
PROC = Path("/proc")
SERVERS = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
HEALTH_SECONDS = 25  # upstream's /health waits up to 20 s for a token

# Variable -> folder under CACHE / build ID. A build never loads what another build compiled.
BUILD_CACHES = {
    "XDG_CACHE_HOME": "xdg",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "QUACK_CACHE_DIR": "quack",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
    "HF_MODULES_CACHE": "hf_modules",
    "PYTHONPYCACHEPREFIX": "pycache",
    "HOME": "home",
}
# Downloads. All builds share them, so a new build does not download a model again.
SHARED_CACHES = {"HF_HOME": "huggingface", "MODELSCOPE_CACHE": "modelscope"}


def build_id() -> str:
    """Return the build ID of the image, or 'unknown' outside an image."""
    try:
        return json.loads(BUILD.read_text())["build_id"]
    except OSError:
        return "unknown"


def cache_environment(given: dict[str, str]) -> dict[str, str]:
    """Return the environment of a command: `given`, with the caches that it does not set under CACHE.

    HOME is always replaced: under an arbitrary uid the runtime sets it to /, which is read-only.
    """
    caches = {name: CACHE / build_id() / folder for name, folder in BUILD_CACHES.items()}
    caches |= {name: CACHE / folder for name, folder in SHARED_CACHES.items()}
    environment = {name: str(folder) for name, folder in caches.items()} | given
    environment["HOME"] = str(caches["HOME"])
    environment.setdefault("USER", "sglang")  # an arbitrary uid has no name, and getpass asks for one
    return environment


def setting(name: str, arguments: list[str]) -> str | None:
    """Return the value that sglang.launch_server uses for --NAME: the last, or else its --config's."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == f"--{name}" and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"--{name}="):
            value = argument.partition("=")[2]
    if value is None and name != "config" and (config := setting("config", arguments)):
        try:
            found = re.findall(
                rf"(?m)^{name.replace('-', '[-_]')}\s*:\s*[\"']?([^\s\"'#]+)", Path(config).read_text()
            )
            value = found[-1] if found else None
        except OSError:  # the server will report it
            pass
    return value


def server_command(arguments: list[str]) -> list[str]:
    """Return the command that `serve ARGUMENTS` runs. Without a model it serves the image's own, if any."""
    arguments = list(arguments)
    if setting("host", arguments) is None:
        arguments = ["--host", "0.0.0.0", *arguments]
    helped = any(argument in ("-h", "--help") for argument in arguments)
    if not helped and all(setting(name, arguments) is None for name in ("model-path", "model")):
        arguments = [*shlex.split(os.environ.get("SGLANG_IMAGE_MODEL_ARGS", "")), *arguments]
    return [PYTHON, "-m", "sglang.launch_server", *arguments]


def supervise(command: list[str], environment: dict[str, str]) -> int:
    """Run the server. Pass SIGTERM and SIGINT on as SIGTERM, so that it answers its requests and ends.

    Returns:
        0 if it ended because of such a signal, or else its own exit status (128 + N for signal N).
    """
    server = subprocess.Popen(command, env=environment)
    asked_to_stop = False

    def stop(signum: int, frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        server.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    status = server.wait()
    # While it loads a model it has no handler, so the signal kills it. It has no requests to answer then.
    if asked_to_stop and status in (0, -signal.SIGTERM):
        return 0
    return status if status >= 0 else 128 - status


def running_server() -> list[str] | None:
    """Return the arguments of the server that runs in this container, or None."""
    for process in sorted((p for p in PROC.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        for position, word in enumerate(words):
            if word in SERVERS or (
                word == "serve" and position and Path(words[position - 1]).name == "sglang"
            ):
                return words[position + 1 :]
    return None


def health_url(arguments: list[str]) -> str:
    """Return the URL at which a server with these arguments answers /health."""
    host = setting("host", arguments) or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if setting("ssl-certfile", arguments) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{setting('port', arguments) or 30000}/health"


def health() -> int:
    """Return 0 if this container's server says that it is healthy. Otherwise print why and return 1."""
    arguments = running_server()
    if arguments is None:
        print("no SGLang server runs in this container", file=sys.stderr)
        return 1
    url = health_url(arguments)
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # it is the same container
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    try:
        with opener.open(url, timeout=HEALTH_SECONDS) as response:
            return 0 if response.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


def main(arguments: list[str]) -> int:
    """Run a command line; return the exit status."""
    what = arguments[0] if arguments else "serve"
    if what == "health":
        return health()
    environment = cache_environment(dict(os.environ))
    if what == "serve" or what.startswith("-"):
        return supervise(server_command(arguments[what == "serve" :]), environment)
    if what == "check-env":
        arguments = [PYTHON, "-m", "sglang.srt.environment_check", *arguments[1:]]
    try:
        os.execvpe(arguments[0], arguments, environment)
    except OSError as error:
        print(
            f"error: {arguments[0]}: {error.strerror}; expected serve, check-env, health or a command in the "
            "image.",
            file=sys.stderr,
        )
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
