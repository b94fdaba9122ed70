"""Configurations of tiny models in the shapes of real ones, for servers that load random weights."""

from __future__ import annotations

import json
from pathlib import Path

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 10240,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
MODELS = {
    # The fused norm does not support this head size, so q and k are normalized on two streams.
    "qwen3": {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 96},
    "llama": {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 96,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **COMMON,
        **MLA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **COMMON,
        **MLA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 256,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
    # One layer of each kind: sliding window (ratio 0), C4 and C128. The first two choose experts by token (hash layers).
    # The kernels fix the number of heads, the head sizes, the index heads and the window.
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 512,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0],  # the last one is the NEXTN layer's
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 2,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "head_dim": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 65536,
        "window_size": 128,
        "sliding_window": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 40000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "bfloat16",
    },
}


def write_config(name: str, folder: Path, **changes: object) -> None:
    """Write the config.json of the model ``name`` to ``folder``, with ``changes``."""
    (folder / "config.json").write_text(json.dumps({**MODELS[name], **changes}))


def run_one_batch() -> None:
    """Load a model, capture its graphs, prefill and decode a batch: upstream's one_batch without a tokenizer.

    The model and the options come from sys.argv.
    """
    from sglang.benchmark import one_batch

    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch.cli_main()
