"""Targets and drafters of a given shape with random weights.

A step of the demo model consists of kernel launches and host time. A large target is bound by the bandwidth of its
weights. A verify of N nodes reads them once, as plain decoding does for one token. With random weights the drafter knows
nothing of the target, so every algorithm emits about one token per step. Only the time of a step means something.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.engine import Engine

SHAPES = {
    # Llama-3.1-8B, and a drafter with five layers of the same width.
    "8b": dict(
        hidden=4096, inner=14336, heads=32, kv_heads=8, layers=32, vocabulary=128256, drafter_layers=5
    ),
    "tiny": dict(hidden=128, inner=256, heads=2, kv_heads=1, layers=3, vocabulary=512, drafter_layers=2),
}
BLOCK_SIZE = 16


def write_configs(
    folder: Path,
    *,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    layers: int,
    vocabulary: int,
    drafter_layers: int,
) -> dict[str, str]:
    """Write the configs of a target and a drafter; return the engine arguments that name them."""
    common = dict(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, vocab_size=vocabulary, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, dtype="bfloat16",
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    target = dict(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers)
    read = [int((i + 0.5) * (layers - 1) / drafter_layers) for i in range(drafter_layers)]  # evenly spread
    drafter = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=drafter_layers, block_size=BLOCK_SIZE,
        num_target_layers=layers, dflash_config=dict(target_layer_ids=read, mask_token_id=2, block_size=BLOCK_SIZE),
    )  # fmt: skip
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(common | config))
    return dict(model_path=str(folder / "target"), speculative_draft_model_path=str(folder / "drafter"))


def randomize(engine: Engine) -> None:
    """Draw weights of a usual size. Upstream's dummy weights are so small that all logits tie."""
    runners = [engine.scheduler.tp_worker.model_runner]
    if engine.scheduler.draft_worker is not None:
        runners.append(engine.scheduler.draft_worker.draft_model_runner)
    generator = torch.Generator(device=runners[0].device).manual_seed(1)
    with torch.no_grad():
        for runner in runners:
            for weight in runner.model.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=0.02, generator=generator)
                else:
                    weight.fill_(1.0)
