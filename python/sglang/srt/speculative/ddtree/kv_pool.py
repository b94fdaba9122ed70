"""The target's KV pool, as commit_path() and tree verify need it.

Upstream keeps the KV of most models in one pool, where a token has the same slot in every layer. If only some
layers have a sliding window, SWAKVPool holds two pools: the other layers keep the whole context, and the window
layers have slots of their own, which upstream frees when their tokens leave the window. The slot table names the
slots of the first pool; a table on the device maps them to the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from sgl_kernel.ddtree import Accepted, KVBuffers, commit_path
from sglang.srt.speculative.ddtree.coverage import MLA_SHAPE, has_window, layer_shape

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

WINDOW_POOL = "SWAKVPool"


class KVGroup(NamedTuple):
    """Layers in which a token has the same slot.

    Attributes:
        buffers: K and V of these layers, or their latent rows (MLA). The layers' shapes may differ.
        num_slots: slots of the group's pool.
        slot_of: [slots] int64, this group's slot for each slot that the slot table names; None: the same slot.
    """

    buffers: KVBuffers
    num_slots: int
    slot_of: torch.Tensor | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in all layers of the group."""
        return sum(buffer[0].numel() * buffer.element_size() for buffer in self.buffers.tensors)


def kv_groups(pool: KVCache) -> list[KVGroup]:
    """Describe the target's KV pool.

    Args:
        pool: the target's KV pool.

    Returns:
        One group, or two if the window layers have slots of their own. The order is fixed.

    Raises:
        ValueError: a layer keeps more than one row per slot.
    """
    if type(pool).__name__ != WINDOW_POOL:
        pool = getattr(pool, "full_kv_pool", pool)  # of a target with recurrent layers
        return [KVGroup(KVBuffers.of(_buffers(pool)), pool.size)]
    halves = (
        (pool.full_kv_pool, pool.size, None),
        (pool.swa_kv_pool, pool.size_swa, pool.full_to_swa_index_mapping),
    )
    return [
        KVGroup(KVBuffers.of(buffers), size, slot_of)
        for half, size, slot_of in halves
        if (buffers := _buffers(half))  # every layer may have a window
    ]


def _buffers(pool: KVCache) -> list[torch.Tensor]:
    """Return the buffers of a pool whose layers share their slots."""
    name = type(pool).__name__
    if getattr(pool, "is_quantized_kv_cache", False):
        raise ValueError(
            "DDTREE: --kv-cache-dtype: expected a dtype without separate scales (auto, bfloat16, fp8_e4m3, "
            f"fp8_e5m2), got {pool.quant_method.name!r}: its scales would not move with the accepted KV."
        )
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ValueError(
            "DDTREE: KV pool: expected the layout 'nhd', which keeps a slot's KV contiguous, got "
            f"{pool.kv_cache_layout!r}: unset SGLANG_USE_HND_KVCACHE."
        )
    if name == "MHATokenToKVPool":
        return [*pool.k_buffer, *pool.v_buffer]
    if name == "MLATokenToKVPool":
        return list(pool.kv_buffer)
    raise ValueError(
        f"DDTREE: KV pool: expected MHATokenToKVPool or MLATokenToKVPool, alone or in a {WINDOW_POOL}, got "
        f"{name}, whose layers have their own slots or keep more than one row per slot. Remove the argument "
        "that selects this pool (--help, KV cache), or serve this model without DDTREE."
    )


def refuse_layers(pool: KVCache, layers: Iterable[RadixAttention]) -> None:
    """Refuse layers whose KV the pool cannot hold as the layer reads it.

    Args:
        pool: the target's.
        layers: the layers that a verify runs.

    Raises:
        ValueError: a layer's KV has another shape than its pool's slots, or a layer of the window layers' pool has
            no sliding window.
    """
    for layer in layers:
        shape = layer_shape(layer)[1:]
        if shape != MLA_SHAPE:
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            held = (*keys.shape[1:], values.shape[-1])
            if shape != held:
                raise ValueError(
                    f"DDTREE: target model: expected layers whose KV has their pool's shape (h_kv, d_qk, d_v) = {held}, "
                    f"got {shape} in layer {layer.layer_id}: leave out --disable-hybrid-swa-memory, or serve this "
                    "model without DDTREE."
                )
        if in_window_pool(pool, layer) and not has_window(layer):
            raise ValueError(
                f"DDTREE: target model: expected a sliding window in layer {layer.layer_id}, whose KV is in the pool "
                "that keeps only windows, got none (does it attend in chunks?): serve this model without DDTREE."
            )


def in_window_pool(pool: KVCache, layer: RadixAttention) -> bool:
    """Return whether a layer's KV is in a pool of its own that keeps only the window."""
    return type(pool).__name__ == WINDOW_POOL and pool.layers_mapping[layer.layer_id][1]


def commit_kv(
    groups: Sequence[KVGroup],
    accepted: Accepted,
    slots: torch.Tensor,
    hidden: torch.Tensor,
    hidden_out: torch.Tensor,
) -> None:
    """Move the KV of the accepted paths to the front of their slots in every layer. A graph can capture it.

    Args:
        groups: from kv_groups().
        accepted: the accepted paths of bs requests.
        slots: [bs, N] int64, each node's slot as the slot table names it.
        hidden, hidden_out: as for commit_path().
    """
    states: tuple[torch.Tensor, ...] = (hidden, hidden_out)
    for group in groups:
        # If the request has ended, the scheduler may have given its slots away by now. Their next owner writes to them
        # later on this stream.
        own = slots if group.slot_of is None else group.slot_of[slots]
        commit_path(accepted.path, accepted.lengths, own, group.buffers, *states)
        states = ()  # they move once


class VerifySlots(NamedTuple):
    """The slots that a verify reads in one group of layers, as verify_gqa() and verify_mla() take them.

    Attributes:
        kv_indptr: [bs + 1] int32, start of each request's prefix in kv_indices.
        kv_indices: [*] int64, slots of the prefix tokens.
        prefix_lens: [bs] int32.
        tree_slots: [bs * N] int64, slot of each node.
        page_size: tokens per page, if kv_indices has the whole prefix. Otherwise 1: a part of it may start in the middle
            of a page.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    prefix_lens: torch.Tensor
    tree_slots: torch.Tensor
    page_size: int = 1


def window_slots(
    pool: SWAKVPool,
    table: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    window: int,
) -> VerifySlots:
    """Find the slots of the window layers: those of the nodes, and of the prefix tokens that a root can see.

    To these layers the prefix is as long as the window. Upstream has freed the slots of older tokens, which belong to
    other tokens by now. A window counts from a node's position back, so leaving out the same tokens at the front of prefix
    and position changes nothing. The shapes do not depend on lengths, and a graph can capture it.

    Args:
        pool: the target's.
        table: [requests, width] int32, the slot table.
        rows: [bs] int64, each request's row of it.
        prefix_lens: [bs] int64.
        tree_slots: [bs * N] int64, as the slot table names them.
        window: the widest of the layers, in tokens before the query.

    Returns:
        Slots of the window layers' pool. Entries of kv_indices past a request's prefix are not meant to be read.
    """
    slot_of = pool.full_to_swa_index_mapping
    recent = recent_slots(table, rows, prefix_lens, tree_slots, window)
    return recent._replace(kv_indices=slot_of[recent.kv_indices], tree_slots=slot_of[tree_slots])


def recent_slots(
    table: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor, tree_slots: torch.Tensor, window: int
) -> VerifySlots:
    """Find the slots of the nodes, and of the last tokens of each prefix. A graph can capture it.

    Args:
        table, rows, prefix_lens, tree_slots: as in window_slots().
        window: the most tokens of a prefix.

    Returns:
        Slots as the slot table names them. Entries of kv_indices past a request's prefix are not meant to be read.
    """
    width = min(window, table.shape[1])
    seen = prefix_lens.clamp(max=width)
    positions = (prefix_lens - seen)[:, None] + torch.arange(width, device=table.device)
    return VerifySlots(
        kv_indptr=torch.arange(rows.numel() + 1, dtype=torch.int32, device=table.device) * width,
        kv_indices=table[rows[:, None], positions].flatten(),
        prefix_lens=seen.to(torch.int32),
        tree_slots=tree_slots,
    )


def describe_pools(groups: Sequence[KVGroup], draft_bytes: int) -> str | None:
    """Say what the window layers' pool gains.

    Args:
        groups: the groups of the target.
        draft_bytes: the size of the drafter's pool, which has a slot for each slot of the target's first group.

    Returns:
        A sentence with the tokens of the pools, and those of one pool for all layers in the same memory; None if there
        is only one group.
    """
    if len(groups) == 1:
        return None
    full, window = groups
    memory = draft_bytes + sum(group.num_slots * group.bytes_per_slot for group in groups)
    per_token = sum(group.bytes_per_slot for group in groups) + draft_bytes / full.num_slots
    return (
        f"the KV pools hold {full.num_slots} tokens of context, and {window.num_slots} tokens in the layers with a "
        f"sliding window. One pool for all layers (--disable-hybrid-swa-memory) would hold {int(memory / per_token)} "
        f"in the same {memory / (1 << 30):.2f} GiB."
    )
