"""Processes that run one engine each. A process can hold only one, so each configuration gets its own."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from support.engine import Engine

Job = Callable[..., Any]  # called with the engine and the job's arguments
Name = TypeVar("Name")

_ports = random.SystemRandom().sample(range(24000, 32000), 8000)  # below the ephemeral ports


def unused_port() -> int:
    """A TCP port that nobody listens on. This process never hands it out twice.

    Children bind their port long after they start. Without this, children that start together would pick the
    same one.

    Raises:
        RuntimeError: no port is free.
    """
    while _ports:
        port = _ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("unused_port: expected a free port from 24000 to 31999, got none")


class EngineProcess:
    """A child process that creates an engine and runs a job on it.

    On a CPU the child is forked, so that SGLang's imports (twenty seconds) are paid only once, by the parent.
    CUDA does not survive a fork, so with `device="cuda"` the child is spawned and imports for itself.

    Args:
        arguments: the arguments of Engine.
        job: called as job(engine, *args). If it has a method `before`, that is called before the engine is
            created. With CUDA it must pickle.
        args: further arguments of the job.
    """

    def __init__(self, arguments: dict[str, Any], job: Job, *args: Any) -> None:
        arguments = {"nccl_port": unused_port()} | arguments
        forked = arguments.get("device", "cpu") == "cpu"
        if forked:
            import sglang.srt.managers.scheduler  # noqa: F401  before the fork, for all children
            import sglang.srt.models.registry  # noqa: F401
            import sglang.srt.speculative.dflash_worker_v2  # noqa: F401

            torch.set_num_threads(1)  # a forked child must not inherit a thread pool
        context = multiprocessing.get_context("fork" if forked else "spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(theirs, arguments, job, args))
        self._process.start()
        theirs.close()

    def has_ended(self) -> bool:
        """Whether result() would return or raise at once."""
        return self._pipe.poll()

    def result(self, seconds: float | None = None) -> Any:
        """Wait for the job's result.

        Args:
            seconds: time to wait before the child is killed. None waits forever.

        Raises:
            RuntimeError: the child failed, died or was killed. The text is its traceback or its exit code.
        """
        try:
            in_time = self._pipe.poll(seconds)
            if not in_time:
                self._process.kill()
            done, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            reason = f"died with exit code {code}" if in_time else f"was killed after {seconds:.0f} s"
            done, result = False, f"the child {reason}"
        self._process.join()
        if not done:
            raise RuntimeError(result)
        return result


def _run(pipe: Any, arguments: dict[str, Any], job: Job, args: tuple[Any, ...]) -> None:
    try:
        getattr(job, "before", lambda: None)()
        pipe.send((True, job(Engine(**arguments), *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # threads of the scheduler wait for requests and would keep the process alive


def run_engine(arguments: dict[str, Any], job: Job, *args: Any) -> Any:
    """Run a job on an engine in a child process; return its result. Arguments as for EngineProcess."""
    return EngineProcess(arguments, job, *args).result()


def run_all(
    starts: dict[Name, Callable[[], EngineProcess]], at_once: int, seconds: float
) -> Iterator[tuple[Name, Any]]:
    """Run many engines, of which only some fit on the machine together.

    Args:
        starts: by name, what starts an engine's process.
        at_once: how many run together at most.
        seconds: time for all of them. Those that are not done by then are killed or not started.

    Returns:
        An iterator over names and results, as engines end. The result of an engine that failed is a RuntimeError.
    """
    until = time.monotonic() + seconds
    waiting, running = dict(starts), {}
    while waiting or running:
        in_time = time.monotonic() < until
        for name in list(waiting)[: at_once - len(running)]:
            start = waiting.pop(name)
            if in_time:
                running[name] = start()
            else:
                yield name, RuntimeError(f"not started within {seconds:.0f} s")
        for name, process in list(running.items()):
            ended = process.has_ended()
            if in_time and not ended:
                continue
            del running[name]
            try:
                yield name, process.result(0.0)
            except RuntimeError as error:
                yield name, error if ended else RuntimeError(f"not done within {seconds:.0f} s")
        time.sleep(0.1)


def start_ranks(arguments: dict[str, Any], job: Job, *args: Any) -> list[EngineProcess]:
    """Start a job on every rank of a tensor-parallel group (`tp_size`, by default 1)."""
    arguments = {"nccl_port": unused_port()} | arguments
    return [
        EngineProcess(arguments | {"rank": rank}, job, *args) for rank in range(arguments.get("tp_size", 1))
    ]


def run_ranks(arguments: dict[str, Any], job: Job, *args: Any) -> list[Any]:
    """Run a job on every rank of a tensor-parallel group and return the results, by rank."""
    return [child.result() for child in start_ranks(arguments, job, *args)]
