"""What DDTREE reads from a target's configuration: whether it can serve the target, and what the target keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    is_deepseek_dsa,
    is_deepseek_v4,
    is_minimax_sparse,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ddtree.checkpoint import TARGET_FLAG
from sglang.srt.speculative.ddtree.recurrent_state import kind_gaps, state_gaps

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

# With one of these methods a model of SGLang gives the drafter its hidden states. All take outputs of layers.
CAPTURE = "set_dflash_layers_to_capture"
OTHER_CAPTURES = ("set_dspark_layers_to_capture", "set_eagle3_layers_to_capture")


def offer_capture(model: Any) -> None:
    """Let the drafter read the hidden states of a target that offers them under another method's name.

    Upstream (0.5.23) asks for DFLASH's name, which Kimi-Linear, MiniMax-M2, Qwen2, GLM-4 MoE and others lack.
    """
    for name in OTHER_CAPTURES:
        if hasattr(model, name) and not hasattr(model, CAPTURE):
            setattr(model, CAPTURE, getattr(model, name))


def input_embedding(model: Any) -> Any:
    """Return a target's input embedding, a module.

    MiniMax-M2's get_input_embeddings() embeds ids instead of returning the module.

    Args:
        model: the target.
    """
    if inspect.signature(model.get_input_embeddings).parameters:
        return model.model.embed_tokens
    return model.get_input_embeddings()


class KVLayers(NamedTuple):
    """Attention layers of one shape.

    Attributes:
        num_layers: how many.
        shape: (h_q, h_kv, d_qk, d_v) on a rank, as layer_shape() has it.
        latent: whether they keep one row per token for both K and V (MLA).
        windowed: whether their KV is in a pool that keeps only windows.
    """

    num_layers: int
    shape: tuple[int, int, int, int]
    latent: bool = False
    windowed: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in these layers, on a rank."""
        _, h_kv, d_qk, d_v = self.shape
        return self.num_layers * h_kv * (d_qk if self.latent else d_qk + d_v) * dtype.itemsize


def kv_layers(config: ModelConfig, tp_size: int) -> list[KVLayers]:
    """Describe the layers that keep KV.

    Args:
        config: the configuration of a model.
        tp_size: the number of ranks that share the heads.

    Returns:
        One entry per shape and pool.
    """
    h_q = config.get_num_attention_heads(tp_size)
    if config.attention_arch == AttentionArch.MLA:
        latent = config.kv_lora_rank
        shape = (h_q, 1, latent + config.qk_rope_head_dim, latent)
        return [KVLayers(_attention_layers(config), shape, latent=True)]
    shape = (h_q, config.get_num_kv_heads(tp_size), config.head_dim, config.v_head_dim)
    windowed = config.swa_attention_layer_ids
    if not windowed:
        return [KVLayers(_attention_layers(config), shape)]
    own = (h_q, config.get_swa_num_kv_heads(tp_size), config.swa_head_dim, config.swa_v_head_dim)
    full = len(config.full_attention_layer_ids)
    return [KVLayers(full, shape), KVLayers(len(windowed), own, windowed=True)]


def _attention_layers(config: ModelConfig) -> int:
    """Return how many layers of a model without window pools keep KV."""
    recurrent = mambaish_config(config)
    return config.num_attention_layers if recurrent is None else len(recurrent.full_attention_layer_ids)


def _parallel_context(tp_size: int) -> dict[str, Any]:
    """Return what recurrent layers' configurations read from SGLang's parallel context, which only a server has."""
    return dict(attn_tp_size=tp_size, tp_size=tp_size, enable_cp_tp_group_sharing=False)


def state_bytes(config: ModelConfig, tp_size: int) -> int:
    """Return the bytes of a request's recurrent states and convolution windows on a rank; 0 without such layers."""
    recurrent = mambaish_config(config)
    if recurrent is None:
        return 0
    with get_parallel().override(**_parallel_context(tp_size)):
        return recurrent.mamba2_cache_params.mamba_cache_per_req


def refuse_target(args: ServerArgs) -> None:
    """Refuse a target whose configuration says that it keeps data that DDTREE cannot commit or take back.

    Args:
        args: the server's arguments.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    config = model_config_of(args)
    prefix = f"DDTREE: {TARGET_FLAG}: {args.model_path}: expected"
    if (kind := _sparse_kind(config)) is not None:
        raise ArgumentRefused(
            f"{prefix} layers that keep one row of K and V per token, got {kind}: its other data per token would "
            "not move with the accepted KV."
        )
    if mambaish_config(config) is None:
        return
    if gaps := kind_gaps(config):
        raise ArgumentRefused(f"{prefix} recurrent layers that the tree ops cover, got {gaps[0]}.")
    if args.enable_streaming_session:
        raise ArgumentRefused(
            "DDTREE: --enable-streaming-session: expected no value for a target with recurrent layers, got True: a state "
            "cannot go back to a stop inside a step. Leave it out, or serve without DDTREE."
        )


def _sparse_kind(config: ModelConfig) -> str | None:
    """Name the sparse attention of a target; None if it has none."""
    from sglang.srt.layers.attention.qsa.config import parse_qsa_profile

    if is_deepseek_v4(config.hf_config):
        return "DeepSeek-V4's compressed attention"
    if is_deepseek_dsa(config.hf_config) or is_deepseek_dsa(config.hf_text_config):
        return "the indexer of DeepSeek's sparse attention (DSA)"
    if is_minimax_sparse(config.hf_config):
        return "the indexer of MiniMax's sparse attention"
    if parse_qsa_profile(config.hf_config) is not None:
        return "the indexer of Qwen's sparse attention (QSA)"
    return None


def target_faults(config: ModelConfig, *, device: str, num_nodes: int) -> Iterator[str]:
    """Name the other reasons for which the worker would refuse a target.

    The worker may find more reasons, because it sees the layers themselves.

    Args:
        config: the configuration of a target that refuse_target() accepts.
        device: the type of the device.
        num_nodes: N.

    Yields:
        For each reason, what was expected and what was given.
    """
    from sglang.srt.models.registry import ModelRegistry

    model, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    if not any(hasattr(model, name) for name in (CAPTURE, *OTHER_CAPTURES)):
        yield (
            f"expected a model with {CAPTURE}(), which gives a drafter its hidden states, got {model.__name__}: SGLang "
            "does not support DFLASH for it either."
        )
    if mambaish_config(config) is None:
        return
    with get_parallel().override(**_parallel_context(1)):
        params = mambaish_config(config).mamba2_cache_params
    h_v, d_v, d_k = params.shape.temporal
    sizes = [(d_k, d_v)] if h_v * d_v * d_k else []  # short convolutions alone have no state
    if gaps := state_gaps(params.dtype, sizes, dtype=config.dtype, device=device, num_nodes=num_nodes):
        yield f"expected recurrent layers that the tree ops cover, got {'; '.join(gaps)}."
