"""Page canary: which pages of the index-K and compressed pools changed although no step stored to them.

Upstream's kv_canary covers the KV pools of most models, but not the index keys of DSA models and, of DeepSeek-V4,
neither the compressed pools nor their index keys. Here each page has a hash on the device. A step's stores are known:
the pages of its ``out_cache_loc``. A page whose hash changed since it was last looked at, and that no step in between
stored to, is reported with step, page and owner. Hashing, comparing and logging stay on the device; the host reads
the log without waiting, a step later.

Covered: writes by forwards, and ``move_kv_cache``. Pools that something else fills (hierarchical cache and sparse
attention, disaggregation) are refused, since their stores aren't known here. The compressors' request-scoped rings
have no pages and aren't watched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a host without CUDA
    triton = None

logger = logging.getLogger(__name__)

LOG_ROWS = 64  # violations kept between two looks at the log
PADDING_PAGE = 0  # padding rows of a graph store to slot 0


@dataclass(frozen=True)
class Violation:
    """Page ``page`` of ``owner`` changed in ``step`` or since its check before that one."""

    step: int
    page: int
    owner: str
    last_check: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: page {self.page} of {self.owner} changed since step {self.last_check}, and no step in "
            "between stored to it"
        )


@dataclass
class WatchedPool:
    """Buffers of one layout.

    Args:
        owner: what the report calls it.
        buffers: one a layer, each [pages, words] int32, contiguous; page p of each holds the tokens
            [p * page_size, (p + 1) * page_size) of the request-to-token map.
        page_size: tokens.
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
                    f"{self.owner} layer {i} must be contiguous int32 {list(want)} as layer 0 is, got {b.dtype} "
                    f"{list(b.shape)} with strides {b.stride()}."
                )


def page_words(buffer: torch.Tensor) -> torch.Tensor:
    """``buffer`` [pages, ...] of any dtype as [pages, words] int32, without a copy.

    Raises:
        ValueError: a page is no whole number of 4-byte words.
    """
    flat = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
    if flat.shape[1] % 4 or flat.data_ptr() != buffer.data_ptr():
        raise ValueError(
            f"a page must be a contiguous whole number of 4-byte words, got {flat.shape[1]} bytes of shape "
            f"{list(buffer.shape)}."
        )
    return flat.view(torch.int32)


def watched_pools(pool) -> list[WatchedPool]:
    """Pools of a token_to_kv_pool that upstream's canary leaves out: DSA's index keys, DeepSeek-V4's compressed pools."""
    found = []

    def add(owner: str, buffers) -> None:
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
    """64-bit hash of each page. The reference of the kernel.

    Args:
        words: [pages, words] int32.
    Returns:
        [pages] int64: the sum over words of a mix that is one-to-one in the word for each position, so that a change
        of one word always changes it.
    """
    position = torch.arange(words.shape[1], device=words.device, dtype=torch.int64)
    x = (words.to(torch.int64) ^ (position * _MIX1)) * _MIX2
    x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * _MIX3
    return x.sum(1)


if triton is not None:

    @triton.jit
    def _check_kernel(
        pointers,  # [layers] int64: address of each layer's [pages, words] int32
        hashes,  # [layers, pages] int64, updated
        stored,  # [pages] uint8: a step stored to the page since its last check
        log,  # [LOG_ROWS, 2] int64: (layer, page)
        count,  # [1] int32
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
        # Grid (sampled pages, layers); a program hashes one page.
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
    """One pool's hashes, marks and log."""

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
        pages = torch.div(locations, self.pool.page_size, rounding_mode="floor").clamp_(0, self.pages - 1)
        self.stored.index_fill_(0, pages.flatten().long(), 1)
        self.stored[PADDING_PAGE] = 1

    def run(self, first: int, every: int, compare: bool) -> None:
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
                        if self.count.item() < LOG_ROWS:
                            self.log[self.count.item()] = torch.tensor([layer, first + page * every])
                        self.count += 1
                self.hashes[layer, first::every] = new
        self.stored[first::every] = 0


class PageCanary:
    """Checks one page in ``every`` after each step.

    Args:
        pools: what to watch.
        every: 1 checks every page in every step; n spreads a full check over n steps.
    Raises:
        ValueError: no pools, or ``every`` is less than 1.
    """

    def __init__(self, pools: list[WatchedPool], every: int) -> None:
        if every < 1:
            raise ValueError(f"--debug-graph-canary must be at least 1, got {every}.")
        if not pools:
            raise ValueError(
                "--debug-graph-canary watches index-K and compressed pools (DSA models, DeepSeek-V4); this model has "
                "none. --kv-canary covers its KV pools."
            )
        self._checks = [_PoolCheck(pool) for pool in pools]
        self._every = every
        self._step = 0
        self._pending: list[tuple] = []
        self.violations: list[Violation] = []
        size = sum(b.numel() * 4 for pool in pools for b in pool.buffers)
        logger.info(
            "Graph canary: %s; %.1f MiB hashed a step (1 page in %d).",
            ", ".join(f"{p.owner} x{len(p.buffers)}" for p in pools),
            size / every / 2**20,
            every,
        )

    def expect(self, locations: torch.Tensor) -> None:
        """Tokens that a step stores to: [n] slots of the token pool, any integer dtype, on the device."""
        for check in self._checks:
            check.mark(locations)

    def check(self) -> None:
        """After a step: look at its share of the pages. Never waits for the device."""
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
        """Report what finished steps found; ``wait`` also for those in flight. Returns the new violations."""
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
                    "Graph canary: step %d has %d violations, the first %d are shown.", step, found, LOG_ROWS
                )
        for violation in new:
            logger.error("Graph canary: %s", violation)
        self.violations += new
        return new

    def watch(self, model_runner) -> None:
        """Check after each forward of ``model_runner``, eager or replayed."""
        forward = model_runner.forward

        def watched_forward(forward_batch, *args, **kwargs):
            if forward_batch.out_cache_loc is not None:
                self.expect(forward_batch.out_cache_loc)
            out = forward(forward_batch, *args, **kwargs)
            self.check()
            return out

        model_runner.forward = watched_forward
        pool = model_runner.token_to_kv_pool
        move = getattr(pool, "move_kv_cache", None)
        if move is not None:

            def watched_move(tgt_loc, src_loc, *args, **kwargs):
                self.expect(tgt_loc)
                return move(tgt_loc, src_loc, *args, **kwargs)

            pool.move_kv_cache = watched_move
