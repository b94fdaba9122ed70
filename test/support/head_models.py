"""Drafters with heads that know the path, on top of the drafter of support.models.write_models()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

HEADS = ("selector", "domino", "lilicorr")
CANDIDATES = 8  # K of the heads that know one
RANK = 16


def write_head(drafter: str, folder: Path, head: str, *, seed: int = 5) -> str:
    """Write a drafter with a random head. Its corrections are as large as the drafter's logits.

    Args:
        drafter: folder of the drafter of write_models().
        folder: folder to create.
        head: one of HEADS.
        seed: seed of the head's weights.

    Returns:
        The new folder.
    """
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    config = json.loads(Path(drafter, "config.json").read_text())
    make = {"selector": _selector, "domino": _domino, "lilicorr": _lilicorr}[head]
    architecture, keys, weights = make(config)
    config["architectures"] = [architecture]
    config["dflash_config"] |= keys
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(Path(drafter, "model.safetensors")) | weights, folder / "model.safetensors")
    return str(folder)


Head = tuple[str, dict[str, Any], dict[str, torch.Tensor]]  # architecture, keys of dflash_config, weights


def _selector(config: dict[str, Any]) -> Head:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    prefix = "candidate_selector"
    weights = {
        f"{prefix}.predecessor_codebook": torch.randn(vocabulary, RANK),
        f"{prefix}.successor_codebook": torch.randn(vocabulary, RANK),
        f"{prefix}.hidden_projection.weight": torch.randn(RANK, hidden) * 0.1,
    }
    return "DFlash2DraftModel", dict(selector_rank=RANK, selector_top_k=CANDIDATES), weights


def _domino(config: dict[str, Any]) -> Head:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    width = 24  # of the GRU
    keys = dict(
        projector_type="domino",
        shift_label=False,
        pure_draft_prefix_len=1,
        gru_hidden_dim=width,
        emb_dim=RANK,
    )
    weights = {
        "prefix_gru.weight_ih_l0": torch.randn(3 * width, hidden) * 0.5,
        "prefix_gru.weight_hh_l0": torch.randn(3 * width, width) * 0.5,
        "embed_proj.0.weight": torch.randn(RANK, hidden + width) * 0.3,
        "embed_proj.2.weight": torch.randn(vocabulary, RANK),
    }
    return "DFlashDraftModel", keys, weights


def _lilicorr(config: dict[str, Any]) -> Head:
    hidden, slots = config["hidden_size"], config["block_size"] - 1
    width, heads, factor = 64, 2, 8
    keys = dict(
        lilicorr_candidate_topk=CANDIDATES, lilicorr_hidden_size=width, lilicorr_num_layers=1, lilicorr_num_heads=heads,
        lilicorr_mlp_ratio=2.0, lilicorr_factor_dim=factor, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=4.0,
    )  # fmt: skip
    linear = dict(
        token_proj=(width, hidden), pass_hidden_proj=(width, hidden), context_proj=(width, hidden),
        factor_input_proj=(width, 3 * width), out_head=(factor, width), in_head=(factor, width),
        anchor_out_head=(factor, width),
    ) | {
        "feature_mlp.up_proj": (width, 5), "feature_mlp.down_proj": (width, width),
        "layers.0.attn.out_proj": (width, width), "layers.0.mlp.up_proj": (2 * width, width),
        "layers.0.mlp.down_proj": (width, 2 * width),
    }  # fmt: skip
    weights = {
        "slot_embedding": torch.randn(1, 1, slots, 1, width),
        "rank_embedding": torch.randn(1, 1, 1, CANDIDATES, width),
        "relative_slot_bias": torch.randn(heads, 2 * slots + 1),
        "same_slot_bias": torch.randn(heads),
        "feature_norm.weight": torch.ones(5),
        "feature_norm.bias": torch.zeros(5),
        "layers.0.attn.in_proj_weight": torch.randn(3 * width, width) * 0.1,
        "layers.0.attn.in_proj_bias": torch.randn(3 * width) * 0.1,
    }
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
        weights[f"{name}.weight"] = torch.ones(width)
    for name, size in linear.items():
        weights[f"{name}.weight"] = torch.randn(size) * size[1] ** -0.5
        weights[f"{name}.bias"] = torch.randn(size[0]) * 0.1
    return "LiLiCorrDraftModel", keys, {f"lilicorr.{name}": weight for name, weight in weights.items()}
