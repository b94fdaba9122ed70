"""Describes the target's KV pool for commit_path()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kernel.ddtree import KVBuffers

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


def kv_buffers(pool: KVCache) -> KVBuffers:
    """Describe the buffers of the target's KV pool for commit_path().

    Args:
        pool: the target's KV pool.

    Returns:
        K and V of every layer, or the latent rows of every layer (MLA).

    Raises:
        ValueError: a layer keeps more than one row per slot, or has slots of its own.
    """
    pool = getattr(pool, "full_kv_pool", pool)  # of a target with recurrent layers
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
        return KVBuffers.of([*pool.k_buffer, *pool.v_buffer])
    if name == "MLATokenToKVPool":
        return KVBuffers.of(pool.kv_buffer)
    raise ValueError(
        f"DDTREE: KV pool: expected MHATokenToKVPool or MLATokenToKVPool, got {name}, whose layers have "
        "their own slots or keep more than one row per slot. Remove the argument that selects this pool "
        "(--help, KV cache), or serve this model without DDTREE."
    )
