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
from transformers import Qwen3_5Config

MLA = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SHAPES = {
    # Llama-3.1-8B, and a drafter with five layers of the same width.
    "8b": dict(
        hidden=4096, inner=14336, heads=32, kv_heads=8, layers=32, vocabulary=128256, drafter_layers=5
    ),
    # The same with DeepSeek's MLA in place of GQA. All layers are dense.
    "8b-mla": dict(
        hidden=4096, inner=14336, heads=32, kv_heads=8, layers=32, vocabulary=128256, drafter_layers=5, mla=MLA
    ),
    # Qwen3.5-27B, whose text model is whole and whose vision tower has one layer. The drafter has heads of 128.
    "qwen3.5-27b": dict(
        hidden=5120, inner=17408, heads=40, kv_heads=8, layers=64, vocabulary=248320, drafter_layers=5,
        gdn=dict(
            num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
            linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        ),
    ),
    "tiny": dict(hidden=128, inner=256, heads=2, kv_heads=1, layers=3, vocabulary=512, drafter_layers=2),
    "tiny-mla": dict(
        hidden=128, inner=256, heads=2, kv_heads=1, layers=3, vocabulary=512, drafter_layers=2, mla=MLA
    ),
    "tiny-qwen3.5": dict(
        hidden=128, inner=256, heads=2, kv_heads=1, layers=4, vocabulary=512, drafter_layers=2,
        gdn=dict(
            num_attention_heads=2, num_key_value_heads=1, head_dim=64, linear_num_key_heads=2,
            linear_num_value_heads=6, linear_key_head_dim=64, linear_value_head_dim=64,
        ),
    ),
}  # fmt: skip
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
    gdn: dict[str, int] | None = None,
    mla: dict[str, int] | None = None,
) -> dict[str, str]:
    """Write the configs of a target and a drafter; return the engine arguments that name them.

    Args:
        folder: the folder to write into.
        hidden, inner, heads, kv_heads, layers, vocabulary, drafter_layers: of both models.
        gdn: the target is a Qwen3.5 with these attention and GDN heads. Three of four layers are GDN layers.
        mla: the target is a DeepSeek-V2 with heads of these sizes.
    """
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
    if mla is not None:
        target = dict(
            architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_hidden_layers=layers,
            num_key_value_heads=heads, head_dim=mla["qk_rope_head_dim"], q_lora_rank=None, first_k_dense_replace=layers, moe_layer_freq=1, n_routed_experts=4,
            n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1,
            topk_method="greedy", scoring_func="softmax",
            rope_scaling=dict(type="yarn", rope_type="yarn", factor=2.0, original_max_position_embeddings=65536, beta_fast=32,
                              beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        )  # fmt: skip
        (folder / "target" / "config.json").write_text(json.dumps(common | target | mla))
    if gdn is not None:
        config = Qwen3_5Config(
            text_config=common
            | gdn
            | dict(
                num_hidden_layers=layers,
                full_attention_interval=4,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            ),
            vision_config=dict(depth=1, out_hidden_size=hidden),
            architectures=["Qwen3_5ForConditionalGeneration"],
            tie_word_embeddings=False,
        )
        config.save_pretrained(folder / "target")
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
