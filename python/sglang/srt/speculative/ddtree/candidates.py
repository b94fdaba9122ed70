"""The K most probable tokens of each draft position, with the logsumexp of all its logits.

Upstream's candidate_topk() takes some twenty kernels. With a small model they take as long as the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

TILE = 2048  # logits per program: small enough for one position to occupy the card


@dataclass(frozen=True)
class LogitTransform:
    """What a drafter does to its logits. It keeps their order.

    Attributes:
        multiplier: factor, above 0.
        cap: then logits become cap * tanh(logits / cap). None: they stay.
    """

    multiplier: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Transform logits of any shape to float32."""
        logits = logits.float() * self.multiplier
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


IDENTITY = LogitTransform()


def top_candidates(
    hidden: torch.Tensor,
    lm_head: torch.nn.Module,
    num_candidates: int,
    transform: LogitTransform = IDENTITY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score the vocabulary at each draft position and take the best tokens.

    Args:
        hidden: [positions, hidden] of the drafter.
        lm_head: the target's, or the drafter's own. Without shards, every rank has all of it.
        num_candidates: K.
        transform: applied to the logits.

    Returns:
        Tokens [positions, K] int64, best first; their logits [positions, K] float32; the logsumexp of all logits
        [positions] float32. Where upstream's code scores the vocabulary, the logsumexp of transformed logits is that of
        the candidates alone.
    """
    weight: Any = getattr(lm_head, "weight", None)
    whole = get_parallel().tp_size == 1 or not hasattr(lm_head, "shard_indices")
    if whole and is_dense_head_weight(weight):
        # A head tied to a plain embedding, such as Gemma 4's, has no padding and no such attribute.
        logits = hidden.to(weight.dtype) @ weight[: getattr(lm_head, "org_vocab_size", weight.shape[0])].T
        if hidden.is_cuda:
            return topk_logsumexp(logits, num_candidates, transform)
        logits = transform(logits)
        best = logits.topk(num_candidates)
        return best.indices, best.values, logits.logsumexp(-1)
    # Upstream's fused kernel needs at least two candidates. With one it returned ids outside the vocabulary on an H200.
    tokens, logits, log_sum = candidate_topk(hidden, lm_head, max(2, num_candidates), with_partition=True)
    tokens, logits = (x[:, :num_candidates].contiguous() for x in (tokens, transform(logits)))
    return tokens, logits, log_sum.float() if transform == IDENTITY else logits.logsumexp(-1)


def topk_logsumexp(
    logits: torch.Tensor, k: int, transform: LogitTransform = IDENTITY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the k largest logits of each row, and the logsumexp of the row, in two kernels.

    Args:
        logits: [rows, vocabulary] of any float dtype; the last dimension is contiguous.
        k: the number of logits to find, at most the vocabulary.
        transform: applied to the logits, before anything else.

    Returns:
        Indices [rows, k] int64, largest logit first and at equal logits lowest index first; their logits [rows, k]
        float32; the logsumexp [rows] float32.
    """
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tile_values, tile_ids = new(rows, tiles, k), new(rows, tiles, k, dtype=torch.int32)
    tile_max, tile_sum = new(rows, tiles), new(rows, tiles)
    values, ids, log_sum = new(rows, k), new(rows, k, dtype=torch.int64), new(rows)
    _topk_of_tile[rows, tiles](
        logits, logits.stride(0), vocabulary, transform.multiplier, transform.cap or 1.0, tile_values, tile_ids,
        tile_max, tile_sum, TILE=TILE, K=k, CAPPED=transform.cap is not None,
    )  # fmt: skip
    _merge_tiles[rows,](
        tile_values, tile_ids, tile_max, tile_sum, tiles, values, ids, log_sum, K=k,
        TILES=triton.next_power_of_2(tiles), CANDIDATES=triton.next_power_of_2(tiles * k),
    )  # fmt: skip
    return ids, values, log_sum


@triton.jit
def _topk_of_tile(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocabulary,
    multiplier,
    cap,
    tile_values,
    tile_ids,
    tile_max,
    tile_sum,
    TILE: tl.constexpr,
    K: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    out = row * tl.num_programs(1) + tile
    at = tl.arange(0, TILE)
    token = tile * TILE + at
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary, other=-float("inf"))
    x = x.to(tl.float32) * multiplier
    if CAPPED:
        x = tl.where(token < vocabulary, cap * (2 * tl.sigmoid(2 * x / cap) - 1), x)  # tanh
    largest = tl.max(x, axis=0)
    # A tile of -inf alone adds nothing; exp(-inf - -inf) would be NaN.
    total = tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - largest)), axis=0)
    tl.store(tile_max + out, largest)
    tl.store(tile_sum + out, total)
    for i in tl.static_range(K):
        value, best = tl.max(x, axis=0, return_indices=True)
        tl.store(tile_values + out * K + i, value)
        tl.store(tile_ids + out * K + i, tile * TILE + best)
        x = tl.where(at == best, -float("inf"), x)


@triton.jit
def _merge_tiles(  # type: ignore[no-untyped-def]
    tile_values,
    tile_ids,
    tile_max,
    tile_sum,
    tiles,
    values,
    ids,
    log_sum,
    K: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    peaks = tl.load(tile_max + row * tiles + tile, mask=tile < tiles, other=-float("inf"))
    sums = tl.load(tile_sum + row * tiles + tile, mask=tile < tiles, other=0.0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(peaks - peak)), axis=0)
    tl.store(log_sum + row, peak + tl.log(total))
    at = tl.arange(0, CANDIDATES)
    x = tl.load(tile_values + row * tiles * K + at, mask=at < tiles * K, other=-float("inf"))
    for i in tl.static_range(K):
        value, best = tl.max(x, axis=0, return_indices=True)
        tl.store(values + row * K + i, value)
        tl.store(ids + row * K + i, tl.load(tile_ids + row * tiles * K + best).to(tl.int64))
        x = tl.where(at == best, -float("inf"), x)
