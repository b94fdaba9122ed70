"""Tiny random models, and DFlash drafters for them, that a test writes to a folder and serves in seconds."""

from __future__ import annotations

import json
import shutil
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 16  # small, so that a random drafter's candidates are often right
MASK_TOKEN = 2
SYMBOLS = ("<s>", "</s>", "<mask>", *'{}":,[]01ab-c')  # the text of each token; enough to write small JSON


def text_of(tokens: Iterable[int]) -> str:
    """The text of tokens of these models, special tokens included."""
    return "".join(SYMBOLS[token] for token in tokens)


def write_models(
    folder: Path, *, seed: int = 0, layers: int = 3, vocabulary: int = VOCABULARY, context: int = 2048
) -> tuple[str, str]:
    """Write a random Llama target and a random DFlash drafter for it (block size 8), in float32.

    Args:
        folder: folder to write both models into.
        seed: seed of the weights.
        layers: number of the target's layers.
        vocabulary: number of tokens. The tokenizer knows the first VOCABULARY of them.
        context: most tokens of a request.

    Returns:
        The folders of the target and of the drafter.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    config = LlamaConfig(
        **shape, vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=context,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, dtype="float32",
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    for weight in target.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    target.save_pretrained(folder / "target")
    _tokenizer().save_pretrained(folder / "target")

    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(
        json.dumps(
            dict(
                **shape,
                architectures=["DFlashDraftModel"],
                model_type="qwen3",
                vocab_size=vocabulary,
                num_hidden_layers=2,
                max_position_embeddings=context,
                rms_norm_eps=1e-6,
                rope_theta=10000.0,
                hidden_act="silu",
                dtype="float32",
                attention_bias=False,
                tie_word_embeddings=False,
                block_size=8,
                num_target_layers=layers,
                dflash_config=dict(target_layer_ids=[0, 1], mask_token_id=MASK_TOKEN, block_size=8),
            )  # fmt: skip
        )
    )
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    weights = {"fc.weight": torch.randn(hidden, 2 * hidden) * 0.15}
    norms = ["hidden_norm", "norm"]
    for i in range(2):
        for name, size in {
            "self_attn.q_proj": (2 * head, hidden), "self_attn.k_proj": (head, hidden),
            "self_attn.v_proj": (head, hidden), "self_attn.o_proj": (hidden, 2 * head),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            weights[f"layers.{i}.{name}.weight"] = torch.randn(size) * 0.15
        norms += [f"layers.{i}.input_layernorm", f"layers.{i}.post_attention_layernorm"]
        for name in ("q_norm", "k_norm"):
            weights[f"layers.{i}.self_attn.{name}.weight"] = torch.ones(head)
    weights.update({f"{name}.weight": torch.ones(hidden) for name in norms})
    save_file(weights, drafter / "model.safetensors")
    return str(folder / "target"), str(drafter)


def write_models_for(case: type[unittest.TestCase], **options: int) -> tuple[Path, str, str]:
    """Run write_models() in a folder that is removed when the test class `case` has finished.

    Args:
        case: the test class.
        options: the options of write_models().

    Returns:
        That folder, and the folders of the target and of the drafter.
    """
    temporary = tempfile.TemporaryDirectory()
    case.addClassCleanup(temporary.cleanup)
    folder = Path(temporary.name)
    return folder, *write_models(folder, **options)


def write_mla_target(
    folder: Path, *, seed: int = 3, nope: int = 64, value: int = 64, vocabulary: int = VOCABULARY
) -> str:
    """Write a random DeepSeek-V2 with dense layers and MLA of the real latent size (512 + 64), in bfloat16.

    The drafter of write_models() fits this target.

    Args:
        folder: folder to write the model's folder into.
        seed: seed of the weights.
        nope: head size of K without its rotary part. The real model has 128.
        value: head size of V. The real model has 128.
        vocabulary: number of tokens, as many as the drafter's.

    Returns:
        The target's folder.
    """
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    hidden, heads, rope, latent, layers = 128, 2, 64, 512, 3
    config = dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_size=hidden, intermediate_size=256,
        moe_intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        vocab_size=vocabulary, max_position_embeddings=2048, kv_lora_rank=latent, q_lora_rank=None,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, first_k_dense_replace=layers,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, topk_group=1, n_group=1, topk_method="greedy",
        rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, dtype="bfloat16", attention_bias=False, moe_layer_freq=1, scoring_func="softmax",
        rope_scaling=dict(type="yarn", rope_type="yarn", factor=2.0, original_max_position_embeddings=1024, beta_fast=32,
                          beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    )  # fmt: skip
    weights = {"model.norm.weight": torch.ones(hidden)}
    sizes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        sizes |= {
            f"{layer}.self_attn.q_proj": (heads * (nope + rope), hidden),
            f"{layer}.self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            f"{layer}.self_attn.kv_b_proj": (heads * (nope + value), latent),
            f"{layer}.self_attn.o_proj": (hidden, heads * value),
            f"{layer}.mlp.gate_proj": (256, hidden), f"{layer}.mlp.up_proj": (256, hidden),
            f"{layer}.mlp.down_proj": (hidden, 256),
        }  # fmt: skip
        weights[f"{layer}.self_attn.kv_a_layernorm.weight"] = torch.ones(latent)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
    for name, size in sizes.items():
        weights[f"{name}.weight"] = torch.randn(size) * (0.9 if "embed" in name else 0.1)
    target = folder / "mla"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, target / "model.safetensors")
    return str(target)


def write_qwen2_target(target: str, folder: Path) -> str:
    """Write the target of write_models() as a Qwen2, whose biases are zero. It computes the same.

    Args:
        target: folder of that target.
        folder: folder to create.

    Returns:
        The new folder.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    file = folder / "config.json"
    qwen2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    file.write_text(json.dumps(json.loads(file.read_text()) | qwen2))
    weights = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(weight.shape[0])
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_fp8_target(target: str, folder: Path, **scales: float) -> str:
    """Write the target of write_models() as an FP8 checkpoint. Its linear layers keep their type.

    Args:
        target: folder of that target.
        folder: folder to create.
        scales: k_scale and v_scale of every layer. Without them the checkpoint has no scales.

    Returns:
        The new folder.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    linear = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
              "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    config["quantization_config"] = dict(
        quant_method="fp8", activation_scheme="dynamic",
        ignored_layers=["lm_head", *(f"{layer}.{name}" for layer in layers for name in linear)],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name, scale in scales.items():
        for layer in layers:
            weights[f"{layer}.self_attn.{name[0]}_proj.{name}"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_minimax_m2_target(folder: Path, *, seed: int = 6) -> str:
    """Write a random MiniMax-M2 with four experts, in bfloat16. The drafter of write_models() fits this target.

    Args:
        folder: folder to write the model's folder into.
        seed: seed of the weights.

    Returns:
        The target's folder.
    """
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    hidden, heads, head, layers, experts, inner = 128, 2, 64, 3, 4, 128
    config = dict(
        architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=1, head_dim=head,
        vocab_size=VOCABULARY, num_local_experts=experts, num_experts_per_tok=2, scoring_func="sigmoid",
        use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer", rotary_dim=head // 2, rope_theta=10000.0,
        max_position_embeddings=2048, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    weights = {"model.norm.weight": torch.ones(hidden)}
    sizes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in dict(q_proj=heads * head, k_proj=head, v_proj=head).items():
            sizes[f"{layer}.self_attn.{name}"] = rows, hidden
        sizes[f"{layer}.self_attn.o_proj"] = hidden, heads * head
        sizes[f"{layer}.block_sparse_moe.gate"] = experts, hidden
        weights[f"{layer}.block_sparse_moe.e_score_correction_bias"] = torch.zeros(experts)
        for expert in (f"{layer}.block_sparse_moe.experts.{e}" for e in range(experts)):
            sizes |= {
                f"{expert}.w1": (inner, hidden),
                f"{expert}.w2": (hidden, inner),
                f"{expert}.w3": (inner, hidden),
            }
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
        weights[f"{layer}.self_attn.q_norm.weight"] = torch.ones(heads * head)
        weights[f"{layer}.self_attn.k_norm.weight"] = torch.ones(head)
    for name, size in sizes.items():
        weights[f"{name}.weight"] = torch.randn(size) * (0.9 if "embed" in name else 0.1)
    target = folder / "minimax-m2"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, target / "model.safetensors")
    return str(target)


def write_gpt_oss_target(folder: Path, *, seed: int = 4) -> str:
    """Write a random gpt-oss with attention sinks and a window of 32 tokens in layers 0 and 2, in bfloat16.

    The experts have no weights, so the engine must replace them. The drafter of write_models() fits this
    target.

    Args:
        folder: folder to write the model's folder into.
        seed: seed of the weights.

    Returns:
        The target's folder.
    """
    from safetensors.torch import save_file
    from transformers import GptOssConfig

    torch.manual_seed(seed)
    hidden, heads, head, layers = 128, 2, 64, 3
    config = GptOssConfig(
        hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=1, head_dim=head, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=2048, sliding_window=32, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    target = folder / "gpt-oss"
    config.save_pretrained(target)
    weights = {"model.norm.weight": torch.ones(hidden)}
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in dict(q_proj=heads * head, k_proj=head, v_proj=head).items():
            sizes[f"{layer}.self_attn.{name}.weight"] = rows, hidden
            sizes[f"{layer}.self_attn.{name}.bias"] = (rows,)
        sizes[f"{layer}.self_attn.o_proj.weight"] = hidden, heads * head
        sizes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
        weights[f"{layer}.self_attn.sinks"] = torch.randn(heads) + 1
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
    for name, size in sizes.items():
        weights[name] = torch.randn(size) * (0.9 if "embed" in name else 0.15)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, target / "model.safetensors")
    return str(target)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per symbol."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert len(SYMBOLS) == VOCABULARY
    tokenizer = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<mask>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
