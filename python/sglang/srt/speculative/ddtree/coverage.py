"""Which attention a model needs, and which parts of it the tree ops and other backends cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import GQA_HEAD_SIZES, MLA_HEAD_SIZES
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

MLA_SHAPE = (1, *MLA_HEAD_SIZES)  # h_kv, d_qk and d_v of verify_mla()


def verify_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Return the attention layers that a verify runs.

    An MLA layer has two: the absorbed one, which a verify runs, and an unabsorbed one for prefill.
    """
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    absorbed = [layer for layer in layers if layer_shape(layer)[1:] == MLA_SHAPE]
    return absorbed or layers


def layer_shape(layer: RadixAttention) -> tuple[int, int, int, int]:
    """Return (h_q, h_kv, d_qk, d_v) of a layer on this rank."""
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim


def is_causal(layer: Any) -> bool:
    """Return whether a position of a draft block sees only itself and those before it.

    Args:
        layer: as for has_window().
    """
    return layer.attn_type == AttentionType.DECODER


def has_window(layer: Any) -> bool:
    """Return whether a layer has a sliding window.

    Args:
        layer: the layer, or a description of it with the same attributes.
    """
    return layer.sliding_window_size not in (None, -1)


def widest_window(model: torch.nn.Module) -> int | None:
    """Return the largest sliding window of a model's layers, in tokens before the query, or None."""
    windowed = [layer.sliding_window_size for layer in verify_layers(model) if has_window(layer)]
    return max(windowed, default=None)


def is_scaled(layer: RadixAttention) -> bool:
    """Return whether a checkpoint asks to store K and V divided by scales other than 1.

    With an FP8 checkpoint every layer has scales, whatever the dtype of the KV cache. Most are 1.
    """
    return any(scale not in (None, 1.0) for scale in (layer.k_scale_float, layer.v_scale_float))


def applies_scales(layer: RadixAttention, kv_cache_dtype: torch.dtype) -> bool:
    """Return whether the pool and the tree ops apply a layer's scales. They do for MHA in float8 only."""
    return kv_cache_dtype == torch.float8_e4m3fn and layer_shape(layer)[1:] != MLA_SHAPE


def has_kernel(shape: tuple[int, int, int, int]) -> bool:
    """Return whether the tree ops have a kernel for a layer_shape()."""
    _, _, d_qk, d_v = shape
    return shape[1:] == MLA_SHAPE or (d_qk == d_v and d_qk in GQA_HEAD_SIZES)


def attention_gaps(
    shapes: Iterable[tuple[int, int, int, int]],
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: str,
) -> list[str]:
    """Name the parts of attention that the tree ops do not cover.

    Args:
        shapes: the shapes of the layers, as layer_shape() returns them.
        dtype: the dtype of the queries.
        kv_cache_dtype: the dtype of the KV pool.
        device: the type of the device.

    Returns:
        One phrase per gap.
    """
    gaps = [
        f"attention of (h_q, h_kv, d_qk, d_v) = {shape}"
        for shape in sorted(set(shapes))
        if not has_kernel(shape)
    ]
    if device == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        gaps.append(f"queries in {dtype}")
    if kv_cache_dtype not in (dtype, torch.float8_e4m3fn):
        gaps.append(f"a KV cache in {kv_cache_dtype}")
    return gaps


def not_covered(runner: ModelRunner) -> list[str]:
    """Name the parts of a model's attention that the tree ops do not cover.

    Args:
        runner: the target's or the drafter's ModelRunner.

    Returns:
        One phrase per gap; empty if the tree ops cover the model.
    """
    layers = verify_layers(runner.model)
    gaps = attention_gaps(
        map(layer_shape, layers),
        dtype=runner.dtype,
        kv_cache_dtype=runner.kv_cache_dtype,
        device=torch.device(runner.device).type,
    )
    if any(layer.xai_temperature_len > 0 for layer in layers):
        gaps.append("attention temperature by position")
    if any(is_scaled(layer) and not applies_scales(layer, runner.kv_cache_dtype) for layer in layers):
        gaps.append(
            f"scales of K and V other than 1 with this attention and a KV cache in {runner.kv_cache_dtype}"
        )
    return gaps


def block_gaps(layers: Iterable[Any]) -> list[str]:
    """Name the parts of a draft block's attention that the tree ops do not cover, besides attention_gaps().

    Args:
        layers: the layers of the drafter, as for has_window().
    """
    # The tree ops count a window from a node's depth, which is the same at all positions of such a block.
    if any(not is_causal(layer) and has_window(layer) for layer in layers):
        return ["sliding windows in a draft block that is not causal"]
    return []


def draft_window_fault(gaps: list[str]) -> str:
    """Say why a drafter with these gaps, at least one, cannot have a draft window."""
    return (
        "DDTREE: --speculative-draft-window-size: expected a drafter that the tree ops cover, got "
        f"{'; '.join(gaps)}: leave the argument out."
    )


def not_prefilled_by_torch(runner: ModelRunner) -> list[str]:
    """Name what SGLang's torch backend (0.5.23) cannot prefill. It lacks MLA and sinks, and ignores the rest.

    Args:
        runner: the target's ModelRunner.

    Returns:
        One phrase per gap; empty if the backend prefills the model correctly.
    """
    layers = verify_layers(runner.model)
    gaps = {
        "capped attention logits": any(layer.logit_cap for layer in layers),
        # On a CPU, DDTREE's wrapper of this backend translates the slots.
        "a KV pool for sliding windows (unless --disable-hybrid-swa-memory is given)": (
            runner.is_hybrid_swa and torch.device(runner.device).type == "cuda"
        ),
        "scales of K and V other than 1": any(
            is_scaled(layer) and applies_scales(layer, runner.kv_cache_dtype) for layer in layers
        ),
    }
    known = torch_prefill_gaps(mla=runner.use_mla_backend, sinks=runner.model_config.has_attention_sinks)
    return known + [name for name, present in gaps.items() if present]


def torch_prefill_gaps(*, mla: bool, sinks: bool) -> list[str]:
    """Name those gaps of not_prefilled_by_torch() that a configuration alone shows.

    Args:
        mla: whether the target runs MLA.
        sinks: whether it has attention sinks.
    """
    return [name for name, present in {"MLA": mla, "attention sinks": sinks}.items() if present]


def torch_prefill_fault(gaps: list[str]) -> str:
    """Say why SGLang's torch backend cannot prefill a target with these gaps, at least one."""
    return (
        f"DDTREE: --prefill-attention-backend: expected a backend that supports {' and '.join(gaps)}, such as 'triton' on "
        "CUDA, got 'torch_native'."
    )
