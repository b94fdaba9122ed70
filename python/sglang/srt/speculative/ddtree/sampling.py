"""Picks the target's token at every node: constrains the logits, then samples them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# Logits that are penalized or sampled in one chunk. Penalties briefly take about five times their float32
# size, sampling up to twelve times (808 MB on an H200, top-p in torch). A large batch at once would take
# gigabytes, which a server with a full KV pool does not have.
LOGITS_PER_CHUNK = 1 << 24
# If no request filters its probabilities or has a seed, sampling takes less than four times their size. Each chunk costs
# the host about 0.3 ms of launches.
LOGITS_PER_PLAIN_CHUNK = 1 << 26


def constrain(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo | None,
    grammar_mask: GrammarMask | None,
    num_nodes: int,
) -> None:
    """Apply grammar and logit bias to the target's logits, in place and in upstream's order.

    If the grammar forbids every token at a node, the mask keeps token 0 (dead_end.py).

    Args:
        logits: [bs * N, vocabulary].
        sampling_info: the sampling parameters of the batch.
        grammar_mask: covers all nodes.
        num_nodes: N.
    """
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling_info is not None and sampling_info.logit_bias is not None:
        logits.view(-1, num_nodes, logits.shape[1]).add_(sampling_info.logit_bias[:, None].to(logits.dtype))


def per_node_sampling_info(
    sampling_info: SamplingBatchInfo, num_nodes: int
) -> Callable[[slice | torch.Tensor], SamplingBatchInfo]:
    """Repeat each request's sampling parameters for each of its nodes.

    Args:
        sampling_info: the sampling parameters of the batch.
        num_nodes: N.

    Returns:
        A function from a slice or an index into the bs * N nodes to the SamplingBatchInfo of these nodes. It
        omits what constrain() and the penalties have applied already.
    """
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    repeated = {
        name: torch.repeat_interleave(values, num_nodes, dim=0, output_size=values.shape[0] * num_nodes)
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
    return lambda nodes: dataclasses.replace(
        sampling_info, **applied, **{name: values[nodes] for name, values in repeated.items()}
    )


def nodes_per_call(sampling_info: SamplingBatchInfo, vocab_size: int, keep_logits: bool) -> int:
    """Return how many nodes one call of the sampler takes.

    Args:
        sampling_info: the sampling parameters of the batch.
        vocab_size: logits per node.
        keep_logits: whether sampling works on a copy of the logits.
    """
    info = sampling_info
    filters = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    is_plain = not filters and info.sampling_seed is None and not keep_logits
    return max(1, (LOGITS_PER_PLAIN_CHUNK if is_plain else LOGITS_PER_CHUNK) // vocab_size)


def target_tokens(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo | None,
    sampler: Sampler,
    positions: torch.Tensor,
    *,
    sampled: list[int],
    keep_logits: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pick the target's token at every node: the argmax, or one sample from the server's own sampler.

    This is what makes DDTREE lossless. The token at each node is a draw from p(. | path to the node), so the
    tokens of the accepted path are distributed as in plain decoding.

    Args:
        logits: [bs * N, vocabulary]. The logits of sampled requests are overwritten.
        sampling_info: the batch's; may be None if `sampled` is empty.
        sampler: upstream's Sampler. It gets at most nodes_per_call() nodes per call, because upstream's memory
            reserve does not include its copies (probabilities, sorted values, indices, cumulative sums).
        positions: [bs * N] int64.
        sampled: indices of the requests that are not greedy.
        keep_logits: sample from copies, and overwrite nothing.
        out: [bs * N] int64 to write into, or None to allocate.

    Returns:
        [bs * N] int64.
    """
    tokens = torch.empty_like(positions) if out is None else out
    if not sampled:
        return torch.argmax(logits, dim=-1, out=tokens)
    assert sampling_info is not None  # upstream makes one for every batch that samples
    bs = len(sampling_info)
    num_nodes = logits.shape[0] // bs
    if len(sampled) == bs:
        index = None
    else:
        requests = async_h2d(sampled, dtype=torch.int64, device=logits.device)
        index = (requests[:, None] * num_nodes + torch.arange(num_nodes, device=logits.device)).flatten()
        torch.argmax(logits, dim=-1, out=tokens)
    info_of = per_node_sampling_info(sampling_info, num_nodes)
    chunk = nodes_per_call(sampling_info, logits.shape[1], keep_logits)
    for start in range(0, len(sampled) * num_nodes, chunk):
        nodes = slice(start, start + chunk)
        nodes = nodes if index is None else index[nodes]
        chosen = logits[nodes]
        if keep_logits and index is None:  # an index copies already
            chosen = chosen.clone()
        output = LogitsProcessorOutput(next_token_logits=chosen)
        tokens[nodes] = sampler(output, info_of(nodes), False, [], [], positions[nodes]).long()
    return tokens
