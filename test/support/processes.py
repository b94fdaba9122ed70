"""Processes that run one engine each. A process can hold only one, so each configuration gets its own."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
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
            seconds: time to wait before kill(). None waits forever.

        Raises:
            RuntimeError: the child failed, died or was killed. The text is its traceback or its exit code.
        """
        try:
            in_time = self._pipe.poll(seconds)
            if not in_time:
                self.kill()
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

    def kill(self) -> None:
        """Kill the child. Before it dies it writes the stacks of its threads to stderr, so that a hang has a place."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
            self._process.join(1.0)  # time to write
        self._process.kill()
        self._process.join(10.0)  # not forever: a driver may hold up its end


def _run(pipe: Any, arguments: dict[str, Any], job: Job, args: tuple[Any, ...]) -> None:
    # A file descriptor, because a test runner may have replaced sys.stderr by an object without one.
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
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
    starts: dict[Name, Callable[[], EngineProcess | EngineRanks]], at_once: int, seconds: float
) -> Iterator[tuple[Name, Any]]:
    """Run many engines, of which only some fit on the machine together.

    Args:
        starts: by name, what starts an engine's processes.
        at_once: how many run together at most.
        seconds: time for all of them. Those that are not done by then are killed or not started.

    Returns:
        An iterator over names and results, as engines end. The result of an engine that failed is a RuntimeError.
    """
    until = time.monotonic() + seconds
    waiting = dict(starts)
    running: dict[Name, EngineProcess | EngineRanks] = {}
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


class EngineRanks:
    """The processes of one tensor-parallel engine, which run the same job.

    When one of them fails, the others wait for it forever. So they are killed.

    Args:
        arguments: the arguments of Engine, with `tp_size`.
        job: as for EngineProcess.
        args: further arguments of the job.
    """

    def __init__(self, arguments: dict[str, Any], job: Job, *args: Any) -> None:
        arguments = {"nccl_port": unused_port()} | arguments
        self._ranks = [
            EngineProcess(arguments | {"rank": rank}, job, *args) for rank in range(arguments["tp_size"])
        ]
        self._results: dict[int, Any] = {}
        self._failure: str | None = None

    def has_ended(self) -> bool:
        """Whether result() would return or raise at once: all ranks are done, or one has failed."""
        for rank, process in enumerate(self._ranks):
            if self._failure is None and rank not in self._results and process.has_ended():
                try:
                    self._results[rank] = process.result()
                except RuntimeError as error:
                    self._failure = f"rank {rank} of {len(self._ranks)} failed: {error}"
        return self._failure is not None or len(self._results) == len(self._ranks)

    def result(self, seconds: float | None = None) -> list[Any]:
        """Wait for the job's results.

        Args:
            seconds: time to wait before the ranks are killed. None waits forever.

        Returns:
            By rank.

        Raises:
            RuntimeError: a rank failed, died or was killed. The text is the traceback or the exit code of the first one.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not self.has_ended():
            if until is not None and time.monotonic() >= until:
                missing = [rank for rank in range(len(self._ranks)) if rank not in self._results]
                self._failure = f"ranks {missing} of {len(self._ranks)} were killed after {seconds:.0f} s"
            else:
                time.sleep(0.1)
        if self._failure is not None:
            self.kill()
            raise RuntimeError(self._failure)
        return [self._results[rank] for rank in range(len(self._ranks))]

    def kill(self) -> None:
        """Kill all ranks."""
        for process in self._ranks:
            process.kill()


def start_engine(arguments: dict[str, Any], job: Job, *args: Any) -> EngineProcess | EngineRanks:
    """Start a job on an engine: in one process, or in `tp_size` of them."""
    kind = EngineRanks if arguments.get("tp_size", 1) > 1 else EngineProcess
    return kind(arguments, job, *args)


def run_ranks(arguments: dict[str, Any], job: Job, *args: Any) -> list[Any]:
    """Run a job on every rank of a tensor-parallel group and return the results, by rank."""
    return EngineRanks(arguments, job, *args).result()
