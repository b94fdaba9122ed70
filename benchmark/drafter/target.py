"""The target, a Llama, in plain PyTorch: hidden states for the drafter's context, and batched generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmark.drafter.model import attend, rope_table, rotate


@dataclass(frozen=True)
class TargetConfig:
    """The fields of config.json that the forward pass needs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: int


class Target:
    """A Llama with tied embeddings, weights frozen.

    Args:
        folder: a Hugging Face folder.
        device: device of the weights.
        dtype: type of the weights.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype):
        content = json.loads((folder / "config.json").read_text())
        content |= content.get("rope_parameters") or {}  # transformers 5 nests rope_theta
        self.config = TargetConfig(**{name: content[name] for name in TargetConfig.__dataclass_fields__})
        weights = load_file(folder / "model.safetensors")
        self.weights = {n.removeprefix("model."): w.to(device, dtype) for n, w in weights.items()}
        self.embed = self.weights["embed_tokens.weight"]
        self.cos, self.sin = rope_table(self.config, device)
        self.device, self.dtype = device, dtype

    def norm(self, x, name):
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(x.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embed)

    @torch.no_grad()
    def forward(self, ids, positions=None, mask=None, cache=None, column=0, layer_ids=()):
        """One forward pass.

        Args:
            ids: [bs, s] int64.
            positions: [bs, s] int64; None: 0, 1, ...
            mask: additive or bool, broadcastable to [bs, heads, s, keys]; None: causal.
            cache: a Cache. Columns column .. column + s - 1 are written, columns 0 .. keys - 1 are read.
            column: first column to write.
            layer_ids: layers (0-based, not the last) whose output is wanted.

        Returns:
            Normed hidden states [bs, s, hidden]; features [bs, s, len(layer_ids) * hidden], or None without
            layer_ids.
        """
        c = self.config
        bs, s = ids.shape
        if positions is None:
            positions = torch.arange(s, device=ids.device).expand(bs, s)
        rope = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x, taken = F.embedding(ids, self.embed), {}
        group = c.num_attention_heads // c.num_key_value_heads
        for layer in range(c.num_hidden_layers):
            name = f"layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                F.linear(y, self.weights[f"{name}.self_attn.{p}_proj.weight"])
                .unflatten(-1, (-1, c.head_dim))
                .transpose(1, 2)
                for p in "qkv"
            )
            q, k = rotate(q, *rope), rotate(k, *rope)
            if cache is not None:
                k, v = cache.update(layer, k, v, column, mask.shape[-1])
            if s == 1:  # the query heads of a group become rows, so that they share one read of the keys
                q = q.reshape(bs, c.num_key_value_heads, group, c.head_dim)
                out = attend(q, k, v, mask).reshape(bs, c.num_attention_heads, 1, c.head_dim)
            else:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                out = attend(q, k, v, mask, causal=mask is None)
            x = x + F.linear(out.transpose(1, 2).flatten(2), self.weights[f"{name}.self_attn.o_proj.weight"])
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (F.linear(y, self.weights[f"{name}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.weights[f"{name}.mlp.down_proj.weight"])
            if layer in layer_ids:
                taken[layer] = x
        return self.norm(x, "norm"), torch.cat([taken[i] for i in layer_ids], -1) if layer_ids else None

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, temperature=0.0, compact_every=32):
        """Continue every prompt to its end-of-sequence token or to max_new_tokens.

        Args:
            prompts: lists of token ids. Similar lengths need the least padding.
            max_new_tokens: most tokens per answer.
            temperature: 0 is greedy.
            compact_every: steps after which finished answers leave the batch.

        Returns:
            One list of token ids per prompt, end-of-sequence token included.
        """
        longest = max(map(len, prompts))
        columns = -(-(longest + max_new_tokens) // 64) * 64
        pad = torch.tensor([longest - len(p) for p in prompts], device=self.device)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        cache = Cache(self, len(prompts), columns)
        visible = torch.zeros(len(prompts), columns, dtype=torch.bool, device=self.device)
        visible[:, :longest] = torch.arange(longest, device=self.device) >= pad[:, None]
        last = self.prefill(ids, pad, visible, cache)
        produced = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=self.device)
        length = torch.full((len(prompts),), -1, device=self.device)
        for step in range(max_new_tokens):
            token = sample(self.logits(last), temperature)
            produced[rows, step] = token
            ended = (token == self.config.eos_token_id) & (length[rows] < 0)
            length[rows] = torch.where(ended, step + 1, length[rows])
            if step + 1 == max_new_tokens:
                break
            if step % compact_every == compact_every - 1:
                alive = (length[rows] < 0).nonzero()[:, 0]
                if len(alive) == 0:
                    break
                rows, pad, visible, token = rows[alive], pad[alive], visible[alive], token[alive]
                cache.keep(alive)
            at = longest + step
            visible[:, at] = True
            keys = -(-(at + 1) // 64) * 64
            mask = torch.zeros(len(rows), 1, 1, keys, dtype=self.dtype, device=self.device)
            mask.masked_fill_(~visible[:, None, None, :keys], float("-inf"))
            last = self.forward(token[:, None], (at - pad)[:, None], mask, cache, at)[0][:, 0]
        return [
            tokens[:n] if n >= 0 else tokens
            for tokens, n in zip(produced.tolist(), length.tolist(), strict=True)
        ]

    def prefill(self, ids, pad, visible, cache, rows_at_once=512):
        """Fill the cache with left-padded prompts. Return the last column's hidden states [bs, hidden]."""
        bs, s = ids.shape
        column = torch.arange(s, device=self.device)
        causal, itself = column[:, None] >= column, torch.eye(s, dtype=torch.bool, device=self.device)
        last = []
        for i in range(0, bs, rows_at_once):
            part = slice(i, i + rows_at_once)
            # A padding row sees itself. If it saw nothing it would be NaN and spoil the cache.
            mask = (causal & visible[part, None, :s] | itself).unsqueeze(1)
            positions = (column - pad[part, None]).clamp_min(0)
            last.append(self.forward(ids[part], positions, mask, cache.view(part), 0)[0][:, -1])
        return torch.cat(last)


class Cache:
    """Keys and values per layer, [bs, h_kv, columns, head_dim] each."""

    def __init__(self, target: Target, rows: int, columns: int):
        c = target.config
        shape = (rows, c.num_key_value_heads, columns, c.head_dim)
        new = lambda: torch.zeros(shape, dtype=target.dtype, device=target.device)  # noqa: E731
        self.k = [new() for _ in range(c.num_hidden_layers)]
        self.v = [new() for _ in range(c.num_hidden_layers)]

    def view(self, part: slice) -> Cache:
        """The same memory, restricted to some rows."""
        some = object.__new__(Cache)
        some.k, some.v = [k[part] for k in self.k], [v[part] for v in self.v]
        return some

    def update(self, layer, k, v, column, keys):
        self.k[layer][:, :, column : column + k.shape[2]] = k
        self.v[layer][:, :, column : column + k.shape[2]] = v
        return self.k[layer][:, :, :keys], self.v[layer][:, :, :keys]

    def keep(self, rows: torch.Tensor) -> None:
        for layer in range(len(self.k)):
            self.k[layer], self.v[layer] = self.k[layer][rows], self.v[layer][rows]


def sample(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sample tokens [bs] from logits [bs, vocabulary] by Gumbel-max, which needs no sort."""
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
    return (logits.float() / temperature - noise).argmax(-1)
