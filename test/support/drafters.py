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


def of_each_layer(config: dict[str, Any], name: str, *size: int) -> dict[str, torch.Tensor]:
    """Draw a random weight for each layer of a drafter.

    Args:
        config: the drafter's configuration.
        name: of the weight within a layer.
        size: of the weight.
    """
    layers = range(config["num_hidden_layers"])
    return {f"layers.{i}.{name}": torch.randn(size) * 0.15 for i in layers}
