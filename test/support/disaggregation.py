"""Two engines that share requests: one prefills and sends the KV, the other receives it and decodes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from typing import Any

import torch

from support import transfer
from support.engine import Engine
from support.processes import Job, start_engine, unused_port
from support.prompts import PROMPTS, TOKENS

SECONDS = float(os.environ.get("SGLANG_TEST_ENGINE_SECONDS", "240"))  # for a job and its engines' start


class _Half:
    """A job of one of the two engines.

    Args:
        mode: "prefill" or "decode".
        started: a barrier of all processes. A decoding engine asks for the other one for a few seconds only.
        decoded: set when the decoding engine has done its job. Until then it needs the other one.
        job: called as job(engine, ...) on both engines, so that both get the same requests in the same order.
    """

    def __init__(self, mode: str, started: Any, decoded: Any, job: Job) -> None:
        self.mode, self.started, self.decoded, self.job = mode, started, decoded, job

    def before(self) -> None:
        getattr(self.job, "before", lambda: None)()
        transfer.install()

    def __call__(self, engine: Engine, *args: Any) -> Any:
        self.started.wait(SECONDS)
        result = self.job(engine, *args)
        if self.mode == "decode":
            self.decoded.set()
        else:
            self.decoded.wait(SECONDS)
        return result


def run_pair(
    arguments: dict[str, Any], job: Job, *args: Any, decode: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """Run a job on a prefilling and a decoding engine at once.

    Args:
        arguments: the arguments of both engines.
        job: called as job(engine, *args) on each. Its requests meet by the order in which each engine gets them. With
            CUDA it must pickle.
        args: further arguments of the job.
        decode: further arguments of the decoding engine.

    Returns:
        The job's results on the prefilling and on the decoding engine. With `tp_size` each is a list, by rank.
    """
    from sglang.srt.disaggregation.mooncake import MooncakeKVBootstrapServer

    port, spawn = unused_port(), arguments.get("device", "cpu") != "cpu"
    context = multiprocessing.get_context("spawn" if spawn else "fork")
    started, decoded = context.Barrier(2 * arguments.get("tp_size", 1)), context.Event()
    common = arguments | dict(
        disaggregation_transfer_backend="mooncake", disaggregation_bootstrap_port=port, host=transfer.HOST
    )
    halves = [
        start_engine(common | own | {"disaggregation_mode": mode}, _Half(mode, started, decoded, job), *args)
        for mode, own in (("prefill", {}), ("decode", decode or {}))
    ]
    server = MooncakeKVBootstrapServer(transfer.HOST, port)  # after the forks, because it starts a thread
    try:
        until = time.monotonic() + SECONDS
        while not any(half.has_ended() for half in halves) and time.monotonic() < until:
            time.sleep(0.05)
        # The prefilling engine ends first if it failed. Then the other one would wait for it.
        order = (0, 1) if halves[0].has_ended() else (1, 0)
        results = {i: halves[i].result(max(1.0, until - time.monotonic())) for i in order}
        return results[0], results[1]
    finally:
        for half in halves:
            half.kill()
        server.close()


def _digest(pool: Any, slots: torch.Tensor) -> str:
    """What the slots hold in all layers of a KV pool."""
    kv = torch.stack([buffer[slots] for buffer in (*pool.k_buffer, *pool.v_buffer)])
    return hashlib.sha256(kv.float().cpu().numpy().tobytes()).hexdigest()


def kv_of_prompts(engine: Engine) -> list[tuple[str, str]]:
    """Answer PROMPTS greedily.

    Returns:
        For each prompt, what its KV was in the target's pool and in the drafter's: after the prefill if the engine
        prefills, else before the first step.
    """
    worker = engine.scheduler.draft_worker
    pools = [runner.token_to_kv_pool for runner in (worker.model_runner, worker.draft_model_runner)]
    table = worker.model_runner.req_to_token_pool.req_to_token
    forward, found = worker.forward_batch_generation, {}

    def look(batch: Any) -> None:
        for row, request in zip(batch.req_pool_indices, batch.reqs):
            slots = table[row, : len(request.origin_input_ids)].long()
            found.setdefault(request.rid, tuple(_digest(pool, slots) for pool in pools))

    def watched(batch: Any, *args: Any, **options: Any) -> Any:
        if not batch.forward_mode.is_extend():
            look(batch)
        result = forward(batch, *args, **options)
        if batch.forward_mode.is_extend():
            look(batch)
        return result

    worker.forward_batch_generation = watched
    requests = engine.generate(PROMPTS, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    return [found[request.rid] for request in requests]
