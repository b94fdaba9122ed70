"""After the verify forward: the target's token at each tree row, and the KV pool that the walk's rows move in."""

from __future__ import annotations

import dataclasses

import torch
from sgl_kernel.ddtree import KVBuffers
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.ddtree.penalties import LOGITS_AT_ONCE
from sglang.srt.utils.common import async_h2d


def constrain(logits: torch.Tensor, sampling_info, grammar_mask, rows: int) -> None:
    """Applies grammar and logit bias to the target's logits, in place and in upstream's order.

    Where a grammar and what else forbids tokens leave none (a grammar that the vocabulary cannot spell, a minimum length
    past its end), token 0 stays, the one that argmax gives there. The grammar then refuses it and upstream ends that
    request; a sampler's NaN would end the server.

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
    if grammar_mask is not None:
        logits[:, 0].masked_fill_(logits.amax(-1) == -float("inf"), 0.0)


def each_row(sampling_info, rows: int):
    """The sampling parameters of each tree row, for the stock Sampler.

    Args:
        sampling_info: of the batch.
        rows: N, rows a request.

    Returns:
        A function that makes a SamplingBatchInfo of some of the bs * N rows, chosen by a slice or an index. What
        constrain() has applied already is left out.
    """
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    each = {
        name: torch.repeat_interleave(values, rows, dim=0, output_size=values.shape[0] * rows)
        for name in names
        if (values := getattr(sampling_info, name)) is not None
    }
    applied = dict(
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        penalizer_orchestrator=None,
        has_custom_logit_processor=False,
    )
    return lambda part: dataclasses.replace(
        sampling_info, **applied, **{name: values[part] for name, values in each.items()}
    )


def target_tokens(
    logits: torch.Tensor,
    sampling_info,
    sampler,
    positions: torch.Tensor,
    *,
    sampled: list[int],
    keep_logits: bool = False,
) -> torch.Tensor:
    """The target's token at each tree row: the argmax, or one sample by the server's own sampler.

    Lossless: the walk takes at every node a draw from p(. | path), so what it emits is distributed as plain decoding.

    Args:
        logits: [bs * N, vocab]; those of sampled rows are overwritten.
        sampling_info: of the batch; None if none is sampled.
        sampler: upstream's Sampler. It is given LOGITS_AT_ONCE at most, as its copies of them (probabilities, sorted, with
            their indices, cumulated) are not part of what upstream reserves for a batch's logits.
        positions: [bs * N] int64.
        sampled: the batch's requests that are not greedy.
        keep_logits: overwrite nothing.

    Returns:
        [bs * N] int64.
    """
    if not sampled:
        return torch.argmax(logits, dim=-1)
    rows = logits.shape[0] // len(sampling_info)
    if len(sampled) == len(sampling_info):
        index, tokens = None, torch.empty_like(positions)
    else:
        requests = async_h2d(sampled, dtype=torch.int64, device=logits.device)
        index = (requests[:, None] * rows + torch.arange(rows, device=logits.device)).flatten()
        tokens = torch.argmax(logits, dim=-1)
    of_rows = each_row(sampling_info, rows)
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[1])
    for first in range(0, len(sampled) * rows, at_once):
        part = slice(first, first + at_once)
        part = part if index is None else index[part]
        chosen = logits[part]
        if keep_logits and index is None:
            chosen = chosen.clone()
        output = LogitsProcessorOutput(next_token_logits=chosen)
        tokens[part] = sampler(output, of_rows(part), False, [], [], positions[part]).long()
    return tokens


def kv_buffers(pool) -> KVBuffers:
    """The buffers of the target's KV pool, for commit_path().

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
    raise ValueError(
        f"DDTREE: KV pool: expected MHATokenToKVPool or MLATokenToKVPool, got {name}, whose layers keep more than a row a slot "
        "or have slots of their own: drop the argument that asks for it (--help: KV cache), or serve this model without "
        "DDTREE."
    )
