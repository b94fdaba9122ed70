"""Random LoRA adapters for the target of support.models.write_models(), and requests that use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.engine import Engine, Greedy, LoraIds
from support.prompts import PROMPTS, TOKENS

RANK = 4


def write_adapters(target: str, folder: Path) -> dict[str, Any]:
    """Write two adapters for all projections, so different that most of their answers differ.

    Args:
        target: folder of the target.
        folder: folder to write the adapters' folders into.

    Returns:
        The arguments of an engine that serves them.
    """
    from safetensors.torch import load_file, save_file

    shapes = {
        name.removesuffix(".weight"): weight.shape
        for name, weight in load_file(Path(target) / "model.safetensors").items()
        if "_proj." in name
    }
    paths = []
    for seed, name in enumerate(("one", "other")):
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer, (rows, columns) in shapes.items():
            prefix = f"base_model.model.{layer}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.05
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.4
        adapter = folder / name
        adapter.mkdir()
        save_file(weights, adapter / "adapter_model.safetensors")
        modules = sorted({layer.rsplit(".", 1)[1] for layer in shapes})
        config = dict(peft_type="LORA", r=RANK, lora_alpha=2 * RANK, target_modules=modules, bias="none")
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        paths.append(f"{name}={adapter}")
    return dict(enable_lora=True, lora_paths=paths, max_loras_per_batch=3)


def _lora_ids(engine: Engine) -> LoraIds:
    """An adapter for each of PROMPTS: none, one, the other, and so on."""
    refs = engine.scheduler.tp_worker.model_runner.lora_manager.lora_refs
    ids = [None, *sorted(refs, key=lambda lora_id: refs[lora_id].lora_name)]
    return [ids[i % len(ids)] for i in range(len(PROMPTS))]


class WithAdapters:
    """A job: greedy answers to PROMPTS, each with an adapter or without. It returns a Greedy.

    Args:
        judged: answers of another engine. The job then returns the gaps of these answers and of its own, as "tree" and
            "plain" (see support.answers).
    """

    def __init__(self, judged: list[list[int]] | None = None) -> None:
        self.judged = judged

    def before(self) -> None:
        if not torch.cuda.is_available():
            # Upstream pins what its adapters' kernels read on the host, which needs a device.
            torch.tensor, torch.empty, torch.zeros = map(_unpinned, (torch.tensor, torch.empty, torch.zeros))
            torch.Tensor.pin_memory = lambda tensor: tensor

    def __call__(self, engine: Engine) -> Greedy | dict[str, list[list[float]]]:
        lora_ids = _lora_ids(engine)
        found = engine.greedy(PROMPTS, TOKENS, lora_ids)
        if self.judged is None:
            return found
        answers = {"tree": self.judged, "plain": found.outputs}
        return {name: engine.gaps(PROMPTS, outputs, lora_ids) for name, outputs in answers.items()}


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return made
