"""Page canary: reports pages of the index-K and compressed pools that changed although no step stored to them.

Upstream's kv_canary covers the KV pools of most models. It covers neither the index keys of DSA models nor the
compressed pools of DeepSeek-V4 and their index keys.

The canary keeps a hash of every page on the device. A step stores to the pages of its ``out_cache_loc``. If the hash of
a page changed since its last check and no step in between stored to the page, the canary reports the step, the page
and its owner. Hashing, comparing and logging run on the device. The host reads the log one step later and never waits.

Stores by forwards and by ``move_kv_cache`` are known. Features that fill pools in other ways (hierarchical cache,
hisparse, disaggregation) are refused. The per-request rings of the compressors have no pages and are not watched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a host without CUDA
    triton = None

logger = logging.getLogger(__name__)

LOG_ROWS = 64  # violations kept per step
PADDING_PAGE = 0  # the padding rows of a graph store to slot 0


@dataclass(frozen=True)
class Violation:
    """Page ``page`` of ``owner`` changed between the steps ``last_check`` and ``step`` without a known store."""

    step: int
    page: int
    owner: str
    last_check: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: page {self.page} of {self.owner} changed since step {self.last_check}, but no step "
            "stored to it"
        )


@dataclass
class WatchedPool:
    """The buffers of one pool, one per layer.

    Args:
        owner: the name of the pool in reports.
        buffers: one per layer, each [pages, words] int32 and contiguous. Page p holds the slots
            [p * page_size, (p + 1) * page_size) of the token pool.
        page_size: tokens per page.
    Raises:
        ValueError: a buffer has another layout.
    """

    owner: str
    buffers: list[torch.Tensor]
    page_size: int

    def __post_init__(self) -> None:
        want = self.buffers[0].shape
        for i, b in enumerate(self.buffers):
            if b.ndim != 2 or b.dtype != torch.int32 or not b.is_contiguous() or b.shape != want:
                raise ValueError(
                    f"{self.owner} layer {i}: expected contiguous int32 {list(want)} like layer 0, got {b.dtype} "
                    f"{list(b.shape)} with strides {b.stride()}."
                )


def page_words(buffer: torch.Tensor) -> torch.Tensor:
    """View ``buffer`` [pages, ...] of any dtype as [pages, words] int32, without a copy.

    Raises:
        ValueError: a page is not contiguous, or its size is not a multiple of 4 bytes.
    """
    flat = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
    if flat.shape[1] % 4 or flat.data_ptr() != buffer.data_ptr():
        raise ValueError(
            f"page: expected contiguous memory and a multiple of 4 bytes, got {flat.shape[1]} bytes per page in a "
            f"buffer of shape {list(buffer.shape)} and strides {buffer.stride()}."
        )
    return flat.view(torch.int32)


def watched_pools(pool: Any) -> list[WatchedPool]:
    """The parts of a token_to_kv_pool that upstream's canary does not cover.

    These are the index keys of DSA models and the compressed pools and index keys of DeepSeek-V4.
    """
    found = []

    def add(owner: str, buffers: Iterable[torch.Tensor] | None) -> None:
        kept = [page_words(b) for b in buffers or () if b.shape[0] > 0]
        if kept:
            found.append(WatchedPool(owner, kept, pool.page_size))

    add("DSA index-K", getattr(pool, "index_k_with_scale_buffer", None))
    for ratio, sub in (getattr(pool, "kv_pools", None) or {}).items():
        add(f"C{ratio} KV", getattr(sub, "kv_buffer", None))
    for ratio, sub in (getattr(pool, "index_pools", None) or {}).items():
        add(f"C{ratio} index-K", getattr(sub, "index_k_with_scale_buffer", None))
    return found


_MIX1, _MIX2, _MIX3 = 0x9E3779B1, 0x2545F4914F6CDD1D, 0x1B873593_C2B2AE35


def hash_pages(words: torch.Tensor) -> torch.Tensor:
    """The 64-bit hash of each page. This is the reference for the Triton kernel.

    Args:
        words: [pages, words] int32.
    Returns:
        [pages] int64. The hash is a sum over the words of a page. Each term is an injective function of the word at its
        position, so changing a single word always changes the hash.
    """
    position = torch.arange(words.shape[1], device=words.device, dtype=torch.int64)
    x = (words.to(torch.int64) ^ (position * _MIX1)) * _MIX2
    x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * _MIX3
    return x.sum(1)


if triton is not None:
    # Untyped on purpose: Triton reads annotations as its own types.
    @triton.jit
    def _check_kernel(  # type: ignore[no-untyped-def]
        pointers,  # [layers] int64: address of each layer's [pages, words] int32 buffer
        hashes,  # [layers, pages] int64, updated
        stored,  # [pages] uint8: whether a step stored to the page since its last check
        log,  # [LOG_ROWS, 2] int64: (layer, page)
        count,  # [1] int32: violations found, may exceed LOG_ROWS
        first,
        every,
        pages,
        words,
        compare: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
        MIX1: tl.constexpr,
        MIX2: tl.constexpr,
        MIX3: tl.constexpr,
    ):
        # Grid (checked pages, layers). Each program hashes one page.
        page = (first + tl.program_id(0) * every).to(tl.int64)
        layer = tl.program_id(1)
        base = tl.load(pointers + layer).to(tl.pointer_type(tl.int32)) + page * words
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, words, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            inside = offset < words
            x = tl.load(base + offset, mask=inside, other=0).to(tl.int64)
            x = (x ^ (offset.to(tl.int64) * MIX1)) * MIX2
            x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * MIX3
            total += tl.where(inside, x, 0)
        new = tl.sum(total, 0)
        place = hashes + layer.to(tl.int64) * pages + page
        old = tl.load(place)
        tl.store(place, new)
        if compare:
            if (new != old) & (tl.load(stored + page) == 0):
                row = tl.atomic_add(count, 1)
                if row < ROWS:
                    tl.store(log + row * 2, layer.to(tl.int64))
                    tl.store(log + row * 2 + 1, page)


class _PoolCheck:
    """The hashes, store marks and log of one pool."""

    def __init__(self, pool: WatchedPool) -> None:
        self.pool = pool
        device = pool.buffers[0].device
        layers, (self.pages, self.words) = len(pool.buffers), pool.buffers[0].shape
        self.hashes = torch.zeros(layers, self.pages, dtype=torch.int64, device=device)
        self.stored = torch.zeros(self.pages, dtype=torch.uint8, device=device)
        self.log = torch.zeros(LOG_ROWS, 2, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.pointers = torch.tensor([b.data_ptr() for b in pool.buffers], dtype=torch.int64, device=device)
        self.run(0, 1, compare=False)

    def mark(self, locations: torch.Tensor) -> None:
        """Mark the pages of these slots as stored to."""
        pages = torch.div(locations, self.pool.page_size, rounding_mode="floor").clamp_(0, self.pages - 1)
        self.stored.index_fill_(0, pages.flatten().long(), 1)
        self.stored[PADDING_PAGE] = 1

    def run(self, first: int, every: int, compare: bool) -> None:
        """Hash every ``every``-th page from ``first`` on, and with ``compare`` log the unmarked ones that changed."""
        if first >= self.pages:
            return
        if self.stored.is_cuda:
            grid = ((self.pages - first + every - 1) // every, len(self.pool.buffers))
            _check_kernel[grid](
                self.pointers,
                self.hashes,
                self.stored,
                self.log,
                self.count,
                first,
                every,
                self.pages,
                self.words,
                compare,
                LOG_ROWS,
                1024,
                _MIX1,
                _MIX2,
                _MIX3,
            )
        else:
            for layer, buffer in enumerate(self.pool.buffers):
                new = hash_pages(buffer[first::every])
                if compare:
                    wrong = (new != self.hashes[layer, first::every]) & (self.stored[first::every] == 0)
                    for page in wrong.nonzero().flatten().tolist():
                        row = int(self.count)
                        if row < LOG_ROWS:
                            self.log[row] = torch.tensor([layer, first + page * every])
                        self.count += 1
                self.hashes[layer, first::every] = new
        self.stored[first::every] = 0


class PageCanary:
    """Checks one page out of ``every`` after each step.

    Args:
        pools: the pools to watch.
        every: 1 or more. 1 checks every page in every step. n spreads a full check over n steps.
    Raises:
        ValueError: ``pools`` is empty.
    """

    def __init__(self, pools: list[WatchedPool], every: int) -> None:
        if not pools:
            raise ValueError(
                "--debug-graph-canary: expected a model with index-K or compressed pools (DSA models, DeepSeek-V4), "
                "got one that has none. Use --kv-canary for its KV pools."
            )
        self._checks = [_PoolCheck(pool) for pool in pools]
        self._every = every
        self._step = 0
        self._pending: list[tuple] = []
        self.violations: list[Violation] = []
        size = sum(b.numel() * 4 for pool in pools for b in pool.buffers)
        logger.info(
            "Graph canary: watching %s, hashing %.1f MiB per step (1 page in %d).",
            ", ".join(f"{p.owner} x{len(p.buffers)}" for p in pools),
            size / every / 2**20,
            every,
        )

    def expect(self, locations: torch.Tensor) -> None:
        """Announce the stores of a step.

        Args:
            locations: [n] slots of the token pool, any integer dtype, on the device of the pools.
        """
        for check in self._checks:
            check.mark(locations)

    def check(self) -> None:
        """Check this step's share of the pages. Call it after the step. Never waits for the device."""
        self._step += 1
        first = self._step % self._every
        for check in self._checks:
            check.run(first, self._every, compare=True)
            if check.stored.is_cuda:
                host = torch.empty(LOG_ROWS, 2, dtype=torch.int64, pin_memory=True)
                count = torch.empty(1, dtype=torch.int32, pin_memory=True)
                host.copy_(check.log, non_blocking=True)
                count.copy_(check.count, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            else:
                host, count, done = check.log.clone(), check.count.clone(), None
            check.count.zero_()
            self._pending.append((self._step, check, count, host, done))
        self.poll()

    def poll(self, wait: bool = False) -> list[Violation]:
        """Report the violations of finished steps, and return those that are new.

        Args:
            wait: wait for the steps that are still running.
        """
        new = []
        while self._pending:
            step, check, count, log, done = self._pending[0]
            if done is not None:
                if wait:
                    done.synchronize()
                elif not done.query():
                    break
            self._pending.pop(0)
            found = int(count)
            for layer, page in log[: min(found, LOG_ROWS)].tolist():
                owner = f"{check.pool.owner} layer {layer}"
                new.append(Violation(step, page, owner, max(step - self._every, 0)))
            if found > LOG_ROWS:
                logger.error(
                    "Graph canary: step %d has %d violations. The first %d follow.", step, found, LOG_ROWS
                )
        for violation in new:
            logger.error("Graph canary: %s", violation)
        self.violations += new
        return new

    def watch(self, model_runner: Any) -> None:
        """Check after each forward of ``model_runner``, whether it runs eagerly or as a graph."""
        forward = model_runner.forward

        def watched_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if forward_batch.out_cache_loc is not None:
                self.expect(forward_batch.out_cache_loc)
            out = forward(forward_batch, *args, **kwargs)
            self.check()
            return out

        model_runner.forward = watched_forward
        pool = model_runner.token_to_kv_pool
        move = getattr(pool, "move_kv_cache", None)
        if move is not None:

            def watched_move(tgt_loc: torch.Tensor, src_loc: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self.expect(tgt_loc)
                return move(tgt_loc, src_loc, *args, **kwargs)

            pool.move_kv_cache = watched_move
