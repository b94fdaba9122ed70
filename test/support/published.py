"""Published DFlash drafters, and facts about the configurations of their targets.

The facts were written down by hand: architecture, kinds of layers, head sizes and hidden size. Numbers of layers,
experts and requests are cut, because no rule depends on them. Each drafter is a configuration of its kind that fits the
target.

    python -m support.published     prints the tables of docs/ddtree-drafters.md
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.speculative.ddtree.verdict import Verdict, check

SERVER = ["--device", "cuda", "--speculative-draft-load-format", "dummy"]  # no weights are there
LAYERS = 4
WINDOWS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
HYBRID = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]


def _facts(
    architecture: str, model_type: str, hidden: int, heads: int, kv_heads: int, head: int, **more: Any
) -> dict:
    """Return a configuration without nesting."""
    return dict(
        architectures=[architecture], model_type=model_type, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=LAYERS, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head,
        vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, hidden_act="silu", dtype="bfloat16",
    ) | more  # fmt: skip


def _nested(architecture: str, model_type: str, text: dict, **more: Any) -> dict:
    """Return the configuration of a model that also sees: the facts of its text model are nested."""
    text = {key: value for key, value in text.items() if key != "architectures"}
    return (
        dict(architectures=[architecture], model_type=model_type, text_config=text, dtype="bfloat16") | more
    )


GDN = dict(
    layer_types=HYBRID, full_attention_interval=LAYERS, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
MLA = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=768)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=768, first_k_dense_replace=1)
KDA = dict(kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=96, head_dim=128, short_conv_kernel_size=4)

TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3": _facts("Qwen3ForCausalLM", "qwen3", 4096, 32, 8, 128),
    "Qwen3-MoE": _facts("Qwen3MoeForCausalLM", "qwen3_moe", 2048, 32, 4, 128, **EXPERTS),
    "Llama 3.1": _facts("LlamaForCausalLM", "llama", 4096, 32, 8, 128, vocab_size=128256),
    "gpt-oss": _facts(
        "GptOssForCausalLM", "gpt_oss", 2880, 64, 8, 64, vocab_size=201088, sliding_window=128, layer_types=WINDOWS,
        num_local_experts=8, num_experts_per_tok=4,
    ),
    "Qwen3-Next": _facts("Qwen3NextForCausalLM", "qwen3_next", 2048, 16, 2, 256, **EXPERTS, **GDN),
    "Qwen3.5": _nested(
        "Qwen3_5ForConditionalGeneration", "qwen3_5",
        _facts("Qwen3_5ForCausalLM", "qwen3_5_text", 4096, 16, 4, 256, vocab_size=248320, **GDN),
    ),
    "Qwen3.5-MoE": _nested(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        _facts("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 2048, 16, 2, 256, vocab_size=248320, **EXPERTS, **GDN),
    ),
    "Kimi-K2.5": _nested(
        "KimiK25ForConditionalGeneration", "kimi_k25",
        _facts("DeepseekV3ForCausalLM", "deepseek_v3", 7168, 64, 64, 64, vocab_size=163840, **MLA, **ROUTED),
    ),
    "Kimi-K3": _nested(
        "KimiK3ForConditionalGeneration", "kimi_k3",
        _facts("KimiLinearForCausalLM", "kimi_linear", 7168, 96, 96, 72, vocab_size=163840, linear_attn_config=KDA,
               mla_use_nope=True, **MLA),
    ),
    "Gemma 4": _nested(
        "Gemma4ForConditionalGeneration", "gemma4",
        _facts("Gemma4ForCausalLM", "gemma4_text", 5376, 32, 16, 256, vocab_size=262144, global_head_dim=512,
               sliding_window=1024, layer_types=WINDOWS),
    ),
    "MiniMax-M2": _facts(
        "MiniMaxM2ForCausalLM", "minimax_m2", 3072, 48, 8, 128, vocab_size=200064, num_local_experts=8,
        num_experts_per_tok=8,
    ),
    "MiniMax-M3": _nested(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl",
        _facts("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text", 6144, 64, 4, 128, vocab_size=200064),
    ),
    "GLM-5": _facts(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", 6144, 64, 64, 64, vocab_size=154880, index_topk=2048, index_head_dim=128,
        index_n_heads=32, **ROUTED, **MLA | dict(v_head_dim=256, qk_nope_head_dim=192),
    ),
    "GLM-5.3-Flash": _nested(
        "Glm5NextForConditionalGeneration", "glm5_next",
        _facts("Glm5NextForCausalLM", "glm5_next_text", 4096, 64, 64, 192, vocab_size=154880, layer_types=HYBRID,
               linear_head_dim=128, linear_num_heads=32, index_topk=2048, index_head_dim=128, index_n_heads=32,
               **ROUTED, **MLA | dict(qk_rope_head_dim=0, qk_nope_head_dim=192, v_head_dim=256)),
        index_topk=2048, vision_config=dict(swiglu_limit=10.0),
    ),
    "Laguna": _facts(
        "LagunaForCausalLM", "laguna", 2048, 64, 8, 128, vocab_size=100352, sliding_window=512, layer_types=WINDOWS,
        **EXPERTS,
    ),
    "Muse Glimmer": _facts(
        "MuseGlimmerForConditionalGeneration", "muse_glimmer", 6656, 32, 2, 128, vocab_size=202048, sliding_window=2048,
        layer_types=WINDOWS, vision_config={},
    ),
    "MiMo-V2": _facts(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", 6144, 128, 8, 192, vocab_size=152576, v_head_dim=128, swa_head_dim=192,
        swa_v_head_dim=128, swa_num_attention_heads=128, swa_num_key_value_heads=8, sliding_window=128,
        sliding_window_size=128, hybrid_layer_pattern=[0, 1, 1, 0], **ROUTED,
    ),
    "DeepSeek-V4": _facts(
        "DeepseekV4ForCausalLM", "deepseek_v4", 4096, 64, 1, 512, vocab_size=129280, qk_rope_head_dim=64,
        index_head_dim=128, index_topk=512, sliding_window=128, compress_ratios=[0] * LAYERS, **ROUTED,
    ),
}  # fmt: skip

SELECTOR = dict(selector_rank=256, selector_top_k=16, conv_kernel_size=2, conv_group_size=16)
DOMINO = dict(
    projector_type="domino", emb_dim=256, gru_hidden_dim=1024, shift_label=True, pure_draft_prefix_len=1
)
# What the configuration of each kind of drafter adds: top-level keys, and keys of dflash_config.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "Laguna": (dict(architectures=["DFlashLagunaForCausalLM"]), {}),
    "Muse": (dict(architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant"), {}),
    "selector": (dict(architectures=["DFlash2DraftModel"]), SELECTOR),
    "MLA, selector": (dict(architectures=["DFlash2DraftModel"]), SELECTOR | dict(attention_mode="mla")),
    "Domino": ({}, DOMINO),
    "GGUF": ({}, {}),
}


# The same of drafters in the layout of the Speculators library: top-level keys that differ from a plain drafter's.
SPECULATORS: dict[str, dict[str, Any]] = {
    "Speculators": {},
    "Speculators, own head": dict(draft_vocab_size=32000),
    "Speculators, selector": dict(
        architectures=["DFlash2DraftModel"],
        speculators_model_type="dflash2",
        sample_from_anchor=False,
        **SELECTOR,
    ),
    "Speculators, 4 streams": dict(draft_vocab_size=32000, target_hidden_size=4 * 4096),
}


class Drafter(NamedTuple):
    """A published drafter.

    Attributes:
        name: the name of the repository.
        target: the model whose text it drafts.
        family: the target's family, a key of TARGETS.
        kind: the kind of its head or layout, a key of KINDS or SPECULATORS.
    """

    name: str
    target: str
    family: str
    kind: str = "plain"


DRAFTERS = [
    Drafter("z-lab/Qwen3-4B-DFlash-b16", "Qwen3-4B", "Qwen3"),
    Drafter("z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B", "Qwen3"),
    Drafter("z-lab/Qwen3-Coder-30B-A3B-DFlash", "Qwen3-Coder-30B-A3B", "Qwen3-MoE"),
    Drafter("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "Llama-3.1-8B", "Llama 3.1"),
    Drafter("z-lab/gpt-oss-20b-DFlash", "gpt-oss-20b", "gpt-oss"),
    Drafter("z-lab/gpt-oss-120b-DFlash", "gpt-oss-120b", "gpt-oss"),
    Drafter("z-lab/Qwen3-Coder-Next-DFlash", "Qwen3-Coder-Next", "Qwen3-Next"),
    Drafter("Moonlight556/Qwen3.5-0.8B-DFlash", "Qwen3.5-0.8B", "Qwen3.5"),
    Drafter("z-lab/Qwen3.5-4B-DFlash", "Qwen3.5-4B", "Qwen3.5"),
    Drafter("z-lab/Qwen3.5-9B-DFlash", "Qwen3.5-9B", "Qwen3.5"),
    Drafter("z-lab/Qwen3.5-27B-DFlash", "Qwen3.5-27B", "Qwen3.5"),
    Drafter("z-lab/Qwen3.5-35B-A3B-DFlash", "Qwen3.5-35B-A3B", "Qwen3.5-MoE"),
    Drafter("modal-labs/Qwen3.5-35B-A3B-DFlash", "Qwen3.5-35B-A3B", "Qwen3.5-MoE"),
    Drafter("z-lab/Qwen3.5-122B-A10B-DFlash", "Qwen3.5-122B-A10B", "Qwen3.5-MoE"),
    Drafter("z-lab/Qwen3.5-397B-A17B-DFlash", "Qwen3.5-397B-A17B", "Qwen3.5-MoE"),
    Drafter("z-lab/Qwen3.6-27B-DFlash", "Qwen3.6-27B", "Qwen3.5"),
    Drafter("zeeksa/Qwen3.6-27B-DFlash", "Qwen3.6-27B", "Qwen3.5"),
    Drafter("z-lab/Qwen3.6-35B-A3B-DFlash", "Qwen3.6-35B-A3B", "Qwen3.5-MoE"),
    Drafter("z-lab/gemma-4-31B-it-DFlash", "gemma-4-31B", "Gemma 4"),
    Drafter("z-lab/gemma-4-26B-A4B-it-DFlash", "gemma-4-26B-A4B", "Gemma 4"),
    Drafter("z-lab/Kimi-K2.5-DFlash", "Kimi-K2.5", "Kimi-K2.5"),
    Drafter("nvidia/Kimi-K2.7-Code-DFlash", "Kimi-K2.7-Code", "Kimi-K2.5"),
    Drafter("cm00cm/Kimi-K2.7-Code-DFlash", "Kimi-K2.7-Code", "Kimi-K2.5"),
    Drafter("OpenYourMind/Kimi-K2.7-coder-DFLASH-preview", "Kimi-K2.7-Code", "Kimi-K2.5"),
    Drafter("modal-labs/Kimi-K3-DFlash", "Kimi-K3", "Kimi-K3"),
    Drafter("z-lab/MiniMax-M2.5-DFlash", "MiniMax-M2.5", "MiniMax-M2"),
    Drafter("z-lab/MiniMax-M2.7-DFlash", "MiniMax-M2.7", "MiniMax-M2"),
    Drafter("nvidia/MiniMax-M2.7-DFlash", "MiniMax-M2.7", "MiniMax-M2"),
    Drafter("poolside/Laguna-XS-2.1-DFlash", "Laguna-XS-2.1", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-XS-2.1-DFlash-FP8", "Laguna-XS-2.1-FP8", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-XS-2.1-DFlash-INT4", "Laguna-XS-2.1-INT4", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-XS-2.1-DFlash-NVFP4", "Laguna-XS-2.1-NVFP4", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-S-2.1-DFlash", "Laguna-S-2.1", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-S-2.1-DFlash-FP8", "Laguna-S-2.1-FP8", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-S-2.1-DFlash-INT4", "Laguna-S-2.1-INT4", "Laguna", "Laguna"),
    Drafter("poolside/Laguna-S-2.1-DFlash-NVFP4", "Laguna-S-2.1-NVFP4", "Laguna", "Laguna"),
    Drafter("meta-models/Muse-Glimmer-30B-assistant", "Muse-Glimmer-30B", "Muse Glimmer", "Muse"),
    Drafter("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash (dflash/)", "MiMo-V2.5-Pro-FP4", "MiMo-V2"),
    Drafter("z-lab/Qwen3.8-27B-DFlash2", "Qwen3.8-27B", "Qwen3.5", "selector"),
    Drafter("incoai/Qwen3.8-27B-DFlash2", "Qwen3.8-27B", "Qwen3.5", "selector"),
    Drafter("JetBrains/Qwen3.6-27B-DFlash2", "Qwen3.6-27B", "Qwen3.5", "selector"),
    Drafter("z-lab/Muse-Glimmer-30B-DFlash2", "Muse-Glimmer-30B", "Muse Glimmer", "selector"),
    Drafter("incoai/GLM-5.3-DFlash2", "GLM-5.3", "GLM-5", "selector"),
    Drafter("incoai/GLM-5.3-Flash-DFlash2", "GLM-5.3-Flash", "GLM-5.3-Flash", "selector"),
    Drafter("canada-quant/GLM-5.3-Flash-DFlash2-G", "GLM-5.3-Flash", "GLM-5.3-Flash", "selector"),
    Drafter("incoai/MiniMax-M3.1-Flash-DFlash2", "MiniMax-M3.1-Flash", "MiniMax-M3", "selector"),
    Drafter("RadixArk/Kimi-K3.1-Dflash2-Preview", "Kimi-K3.1-Pro", "Kimi-K3", "MLA, selector"),
    Drafter("Huang2020/Qwen3-4B-Domino-b16", "Qwen3-4B", "Qwen3", "Domino"),
    Drafter("Huang2020/Qwen3-8B-Domino-b16", "Qwen3-8B", "Qwen3", "Domino"),
    Drafter("RedHatAI/Qwen3-4B-speculator.dflash2", "Qwen3-4B", "Qwen3", "Speculators, selector"),
    Drafter("RedHatAI/Qwen3-8B-speculator.dflash2", "Qwen3-8B", "Qwen3", "Speculators, selector"),
    Drafter("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash", "Qwen3-30B-A3B", "Qwen3-MoE", "Speculators, own head"),
    Drafter("RedHatAI/gemma-4-31B-it-speculator.dflash", "gemma-4-31B", "Gemma 4", "Speculators, own head"),
    Drafter("RedHatAI/gemma-4-31B-it-speculator.dflash2", "gemma-4-31B", "Gemma 4", "Speculators, selector"),
    Drafter("asf0/Qwen3.8-27B-DFlash", "Qwen3.8-27B", "Qwen3.5", "Speculators"),
    Drafter("RedHatAI/DeepSeek-V4-Flash-speculator.dflash", "DeepSeek-V4-Flash", "DeepSeek-V4", "Speculators, 4 streams"),
    Drafter("z-lab/Qwen3.8-27B-DFlash2-GGUF", "Qwen3.8-27B", "Qwen3.5", "GGUF"),
    Drafter("z-lab/Muse-Glimmer-30B-DFlash2-GGUF", "Muse-Glimmer-30B", "Muse Glimmer", "GGUF"),
    Drafter("spiritbuun/Qwen3.6-27B-DFlash-GGUF", "Qwen3.6-27B", "Qwen3.5", "GGUF"),
]  # fmt: skip


def drafter_config(target: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a configuration of a drafter that fits a target.

    Args:
        target: its configuration.
        kind: a key of KINDS or SPECULATORS.
    """
    text = target.get("text_config", target)
    if kind in SPECULATORS:
        return speculators_config(text, **SPECULATORS[kind])
    top, own = KINDS[kind]
    config = _facts(
        "DFlashDraftModel", "qwen3", text["hidden_size"], 32, 8, 128, vocab_size=text["vocab_size"]
    )
    return config | top | dict(
        block_size=8, dflash_config=dict(target_layer_ids=[0, LAYERS - 1], mask_token_id=1) | own
    )  # fmt: skip


def speculators_config(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration of a drafter in the layout of the Speculators library.

    Args:
        text: text configuration of the target.
        more: keys that differ.
    """
    layers = _facts("", "llama", text["hidden_size"], 32, 8, 128, vocab_size=text["vocab_size"])
    del layers["architectures"]
    config = dict(
        architectures=["DFlashDraftModel"], speculators_model_type="dflash", block_size=8, mask_token_id=1,
        draft_vocab_size=text["vocab_size"], aux_hidden_state_layer_ids=[1, LAYERS], dtype="bfloat16",
        transformer_layer_config=layers,
    )  # fmt: skip
    return config | more


def write_pair(folder: Path, family: str, kind: str) -> tuple[str, str]:
    """Write the configurations of a target and of a drafter for it.

    Args:
        folder: folder to create.
        family: a key of TARGETS.
        kind: a key of KINDS or SPECULATORS.

    Returns:
        What names the target and the drafter.
    """
    target, drafter = folder / "target", folder / "drafter"
    for path, config in ((target, TARGETS[family]), (drafter, drafter_config(TARGETS[family], kind))):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
    if kind == "GGUF":
        drafter = drafter / "drafter.gguf"
        drafter.touch()
    return str(target), str(drafter)


def tables() -> str:
    """Return the tables of docs/ddtree-drafters.md."""
    served, refused = [], defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[tuple[str, str], Verdict] = {}
        for drafter in DRAFTERS:
            key = drafter.family, drafter.kind
            if key not in found:
                target, path = write_pair(Path(folder, str(len(found))), *key)
                verdict = check(target, path, SERVER)
                # The server's message names the files. Here they would say nothing.
                reasons = [
                    line.replace(f" {target}:", "").replace(f" {path}:", "") for line in verdict.refusals
                ]
                found[key] = Verdict([line.replace(f": {path}", "") for line in reasons], verdict.choices)
            refusals, choices = found[key]
            if refusals:
                refused["\n".join(refusals)].append(drafter[:-1] + (drafter.kind,))
            else:
                verify = next(
                    line.removeprefix("verify: ") for line in choices if line.startswith("verify: ")
                )
                served.append((*drafter, "tree ops" if verify.startswith("the tree ops") else "Triton"))
    lines = ["## Served", "", *_table(served, "verify")]
    for reason, rows in refused.items():
        lines += ["", *(f"    {line}" for line in reason.splitlines()), "", *_table(rows)]
    lines.insert(lines.index("", len(served) + 4), "\n## Refused")
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]], *more: str) -> list[str]:
    """Return a table of drafters, with a column for each of `more`."""
    header = ("drafter", "target", "checked as", "head or layout", *more)
    return (
        [f"| {' | '.join(row)} |" for row in (header, *rows)][:1]
        + ["|-" * len(header) + "|"]
        + [f"| {' | '.join(row)} |" for row in rows]
    )


if __name__ == "__main__":
    print(tables())
