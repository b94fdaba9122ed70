"""Tiny random targets with recurrent layers. The drafter of support.models.write_models() fits each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.models import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=len(LAYERS),
    num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def _gdn(d: int, heads_per_key: int) -> dict[str, Any]:
    """GDN layers with two key heads of size d."""
    return dict(
        layer_types=LAYERS,
        full_attention_interval=3,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * heads_per_key,
        linear_key_head_dim=d,
        linear_value_head_dim=d,
        linear_conv_kernel_dim=4,
    )


def _save(model: PreTrainedModel, folder: Path, dtype: str, drop: str | None = None) -> str:
    """Draw the weights, and save all whose names do not contain `drop`."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    weights = {name: w for name, w in model.state_dict().items() if drop is None or drop not in name}
    model.to(getattr(torch, dtype)).save_pretrained(folder, state_dict=weights if drop else None)
    return str(folder)


def write_qwen3_next(
    folder: Path,
    *,
    dtype: str = "float32",
    d: int = 64,
    shared_expert: bool = False,
    vocabulary: int = VOCABULARY,
    seed: int = 5,
) -> str:
    """Write a random Qwen3-Next: three GDN layers and one attention layer, all with experts.

    Args:
        folder: folder to create.
        dtype: the dtype of the weights.
        d: head size of the GDN layers.
        shared_expert: the layers also have a shared expert, as the real model's. Upstream runs it on a GPU only.
        vocabulary: number of tokens.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    size = EXPERTS["moe_intermediate_size"] if shared_expert else 0
    config = Qwen3NextConfig(
        **COMMON | dict(vocab_size=vocabulary), **EXPERTS, **_gdn(d, 2), shared_expert_intermediate_size=size,
        dtype=dtype,
    )  # fmt: skip
    return _save(Qwen3NextForCausalLM(config), folder, dtype, None if shared_expert else "shared_expert")


def write_qwen3_5(
    folder: Path, *, dtype: str = "float32", d: int = 64, experts: bool = False, seed: int = 6
) -> str:
    """Write a random Qwen3.5: three GDN layers and one attention layer, and a vision tower of one layer.

    Args:
        folder: folder to create.
        dtype: the dtype of the weights.
        d: head size of the GDN layers.
        experts: the layers have experts. Upstream runs Qwen3.5's on a GPU only.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    import transformers

    torch.manual_seed(seed)
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    mlp = EXPERTS | dict(shared_expert_intermediate_size=64) if experts else {}
    config = getattr(transformers, name + "Config")(
        text_config=COMMON | _gdn(d, 3) | mlp | dict(dtype=dtype),
        vision_config=dict(
            depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=128, patch_size=4
        ),
        tie_word_embeddings=False,
        dtype=dtype,
    )
    return _save(getattr(transformers, name + "ForConditionalGeneration")(config), folder, dtype)


def write_nemotron_h(folder: Path, *, dtype: str = "float32", d: int = 64, seed: int = 9) -> str:
    """Write a random Nemotron-H: two Mamba2 layers with two groups, one attention layer and one MLP.

    Args:
        folder: folder to create.
        dtype: the dtype of the weights.
        d: state size of the Mamba2 layers. Their head size is 64.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(seed)
    kinds = ["mamba", "mlp", "attention", "mamba"]
    config = NemotronHConfig(
        **COMMON, layers_block_type=kinds, mamba_num_heads=4, mamba_head_dim=64, n_groups=2, ssm_state_size=d,
        conv_kernel=4, chunk_size=64, dtype=dtype,
    )  # fmt: skip
    path = _save(NemotronHForCausalLM(config), folder, dtype)
    # transformers writes names of its own, and published configurations have the groups twice.
    file = folder / "config.json"
    saved = json.loads(file.read_text()) | dict(layers_block_type=kinds, mamba_n_groups=2)
    saved.pop("mtp_layers_block_type", None)
    file.write_text(json.dumps(saved))
    return path


def write_lfm2(folder: Path, *, dtype: str = "float32", d: int = 64, seed: int = 11) -> str:
    """Write a random LFM2: three short convolutions of width 3 and one attention layer.

    Args:
        folder: folder to create.
        dtype: the dtype of the weights.
        d: not used: a short convolution has no heads.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(seed)
    config = Lfm2Config(
        **COMMON, layer_types=[kind.replace("linear_attention", "conv") for kind in LAYERS], conv_L_cache=3,
        block_auto_adjust_ff_dim=False, dtype=dtype,
    )  # fmt: skip
    return _save(Lfm2ForCausalLM(config), folder, dtype)


def write_kimi_linear(folder: Path, *, dtype: str = "bfloat16", d: int = 64, seed: int = 10) -> str:
    """Write a random Kimi-Linear: three KDA layers and one MLA layer of the real latent size, all dense.

    Args:
        folder: folder to create.
        dtype: the dtype of the weights.
        d: head size of the KDA layers.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(seed)
    layers = range(1, len(LAYERS) + 1)  # the configuration counts from 1
    linear = dict(
        full_attn_layers=[i for i in layers if LAYERS[i - 1] == "full_attention"],
        kda_layers=[i for i in layers if LAYERS[i - 1] == "linear_attention"],
        num_heads=2, head_dim=d, short_conv_kernel_size=4,
    )  # fmt: skip
    mla = dict(kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    shape = (
        {name: value for name, value in COMMON.items() if name != "head_dim"}
        | mla
        | dict(num_key_value_heads=2)
    )
    config = KimiLinearConfig(
        **shape, linear_attn_config=linear, first_k_dense_replace=len(LAYERS), pad_token_id=2, dtype=dtype
    )
    path = _save(KimiLinearForCausalLM(config), folder, dtype)
    # transformers renames dense layers as if they were experts, and leaves out names that SGLang reads.
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("block_sparse_moe", "mlp"): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    file = folder / "config.json"
    saved = json.loads(file.read_text()) | dict(
        linear_attn_config=linear, first_k_dense_replace=len(LAYERS), num_experts=4, num_experts_per_token=2,
        num_shared_experts=1, moe_intermediate_size=64, mla_use_nope=True, moe_layer_freq=1,
    )  # fmt: skip
    file.write_text(json.dumps(saved))
    return path
