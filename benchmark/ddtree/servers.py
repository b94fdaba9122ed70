"""Servers for the measurements: started side by side, asked over HTTP, compared with plain decoding."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import requests


def measurement_parser(
    description: str,
    *,
    port: int,
    prompts: Path | None = None,
    device: str = "cuda",
    start_seconds: float = 240,
) -> argparse.ArgumentParser:
    """A parser of the arguments that all measurements with servers take. A script adds its own.

    Args:
        description: description of the script.
        port: default port of the first server.
        prompts: default file of prompts. None: the user must name one.
        device: default device.
        start_seconds: default time to wait for the servers.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", required=True, help="folder of the target")
    result.add_argument("--drafter", required=True, help="folder of the drafter")
    result.add_argument(
        "--prompts",
        type=Path,
        default=prompts,
        required=prompts is None,
        help="JSON file with the prompts' token ids",
    )
    result.add_argument("--dtype", default="bfloat16")
    result.add_argument("--device", default=device)
    result.add_argument("--port", type=int, default=port, help="port of the first server")
    result.add_argument(
        "--start-seconds", type=float, default=start_seconds, help="time to wait for the servers"
    )
    result.add_argument("--commit", help="commit of this repository; default: ask git")
    result.add_argument(
        "--logs", type=Path, default=Path("/tmp/ddtree-bench"), help="folder of the servers' logs"
    )
    result.add_argument("--output", type=Path, required=True)
    return result


def flags(case: str, drafter: str) -> list[str]:
    """The server flags of a case.

    Args:
        case: ALGORITHM[:N][:FLAG[=VALUE]]..., such as "none", "DFLASH", "DDTREE:32" or
            "DDTREE:32:speculative-ddtree-top1-path=keep". N is the number of nodes of the verify tree.
        drafter: folder of the drafter.
    """
    algorithm, *rest = case.split(":")
    result = []
    if algorithm != "none":
        result += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", drafter]
    for option in rest:
        name, equals, value = option.partition("=")
        if name.isdigit():
            result += ["--speculative-num-draft-tokens", name]
        else:
            result += [f"--{name}", value] if equals else [f"--{name}"]
    return result


def device_flags(device: str, requests_at_once: int) -> list[str]:
    """The flags that all servers of a measurement share. Few graph sizes, because capturing takes time."""
    common = [
        "--device", device, "--sampling-backend", "pytorch", "--skip-server-warmup", "--random-seed", "1",
        "--log-level", "warning", "--sleep-on-idle", "--max-running-requests", str(requests_at_once),
    ]  # fmt: skip
    if device == "cpu":
        return [*common, "--mem-fraction-static", "0.1"]
    sizes = [str(1 << i) for i in range(requests_at_once.bit_length()) if 1 << i < requests_at_once]
    return [
        *common, "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *sizes, str(requests_at_once), "--mem-fraction-static", "0.8",
    ]  # fmt: skip


class Server:
    """One `python -m sglang.launch_server`.

    Args:
        model: folder of the target.
        port: port to listen on.
        log: file for the server's output.
        arguments: further flags.

    Raises:
        ValueError: something listens on the port.
    """

    def __init__(self, model: str, port: int, log: Path, arguments: list[str]):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise ValueError(f"port: expected a free port, got {port}, which a server listens on")
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                command + arguments, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, deadline: float) -> bool:
        """Wait until the server is healthy. Return False if it dies or `deadline` (monotonic) passes."""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return True
            except requests.RequestException:
                pass
            time.sleep(0.5)
        return False

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the server and all its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def generate(self, prompt: list[int], *, session=requests, **body) -> dict:
        """Ask POST /generate. `body` holds the fields other than input_ids.

        Raises:
            requests.HTTPError: the server refused. The text is the server's.
        """
        answer = session.post(f"{self.url}/generate", json={"input_ids": prompt} | body, timeout=600)
        if answer.status_code != 200:
            raise requests.HTTPError(f"{answer.status_code}: {answer.text[:300]}", response=answer)
        return answer.json()

    def forget(self) -> None:
        """Empty the radix cache, so that each measurement does its own prefill.

        Raises:
            requests.HTTPError: the server did not become idle.
        """
        requests.post(f"{self.url}/flush_cache", params={"timeout": 20}, timeout=60).raise_for_status()

    def cpu_seconds(self) -> float:
        """Return the CPU time so far of the process that takes requests, tokenizes and streams."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def freeze_gc(self) -> None:
        """Keep the garbage collector away from what exists now. Upstream does so after its own warm-up, which we skip.

        Raises:
            requests.HTTPError: the server refused.
        """
        requests.post(f"{self.url}/freeze_gc", timeout=60).raise_for_status()

    def gaps(self, prompt: list[int], output: list[int], *, session=requests) -> list[float]:
        """How far each output token is from the first choice of this server after the same tokens.

        One prefill over prompt and output judges every token by its own prefix, even after a near-tie.

        Returns:
            For each output token, the first choice's logit minus the token's. 0: it is the first choice.
        """
        answer = self.generate(
            prompt + output, session=session, return_logprob=True, top_logprobs_num=1,
            logprob_start_len=len(prompt) - 1, sampling_params={"max_new_tokens": 1, "temperature": 0},
        )  # fmt: skip
        info = answer["meta_info"]
        own = info["input_token_logprobs"][-len(output) :]
        top = info["input_top_logprobs"][-len(output) :]
        # SGLang reports the vocabulary's last token as token 0. That one is not judged.
        known = [token == asked for (_, token, _), asked in zip(own, output, strict=True)]
        assert all(k or token == 0 for k, (_, token, _) in zip(known, own)), (own, output)
        return [best[0][0] - own[0] if k else 0.0 for k, own, best in zip(known, own, top)]


def start(
    model: str, cases: dict[str, list[str]], folder: Path, *, port: int, seconds: float
) -> dict[str, Server]:
    """Start servers side by side, which takes hardly longer than starting one.

    Args:
        model: folder of the target.
        cases: name -> flags.
        folder: folder for the logs.
        port: port of the first server. The others follow in steps of 10.
        seconds: time to wait for all of them.

    Returns:
        name -> Server, for those that came up. For the others the end of the log is printed.
    """
    # A normal exit runs the handler below, which ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder.mkdir(parents=True, exist_ok=True)
    started = {
        case: Server(model, port + 10 * i, folder / f"server{i}.log", arguments)
        for i, (case, arguments) in enumerate(cases.items())
    }
    atexit.register(lambda: [server.close() for server in started.values()])
    deadline = time.monotonic() + seconds
    up = {}
    for case, server in started.items():
        if server.wait(deadline):
            up[case] = server
        else:
            print(
                f"{case}: the server did not start.\n{server.log.read_text()[-3000:]}",
                file=sys.stderr,
                flush=True,
            )
            server.close()
    return up


def closed_loop(jobs: list, clients: int, work) -> list:
    """Run work(session, job) for each job with `clients` clients, each with one job in flight.

    Returns:
        The results, in the order of the jobs.
    """
    with ThreadPoolExecutor(clients) as pool, requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=clients))
        return list(pool.map(lambda job: work(session, job), jobs))
