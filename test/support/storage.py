"""The hierarchical cache and its storage: KV that comes back is compared bit for bit with the KV that was computed."""

from __future__ import annotations

import hashlib
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from support.cuda import SECONDS
from support.engine import Engine, Greedy
from support.prompts import TOKENS, patterned_prompts

PROMPTS = patterned_prompts((900, 901, 902))  # the pool holds two of them with their answers
PAGE = 64
WHOLE_PAGES = 896  # tokens of each prompt that are in whole pages and before its last token
STORED_FILES = 2 * len(PROMPTS) * WHOLE_PAGES // PAGE  # at least: each page of the target and of the drafter
HOST = dict(enable_hierarchical_cache=True, hicache_ratio=4.0, max_total_tokens=2048)
STORAGE = dict(
    page_size=PAGE, hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete"
)


def watch_prefills(engine: Engine) -> list[list[torch.Tensor]]:
    """Watch the prefills of an engine, which runs one request at a time.

    Returns:
        A list that grows by one entry per prefill: the KV of the prompt in the target's pool, and in the drafter's,
        [buffers, tokens, ...] each.
    """
    worker = engine.scheduler.draft_worker
    pools = [runner.token_to_kv_pool for runner in (worker.model_runner, worker.draft_model_runner)]
    table = worker.model_runner.req_to_token_pool.req_to_token
    forward, after_prefill = worker.forward_batch_generation, []

    def watched(batch: Any, *args: Any, **options: Any) -> Any:
        result = forward(batch, *args, **options)
        if batch.forward_mode.is_extend():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            slots = table[batch.req_pool_indices[0], : len(batch.reqs[0].origin_input_ids)].long()
            after_prefill.append(
                [torch.stack([buffer[slots] for buffer in pool.k_buffer + pool.v_buffer]) for pool in pools]
            )
        return result

    worker.forward_batch_generation = watched
    return after_prefill


def ask(engine: Engine, prompts: list[list[int]]) -> tuple[Greedy, list[int]]:
    """Answer prompts greedily, one at a time; return the answers and how many tokens of each prompt were cached."""
    free, requests = engine.free_slots(), []
    for prompt in prompts:
        requests += engine.generate([prompt], temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    found = Greedy(
        [list(request.output_ids)[:TOKENS] for request in requests],
        sum(request.spec_verify_ct for request in requests),
        sum(request.spec_num_correct_drafts for request in requests),
        (free, engine.free_slots()),
    )
    return found, [request.cached_tokens for request in requests]


def digests(after_prefill: list[list[torch.Tensor]]) -> list[list[str]]:
    """Hash the first WHOLE_PAGES tokens of each prompt's KV, of the target and of the drafter."""
    return [
        [
            hashlib.sha256(
                kv[:, :WHOLE_PAGES].contiguous().view(torch.uint8).cpu().numpy().tobytes()
            ).hexdigest()
            for kv in pools
        ]
        for pools in after_prefill
    ]


def wait_for_files(engine: Engine, folder: str, seconds: float) -> None:
    """Run the event loop until all pages are in files, at most some seconds."""
    deadline = time.monotonic() + seconds

    def each_turn() -> bool:
        time.sleep(0.01)
        return len(list(Path(folder).glob("*.bin"))) >= STORED_FILES or time.monotonic() > deadline

    engine.finish([], each_turn)


def fill_storage(engine: Engine, folder: str) -> list[list[str]]:
    """Ask for each prompt, and wait until its pages are in files; return digests()."""
    after_prefill = watch_prefills(engine)
    ask(engine, PROMPTS)
    wait_for_files(engine, folder, seconds=60)
    return digests(after_prefill)


def ask_storage(
    engine: Engine, folder: str, seconds: float = SECONDS
) -> tuple[Greedy, list[int], list[list[str]]]:
    """When there are files, ask for each prompt; return the answers, how many tokens were cached, and digests()."""
    wait_for_files(engine, folder, seconds)
    after_prefill = watch_prefills(engine)
    return *ask(engine, PROMPTS), digests(after_prefill)


class OnCpu:
    """A job on a CPU, where torch copies KV between pool and host instead of SGLang's CUDA kernels.

    Python hashes the pages instead of C++, because not every host has OpenSSL's headers.

    Args:
        job: called as job(engine, folder).
    """

    def __init__(self, job: Any) -> None:
        self.job = job

    def before(self) -> None:
        from sglang.srt.mem_cache import utils
        from sglang.srt.mem_cache.pool_host import common
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.speculative.ddtree import server_args

        refused = ("enable_hierarchical_cache", "hicache_storage_backend")
        server_args.DEVICE_REFUSALS["cpu"] = tuple(
            refusal for refusal in server_args.DEVICE_REFUSALS["cpu"] if refusal.field not in refused
        )
        utils.get_native_hash = _hash
        common._cuda_host_register = lambda *_, **__: None
        MHATokenToKVPoolHost.pin_memory = property(lambda pool: False, lambda pool, value: None)
        MHATokenToKVPoolHost.load_to_device_per_layer = _load
        MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up

    def __call__(self, engine: Engine, folder: str) -> Any:
        return self.job(engine, folder)


def _hash(key: Any, before: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Hash each page of a key together with all pages before it, or the whole key without a page size, as SGLang does."""
    tokens, hashes = array("I", key.raw_token_ids() if hasattr(key, "raw_token_ids") else key)[: len(key)], []
    page = page_size or max(1, len(tokens))
    for start in range(0, len(tokens), page):
        before = hashlib.sha256((before or b"") + tokens[start : start + page].tobytes()).digest()
        hashes.append(before.hex())
    return hashes if page_size else hashes[0]


def _load(
    host: Any, pool: Any, host_slots: torch.Tensor, slots: torch.Tensor, layer: int, *_: Any, **__: Any
) -> None:
    """Copy a layer from the host, in place of SGLang's method."""
    pool.k_buffer[layer][slots] = host.k_buffer[layer][host_slots]
    pool.v_buffer[layer][slots] = host.v_buffer[layer][host_slots]


def _back_up(host: Any, pool: Any, host_slots: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any) -> None:
    """Copy all layers to the host, in place of SGLang's method."""
    for layer in range(len(pool.k_buffer)):
        host.k_buffer[layer][host_slots] = pool.k_buffer[layer][slots]
        host.v_buffer[layer][host_slots] = pool.v_buffer[layer][slots]
