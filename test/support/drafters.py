"""Variants of the drafter of support.models.write_models(), with options that few drafters have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def write_variant(
    drafter: str,
    folder: Path,
    *,
    dflash_config: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> str:
    """Write a copy of a drafter with changes.

    Args:
        drafter: folder of the drafter.
        folder: folder to create.
        dflash_config: entries to add to dflash_config.
        weights: tensors to add, by name.
        changes: entries to set in config.json.

    Returns:
        The new folder.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads(Path(drafter, "config.json").read_text())
    config |= changes
    config["dflash_config"] |= dflash_config or {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(Path(drafter, "model.safetensors")) | (weights or {}), folder / "model.safetensors")
    return str(folder)


def write_speculators(
    drafter: str, folder: Path, *, tokens: list[int] | None = None, head: str | None = None
) -> str:
    """Write a drafter in the layout of the Speculators library.

    Args:
        drafter: folder of a plain drafter, or of one with a selector.
        folder: folder to create.
        tokens: tokens of the drafter's own LM head, in rising order. None: it has none.
        head: folder of the target whose LM head has the head's rows.

    Returns:
        The new folder.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads(Path(drafter, "config.json").read_text())
    dflash_config = config.pop("dflash_config")
    selector = "selector_rank" in dflash_config
    vocabulary = config["vocab_size"]
    layers = {
        key: value for key, value in config.items() if key not in ("architectures", "block_size", "dtype")
    }
    content = dict(
        architectures=["DFlash2DraftModel" if selector else "DFlashDraftModel"],
        speculators_model_type="dflash2" if selector else "dflash",
        speculators_config=dict(algorithm="dflash", verifier=dict(name_or_path="target")),
        transformer_layer_config=layers | dict(model_type="llama"),
        aux_hidden_state_layer_ids=[layer + 1 for layer in dflash_config.pop("target_layer_ids")],
        draft_vocab_size=vocabulary if tokens is None else len(tokens),
        block_size=config["block_size"], dtype=config["dtype"], sample_from_anchor=False, target_hidden_size=None,
    )  # fmt: skip
    weights = {
        f"{name}.weight" if name.endswith("_codebook") else name: weight
        for name, weight in load_file(Path(drafter, "model.safetensors")).items()
    }
    if tokens is not None:
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        mask[tokens] = True
        rows = load_file(Path(str(head), "model.safetensors"))["lm_head.weight"][mask]
        weights |= {
            "lm_head.weight": rows,
            "t2d": mask,
            "d2t": torch.tensor(tokens) - torch.arange(len(tokens)),
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content | dflash_config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def variants(drafter: str) -> dict[str, dict[str, Any]]:
    """Describe variants that draft other trees than the drafter.

    Args:
        drafter: folder of the drafter.

    Returns:
        By name, the arguments of write_variant(). Random weights are the same in every call.
    """
    torch.manual_seed(1)
    config = json.loads(Path(drafter, "config.json").read_text())
    hidden, heads, size = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    layers = range(config["num_hidden_layers"])

    def of_each_layer(name: str, *shape: int) -> dict[str, torch.Tensor]:
        return {f"layers.{i}.{name}": torch.randn(shape) * 0.15 for i in layers}

    convolutions: dict[str, torch.Tensor] = {}
    for name in ("attention_conv", "mlp_conv"):  # two taps before and two after, in four groups of channels
        convolutions |= of_each_layer(f"{name}.base_kernel", 2, 2, hidden)
        convolutions |= of_each_layer(f"{name}.kernel_projection.weight", 2 * 2 * 4, hidden)
    window = dict(sliding_window=7, use_sliding_window=True)
    return {
        "block of 16": dict(dflash_config=dict(block_size=16)),
        "block of 32": dict(dflash_config=dict(block_size=32)),
        "scaled and capped logits": dict(
            dflash_config=dict(output_multiplier=0.3, final_logit_softcapping=2.0)
        ),
        "causal sliding windows": dict(layer_types=["sliding_attention"] * 2, **window),
        "a sliding window that is not causal": dict(
            layer_types=["sliding_attention", "full_attention"], is_causal=False, **window
        ),
        "sinks and scaled values": dict(
            dflash_config=dict(attention_sink_bias=True, attention_value_scale=0.7),
            weights=of_each_layer("self_attn.attention_sink_bias", heads),
        ),
        "convolutions": dict(
            dflash_config=dict(conv_kernel_size=2, conv_group_size=hidden // 4), weights=convolutions
        ),
        # A gate after the attention, and a norm for each target layer that the drafter reads.
        "Laguna": dict(
            architectures=["DFlashLagunaForCausalLM"],
            gating=True,
            weights=of_each_layer("self_attn.g_proj.weight", heads * size, hidden)
            | {f"aux_hidden_norms.{i}.weight": torch.ones(hidden) for i in layers},
        ),
    }
