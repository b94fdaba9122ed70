"""After the verify forward: the target's token at each tree row, and the KV pool that the walk's rows move in."""

from __future__ import annotations

import dataclasses

import torch
from sgl_kernel.ddtree import KVBuffers
from sglang.srt.layers.logits_processor import LogitsProcessorOutput


def constrain(logits: torch.Tensor, sampling_info, grammar_mask, rows: int) -> None:
    """Applies grammar and logit bias to the target's logits, in place and in upstream's order.

    Args:
        logits: [bs * N, vocab].
        sampling_info: of the batch, or None.
        grammar_mask: over the rows, or None.
        rows: N.
    """
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling_info is not None and sampling_info.logit_bias is not None:
        logits.view(-1, rows, logits.shape[1]).add_(sampling_info.logit_bias[:, None].to(logits.dtype))


def each_row(sampling_info, rows: int):
    """The sampling parameters of each tree row, for the stock Sampler.

    Args:
        sampling_info: of the batch.
        rows: N, rows a request.

    Returns:
        A SamplingBatchInfo of bs * N entries. What constrain() has applied already is left out.
    """

    def repeat(tensor):
        return (
            None
            if tensor is None
            else torch.repeat_interleave(tensor, rows, dim=0, output_size=tensor.shape[0] * rows)
        )

    return dataclasses.replace(
        sampling_info,
        **{
            name: repeat(getattr(sampling_info, name))
            for name in ("temperatures", "top_ps", "top_ks", "min_ps")
        },
        sampling_seed=repeat(sampling_info.sampling_seed),
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        penalizer_orchestrator=None,
        has_custom_logit_processor=False,
    )


def target_tokens(
    logits: torch.Tensor, sampling_info, sampler, positions: torch.Tensor, rows: int
) -> torch.Tensor:
    """The target's token at each tree row: the argmax, or one sample by the server's own sampler.

    Lossless: the walk takes at every node a draw from p(. | path), so what it emits is distributed as plain decoding.

    Args:
        logits: [bs * N, vocab]; overwritten when sampling.
        sampling_info: of the batch, or None.
        sampler: upstream's Sampler.
        positions: [bs * N] int64.
        rows: N.

    Returns:
        [bs * N] int64.
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        return torch.argmax(logits, dim=-1)
    output = LogitsProcessorOutput(next_token_logits=logits)
    # The sampled token stands one position after its row.
    return sampler(output, each_row(sampling_info, rows), False, [], [], positions).long()


def kv_buffers(pool) -> KVBuffers:
    """The buffers of the target's KV pool, for commit().

    Raises:
        ValueError: a pool whose rows are not one a slot in every layer, or that keeps more than them.
    """
    name = type(pool).__name__
    if getattr(pool, "is_quantized_kv_cache", False):
        raise ValueError(
            "DDTREE: --kv-cache-dtype: expected one that stores a number as a number (auto, bfloat16, fp8_e4m3, "
            f"fp8_e5m2), got {pool.quant_method.name!r}: its scales would not move with the accepted rows."
        )
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ValueError(
            f"DDTREE: KV pool: expected the layout 'nhd', a row a slot, got {pool.kv_cache_layout!r}; unset "
            "SGLANG_USE_HND_KVCACHE."
        )
    if name == "MHATokenToKVPool":
        return KVBuffers.of([*pool.k_buffer, *pool.v_buffer])
    if name == "MLATokenToKVPool":
        return KVBuffers.of(pool.kv_buffer)
    raise ValueError(f"DDTREE: KV pool: expected MHATokenToKVPool or MLATokenToKVPool, got {name}.")
