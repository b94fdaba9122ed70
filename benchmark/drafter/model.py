"""The DFlash drafter, a block-diffusion draft model, in plain PyTorch.

One pass drafts a block of `block_size` positions. The first input is the bonus token, the others are the mask
token. Every layer attends from the block to the block itself (in both directions) and to the context, whose
keys and values are projections of the target's hidden states. The target's embedding and LM head are used and
not stored.

Source: DFlash (arXiv 2602.06036). Weight names and config.json are those that the pinned upstream's
DFlashDraftModel reads (sglang/srt/models/dflash.py, 0.5.23).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter. The defaults suit SmolLM2-135M-Instruct and stay under 20 MB in bfloat16."""

    hidden_size: int = 576  # the target's
    vocab_size: int = 49152  # the target's
    num_target_layers: int = 30  # the target's
    max_position_embeddings: int = 8192
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5
    num_hidden_layers: int = 4
    intermediate_size: int = 704
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    block_size: int = 12
    mask_token_id: int = 16  # <empty_output>: a control token of the target that no conversation contains
    target_layer_ids: tuple[int, ...] = (2, 11, 20, 28)  # the context is the output of these layers

    def to_json(self) -> dict:
        """config.json's content."""
        shape = asdict(self)
        dflash = {
            "mask_token_id": shape.pop("mask_token_id"),
            "target_layer_ids": list(shape.pop("target_layer_ids")),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",  # an architecture with head_dim and QK norm that transformers knows
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            **shape,
            "dflash_config": dflash,
        }

    @classmethod
    def from_json(cls, content: dict) -> DrafterConfig:
        flat = content | content["dflash_config"]
        fields = {name: flat[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"target_layer_ids": tuple(fields["target_layer_ids"])})


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_table(config, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_position_embeddings, head_dim / 2] in float32."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angle = torch.outer(
        torch.arange(config.max_position_embeddings, device=device, dtype=torch.float32),
        config.rope_theta**-half,
    )
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on the two halves of each head.

    Args:
        x: [bs, h, s, head_dim]
        cos, sin: broadcastable to [bs, 1, s, head_dim / 2]

    Returns:
        [bs, h, s, head_dim] in x's dtype.
    """
    lo, hi = x.float().chunk(2, dim=-1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1).to(x.dtype)


def attend(q, k, v, mask, causal: bool = False):
    """scaled_dot_product_attention without cuDNN, which needs seconds to plan each new shape."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim, hidden = config.head_dim, config.hidden_size
        self.group = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, context, rope_q, rope_kv, mask):
        """Attention of one layer.

        Args:
            x: [bs, s_q, hidden], the block.
            context: [bs, s_c, hidden].
            rope_q: cos and sin at the block's positions.
            rope_kv: cos and sin at the positions of context and block.
            mask: as scaled_dot_product_attention takes it, over s_c + s_q keys.

        Returns:
            [bs, s_q, hidden].
        """
        source = torch.cat((context, x), dim=1)
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), *rope_q)
        k = rotate(self.k_norm(self.heads(self.k_proj(source))), *rope_kv).repeat_interleave(self.group, 1)
        v = self.heads(self.v_proj(source)).repeat_interleave(self.group, 1)
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, context, rope_q, rope_kv, mask):
        x = x + self.self_attn(self.input_layernorm(x), context, rope_q, rope_kv, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The drafter without embedding and LM head."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = weight.shape[1] ** -0.5
                # Each layer starts near the identity, because it adds little to the residual.
                nn.init.normal_(
                    weight, std=0.2 * scale if name.endswith(("o_proj.weight", "down_proj.weight")) else scale
                )

    def forward(self, embeds, features, positions, context_positions, mask):
        """One draft pass over any number of blocks.

        Args:
            embeds: [bs, s, hidden], the target's embeddings of the blocks' inputs.
            features: [bs, s_c, len(target_layer_ids) * hidden], the target's hidden states of the context.
            positions: [bs, s] int64, absolute positions of the block tokens.
            context_positions: [s_c] or [bs, s_c] int64.
            mask: [bs or 1, 1, s, s_c + s] additive or bool (True: attend); None: attend to everything.

        Returns:
            [bs, s, hidden], normed. The target's LM head maps row i to the logits of the token AT position i.
        """
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rope(embeds.device)
        keys = torch.cat((context_positions.expand(embeds.shape[0], -1), positions), dim=1)
        rope_q = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        rope_kv = cos[keys].unsqueeze(1), sin[keys].unsqueeze(1)
        x = embeds
        for layer in self.layers:
            x = layer(x, context, rope_q, rope_kv, mask)
        return self.norm(x)

    def rope(self, device):
        if getattr(self, "_rope", None) is None or self._rope[0].device != torch.device(device):
            self._rope = rope_table(self.config, device)
        return self._rope

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and the weights into `folder`, for --speculative-draft-model-path."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().to("cpu", dtype).contiguous() for name, w in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600
        content = self.config.to_json() | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Drafter:
        """The drafter in `folder`, in float32."""
        drafter = cls(DrafterConfig.from_json(json.loads((folder / "config.json").read_text())))
        drafter.load_state_dict({name: w.float() for name, w in load_file(folder / WEIGHTS).items()})
        return drafter


def main() -> None:
    """Write an untrained drafter, to test a server with: python -m benchmark.drafter.model OUT_DIR"""
    import sys

    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig())
    drafter.save(Path(sys.argv[1]))
    print(f"{sum(w.numel() for w in drafter.parameters()) / 1e6:.2f} M parameters in {sys.argv[1]}")


if __name__ == "__main__":
    main()
