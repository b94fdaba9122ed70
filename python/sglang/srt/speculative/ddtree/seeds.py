"""Sampling with a seed per request: the draw at a node depends on the seed, the position and the distribution.

Then the draws along a path are those of plain decoding with the same seed, whatever the trees and the batch.
Nodes of one position share their random numbers. A path has one node per position, so its draws are
independent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@contextmanager
def seeded(batch: ScheduleBatch) -> Iterator[None]:
    """Give a batch's forward the seeds of its requests. Upstream does so in deterministic inference only.

    Args:
        batch: its sampling_info is another object until the end, if a request has a seed.
    """
    info = batch.sampling_info
    seeds = request_seeds(batch.reqs, batch.device) if info is not None else None
    if seeds is not None:
        batch.sampling_info = dataclasses.replace(info, sampling_seed=seeds)
    try:
        yield
    finally:
        batch.sampling_info = info


def request_seeds(reqs: list[Req], device: str | torch.device) -> torch.Tensor | None:
    """Return the seed of each request. A request without a seed gets a new random one in every step.

    Args:
        reqs: the requests of a batch.
        device: the device of the result. Its generator draws the random seeds, so all ranks draw the same.

    Returns:
        [bs] int64, or None if no request has a seed.
    """
    given = [req.sampling_params.sampling_seed for req in reqs]
    if all(seed is None for seed in given):
        return None
    known = async_h2d([seed is not None for seed in given], dtype=torch.bool, device=device)
    seeds = async_h2d([seed or 0 for seed in given], dtype=torch.int64, device=device)
    return torch.where(known, seeds, torch.randint(1 << 62, seeds.shape, device=device))


def follow_seeds(sampler: Sampler) -> None:
    """Make upstream's sampler draw with the seeds of its sampling_info, if it has any.

    Upstream's own seeded sampling supports neither FlashInfer nor min-p, and its draws depend on what other
    requests of the batch ask for.

    Args:
        sampler: the sampler of the target. It keeps its temperatures and log-probabilities.
    """
    unseeded = sampler._sample_from_probs

    def sample(
        probs: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, is_simple: bool
    ) -> tuple[torch.Tensor, object]:
        if info.sampling_seed is None:
            return unseeded(probs, info, positions, is_simple)
        kept = probs if is_simple else filtered(probs, info)
        return draw(kept, info.sampling_seed, positions), None

    sampler._sample_from_probs = sample


def filtered(probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Apply top-k, top-p and min-p. A row that uses none of them stays as it is, to the last bit.

    Args:
        probs: [n, vocabulary] float32.
        info: the sampling parameters of the n rows.

    Returns:
        [n, vocabulary], 0 for the tokens that are dropped. The rest is not normalized.
    """
    ranked, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    top_p, min_p = info.top_ps[:, None], info.min_ps[:, None]
    dropped = torch.arange(probs.shape[1], device=probs.device) >= info.top_ks[:, None]
    dropped |= (before > top_p) & (top_p < 1)  # a sum may exceed 1 by rounding
    dropped |= ranked < ranked[:, :1] * min_p
    return torch.zeros_like(probs).scatter_(-1, tokens, ranked.masked_fill_(dropped, 0))


def draw(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token per row: each token waits an exponential time with its probability as the rate.

    Args:
        probs: [n, vocabulary], not necessarily normalized.
        seeds: [n] int64.
        positions: [n] int64. Rows of the same seed and position wait the same times.

    Returns:
        [n] int32, the tokens that come first.

    Source: the hash is upstream's, of its deterministic inference.
    """
    columns = torch.arange(probs.shape[1], device=probs.device)
    hashed = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    # float64, because float32 rounds numbers near 1 to 1. They are the shortest times.
    times = hashed.to(torch.float64).add_(0.5).div_(2.0**32).log_().neg_()
    return torch.div(probs, times, out=times).argmax(-1).to(torch.int32)
