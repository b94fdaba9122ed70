"""Starts the server and says how to ask it something, once it can answer.

    .venv/bin/python -m tools.serve [--model-path MODEL] [--port N] [further flags of sglang.launch_server]

Without --model-path it serves the demo model, which it prepares on the first run.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

from tools import demo_model
from tools.upstream import ROOT

DEFAULT_PORT = 30000
DEMO_DRAFTER = ROOT / "demo" / "SmolLM2-135M-DFlash"
QUESTION = "Write a Python function that returns the n-th Fibonacci number."


class ServeError(Exception):
    """A reason not to start that the user can act on; its text is one sentence with the fix."""


def check_port(host: str, port: int) -> None:
    """Raises ServeError if something listens at host:port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            raise ServeError(f"--port: expected a number from 1 to 65535, got {port}.") from None
        except OSError as error:
            raise ServeError(
                f"--port: expected a free port, got {port}, which cannot be bound at {host} ({error.strerror}); stop what uses it "
                f"or choose another: make serve PORT={port + 1}"
            ) from None


def check_model(model: str) -> None:
    """Raises ServeError if `model` is a path and no model folder.

    A hub name (owner/name), a URL (s3://...) and a GGUF file are left to SGLang.
    """
    path = Path(model)
    if "://" in model or (path.suffix == ".gguf" and path.is_file()):
        return
    looks_like_path = (
        path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    )
    # params.json is what a folder in Mistral's own format has.
    if looks_like_path and not any((path.expanduser() / n).is_file() for n in ("config.json", "params.json")):
        came = "is not there" if not path.expanduser().exists() else "holds none"
        raise ServeError(
            f"--model-path: expected a model folder with a config.json, or a hub name like owner/name; {model} {came}."
        )


def answers(url: str) -> bool:
    """Whether the server at `url` says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def hint(url: str, model_name: str) -> str:
    """One line to paste that asks the server something."""
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}\''
    )


def speculation(further: list[str]) -> list[str]:
    """Flags that speed the demo model up with its drafter, unless the user chose for themselves.

    On a CPU only: on CUDA, DDTREE has not served yet (docs/ddtree.md).
    """
    if not version("torch").endswith("+cpu") or any(flag.startswith("--speculative-") for flag in further):
        return []
    # Eight rows: on a CPU each row of the tree costs computation.
    return ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(DEMO_DRAFTER),
            "--speculative-num-draft-tokens", "8"]  # fmt: skip


def serve(model: str | None, host: str, port: int, further: list[str]) -> int:
    """Runs the server until it ends or a signal asks it to.

    Returns:
        The server's exit status; 0 after SIGINT or SIGTERM.

    Raises:
        ServeError: the port is taken, or the model is none.
        demo_model.DemoModelError: the demo model could not be prepared.
    """
    check_port(host, port)
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--host",
        host,
        "--port",
        str(port),
        "--enable-metrics",
    ]
    if model is None:
        folder = demo_model.prepare(demo_model.default_folder())
        model_name = folder.name
        command += ["--model-path", str(folder), "--served-model-name", model_name, *speculation(further)]
    else:
        check_model(model)
        model_name = model
        command += ["--model-path", model]
    print("Starting:", " ".join(command[1:] + further), flush=True)
    server = subprocess.Popen(command + further)
    asked_to_stop = False

    def stop(signum, frame):
        nonlocal asked_to_stop
        asked_to_stop = True
        server.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    started = time.monotonic()
    while server.poll() is None and not asked_to_stop and not answers(url):
        time.sleep(1)
    if server.poll() is None and not asked_to_stop:
        print(
            f"\nReady after {time.monotonic() - started:.0f} s. Ask it (Ctrl-C stops it):\n{hint(url, model_name)}\n",
            flush=True,
        )
    status = server.wait()
    return 0 if asked_to_stop else status


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.serve", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    arguments, further = parser.parse_known_args(argv)
    try:
        return serve(arguments.model_path or None, arguments.host, arguments.port, further)
    except (ServeError, demo_model.DemoModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
