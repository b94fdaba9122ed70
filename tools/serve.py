"""Starts the server and prints a command that asks it something, once it can answer.

    .venv/bin/python -m tools.serve [--model-path MODEL] [--port N] [--check] [flags of sglang.launch_server]

Without --model-path it serves the demo model, which it prepares on the first run. Without --log-level it
hides the lines of the server's log that tools/quiet.py lists; `--log-level debug` shows all of them. --check
stops after checking the arguments, needs no .venv, and is what `make serve` does before it installs anything.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import IO

from tools import demo_model
from tools.errors import ArgumentParser, ToolError, exit_on_error
from tools.quiet import relay
from tools.upstream import ROOT

DEFAULT_PORT = 30000
# Of the demo's KV pool. Upstream's default takes half of the memory, which is slow to clear.
CPU_TOKENS = 65536
# On a CPU each node of the tree costs computation. On a GPU the algorithm's own default is as cheap. A draft pass
# need not be longer than the tree.
CPU_WIDTHS = ["--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "8"]
DRAFTER_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")
WIDTH_FLAGS = (
    "--speculative-num-draft-tokens",
    "--speculative-dflash-block-size",
    "--speculative-ddtree-budget",
)
DEMO_DRAFTER = ROOT / "demo" / "SmolLM2-135M-DFlash"
QUESTION = "Write a Python function that returns the n-th Fibonacci number."
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def port_number(text: str) -> int:
    """Return the port that `text` names.

    Raises:
        ToolError: it names none.
    """
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ToolError(
            f"--port: expected a number from 1 to 65535, got {text!r}: make serve PORT={DEFAULT_PORT}."
        )
    return int(text)


def check_address(host: str, port: int) -> None:
    """Check that a server can listen at host:port.

    Raises:
        ToolError: the port is in use, or the host is not an address of this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ToolError(
                    f"--host: expected an address of this machine, got {host} ({error.strerror})."
                ) from None
            raise ToolError(
                f"--port: expected a free port, got {port}, which cannot be bound at {host} ({error.strerror}); stop what "
                f"uses it or choose another port: make serve PORT={port + 1 if port < 65535 else DEFAULT_PORT}."
            ) from None


def check_model(model: str) -> None:
    """Check that `model` is a model folder, or can be something that only SGLang can check.

    That is a hub name (owner/name), a URL (s3://...) or a GGUF file.

    Raises:
        ToolError: it is neither.
    """
    path = Path(model).expanduser()
    if "://" in model or (path.suffix == ".gguf" and path.is_file()):
        return
    is_path = path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if not is_path and HUB_NAME.fullmatch(model):
        return
    # params.json is in a folder of Mistral's own format.
    if not any((path / name).is_file() for name in ("config.json", "params.json")):
        found = "has no such file" if path.exists() else "does not exist"
        raise ToolError(
            "--model-path: expected a folder with a config.json, or a hub name like owner/name; "
            f"{model} {found}: make serve MODEL=owner/name."
        )


def answers(url: str) -> bool:
    """Return whether the server at `url` says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def hint(url: str, model_name: str) -> str:
    """Return a line to paste that asks the server something."""
    request = {
        "model": model_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 256,  # a small model that samples may never end its answer
        "temperature": 0,
    }
    header = "-H 'Content-Type: application/json'"
    return f"curl -s {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(request))}"


def is_given(flag: str, further: list[str]) -> bool:
    """Return whether the user gave `flag`."""
    return any(word.partition("=")[0] == flag for word in further)


def speculation(further: list[str]) -> list[str]:
    """Return flags that speed the demo model up with DDTREE, unless the user chose an algorithm.

    What else the user chose stays: the drafter, and the widths.
    """
    if is_given("--speculative-algorithm", further):
        return []
    flags = ["--speculative-algorithm", "DDTREE"]
    if not any(is_given(flag, further) for flag in DRAFTER_FLAGS):
        flags += ["--speculative-draft-model-path", str(DEMO_DRAFTER)]
    if on_cpu() and not any(is_given(flag, further) for flag in WIDTH_FLAGS):
        flags += CPU_WIDTHS
    return flags


def on_cpu() -> bool:
    """Return whether .venv has the CPU profile."""
    return version("sglang-kernel").endswith("+cpu")


def pool_size(further: list[str]) -> list[str]:
    """Return flags that keep the demo's KV pool small on a CPU, unless the user chose for themselves."""
    chosen = any(is_given(flag, further) for flag in ("--max-total-tokens", "--mem-fraction-static"))
    return ["--max-total-tokens", str(CPU_TOKENS)] if on_cpu() and not chosen else []


def server_command(model: str | None, host: str, port: int, further: list[str]) -> tuple[list[str], str]:
    """Return the command that starts the server, and the name of the model that it serves.

    Raises:
        ToolError: the demo model could not be prepared.
    """
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
        command += ["--model-path", str(folder), "--served-model-name", folder.name]
        return command + speculation(further) + pool_size(further) + further, folder.name
    return [*command, "--model-path", os.path.expanduser(model), *further], model


class Output:
    """Shows a server's output on this process's own, without the lines that tools/quiet.py hides."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self.hidden: list[int] = []  # lines of each stream
        pairs = ((server.stdout, sys.stdout.buffer), (server.stderr, sys.stderr.buffer))
        self.threads = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs]
        for thread in self.threads:
            thread.start()

    def _copy(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self.hidden.append(relay(source.fileno(), sink))

    def finish(self) -> int:
        """Wait for the rest of the output; return how many lines were hidden."""
        for thread in self.threads:
            thread.join(timeout=5)  # a process that outlives the server may keep the pipe open
        return sum(self.hidden)


def serve(model: str | None, host: str, port: int, further: list[str]) -> int:
    """Run the server until it ends or a signal asks it to.

    The first SIGINT, SIGTERM or SIGHUP lets the server finish its running requests. A second one kills it.

    Args:
        model: folder or hub name; None serves the demo model.
        host: the address to listen at.
        port: the port to listen at.
        further: flags of sglang.launch_server.

    Returns:
        The server's exit status; 0 after such a signal.

    Raises:
        ToolError: the demo model could not be prepared.
    """
    command, model_name = server_command(model, host, port, further)
    quiet = not is_given("--log-level", further)
    print("Starting:", shlex.join(command), flush=True)
    if quiet:
        print(
            "Lines that need no action are hidden; ARGS='--log-level debug' shows the whole log.", flush=True
        )
    pipe = subprocess.PIPE if quiet else None
    # In a process group of its own. Otherwise Ctrl-C would also reach each process of the server, and end it with a traceback.
    server = subprocess.Popen(command, stdout=pipe, stderr=pipe, process_group=0)
    output = Output(server) if quiet else None
    asked_to_stop = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        if asked_to_stop:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(server.pid, signal.SIGKILL)
        asked_to_stop = True
        server.send_signal(signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    started = time.monotonic()
    while server.poll() is None and not asked_to_stop and not answers(url):
        time.sleep(1)
    if server.poll() is None and not asked_to_stop:
        print(
            f"\nReady after {time.monotonic() - started:.0f} s. "
            f"Ask it (Ctrl-C stops it, a second Ctrl-C at once):\n{hint(url, model_name)}\n",
            flush=True,
        )
    status = server.wait()
    hidden = output.finish() if output else 0
    if hidden and status and not asked_to_stop:
        print(f"{hidden} lines of the log were hidden; ARGS='--log-level debug' shows them.", file=sys.stderr)
    return 0 if asked_to_stop else status


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(
        prog="python -m tools.serve",
        description=(__doc__ or "").splitlines()[0],
        epilog="All other arguments go to sglang.launch_server.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", "--model", help="default: the demo model")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", default=str(DEFAULT_PORT), help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="check the arguments and stop")
    arguments, further = parser.parse_known_args(argv)
    with exit_on_error():
        port = port_number(arguments.port)
        check_address(arguments.host, port)
        if arguments.model_path:
            check_model(arguments.model_path)
        if arguments.check:
            return 0
        return serve(arguments.model_path or None, arguments.host, port, further)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
