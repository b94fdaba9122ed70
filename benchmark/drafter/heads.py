"""Heads that know the path: DFlash2's selector and Domino, on top of a frozen DFlash drafter.

Both correct the drafter's logits of the K best candidates per position. The selector looks at the token before
(first order), Domino at the whole prefix through a GRU. A successor table of zeros gives the plain drafter.

Source: weight names, shapes and config.json are those that the pinned upstream's DFlash2DraftModel and
DFlashDraftModel read (sglang/srt/models/dflash.py, 0.5.23). Its own chain is their arg max at each position.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from benchmark.drafter.model import WEIGHTS, DrafterConfig

HEAD_WEIGHTS = "head.safetensors"
DRAFTER_LINK = "drafter.safetensors"


@dataclass
class Lattice:
    """What a frozen drafter says about n drafts: the K best candidates of every position."""

    anchors: torch.Tensor  # [n] the bonus tokens
    ids: torch.Tensor  # [n, depth, K] the candidates in falling order
    logits: torch.Tensor  # [n, depth, K] theirs
    rest: torch.Tensor  # [n, depth] log-sum-exp of all other tokens' logits
    hidden: torch.Tensor  # [n, depth, hidden] the drafter's normed hidden states
    truth: torch.Tensor  # [n, depth] the target's tokens; -1 past the text's end

    def __len__(self) -> int:
        return len(self.anchors)

    def __getitem__(self, rows) -> Lattice:
        """The drafts `rows` (a slice or an index tensor), ready for arithmetic."""
        part = Lattice(*(getattr(self, field.name)[rows] for field in fields(self)))
        part.anchors, part.ids, part.truth = part.anchors.long(), part.ids.long(), part.truth.long()
        part.logits, part.rest, part.hidden = part.logits.float(), part.rest.float(), part.hidden.float()
        return part

    def best(self, k: int) -> Lattice:
        """The same drafts with fewer candidates."""
        cut = self.logits[..., k:].float().logsumexp(-1) if k < self.ids.shape[-1] else self.rest
        rest = torch.logaddexp(self.rest.float(), cut) if k < self.ids.shape[-1] else self.rest
        return Lattice(self.anchors, self.ids[..., :k], self.logits[..., :k], rest, self.hidden, self.truth)

    @classmethod
    def cat(cls, parts: list[Lattice]) -> Lattice:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @property
    def match(self) -> torch.Tensor:
        """[n, depth, K] whether a candidate is the target's token."""
        return self.ids == self.truth[..., None]

    @property
    def prefix(self) -> torch.Tensor:
        """[n, depth] the tokens before each position on the target's path: the bonus token, then `truth`."""
        return torch.cat((self.anchors[:, None], self.truth[:, :-1].clamp_min(0)), 1)

    @property
    def mass(self) -> torch.Tensor:
        """[n, depth] log of the probability that the plain drafter gives to the candidates together."""
        top = self.logits.logsumexp(-1)
        return top - torch.logaddexp(top, self.rest)

    def marginals(self) -> torch.Tensor:
        """[n, depth, K] log-probabilities of the plain drafter."""
        return self.logits.log_softmax(-1) + self.mass[..., None]


class Scaled(nn.Module):
    """A matrix whose stored entries have unit size. So one learning rate suits all of them.

    Args:
        rows, columns: the matrix's shape.
        scale: number or [columns], size of the true entries.
        spread: the spread of the first entries, in units of `scale`.
    """

    def __init__(self, rows: int, columns: int, scale, spread: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(spread * torch.randn(rows, columns))
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.float32))

    @property
    def value(self) -> torch.Tensor:
        return self.weight * self.scale

    def set(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(value.float() / self.scale)


class TokenTable(nn.Module):
    """A row per token: a constant, a linear map of the token's embedding, and a free part.

    The map learns from every token what it uses for a rare one. The free part alone would learn rare tokens by heart.

    Args:
        rows, columns: the table's shape.
        tokens: [rows, hidden] embeddings of unit size, or None for a table without a map.
        free: size of the free part's steps, relative to the map's; 0 for none.
        mean: the constant.
        spread: the spread of the first entries.
    """

    def __init__(self, rows: int, columns: int, tokens, free: float, mean: float = 0.0, spread: float = 1.0):
        super().__init__()
        self.tokens, self.mean, self.fixed = tokens, mean, None
        self.map = (
            None if tokens is None else Scaled(columns, tokens.shape[1], tokens.shape[1] ** -0.5, spread)
        )
        self.free = Scaled(rows, columns, free, spread if tokens is None else 0.0) if free else None

    @property
    def value(self) -> torch.Tensor:
        """[rows, columns]."""
        if self.fixed is not None:
            return self.fixed
        value = self.mean + (0.0 if self.map is None else F.linear(self.tokens, self.map.value))
        return value if self.free is None else value + self.free.value

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.value)

    def set(self, value: torch.Tensor) -> None:
        """Replace the table by a trained one."""
        self.fixed = value.float()


def token_features(embed: torch.Tensor) -> torch.Tensor:
    """The embeddings [vocabulary, hidden] in float32, scaled to unit size."""
    return embed.float() / embed.float().square().mean().sqrt()


class PathHead(nn.Module):
    """What the selector and Domino share. `tables` maps checkpoint names to Scaled or TokenTable."""

    def __init__(self, tables: dict[str, nn.Module]):
        super().__init__()
        self.names = list(tables)
        self.tables = nn.ModuleList(tables.values())

    def __getitem__(self, name: str):
        return self.tables[self.names.index(name)]

    def teacher_forced(self, lattice: Lattice) -> torch.Tensor:
        """Logits [n, depth, K] of the candidates after the target's own prefixes."""
        raise NotImplementedError

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """The checkpoint."""
        return {name: self[name].value.detach().to("cpu", dtype).contiguous() for name in self.names}

    def load(self, tensors: dict[str, torch.Tensor], device) -> PathHead:
        """Take the checkpoint's weights, in float32."""
        for name in self.names:
            self[name].set(tensors[name].to(device))
        return self


class Selector(PathHead):
    """score(c | p) = logit[c] + sum_r A[p, r] (P h)[r] B[c, r], with p the token before c.

    Args:
        vocab_size: the vocabulary of the target.
        hidden: width of the drafter.
        rank: the rank of the tables A (predecessors) and B (successors).
        hidden_rms: size of the drafter's hidden states, for the first weights.
        tokens, free: TokenTable's.
    """

    A, B, P = (
        f"candidate_selector.{name}"
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )

    def __init__(self, vocab_size: int, hidden: int, rank: int, hidden_rms=1.0, tokens=None, free=1.0):
        super().__init__(
            {
                # The constant: a predecessor about which nothing was learned gets the average correction.
                self.A: TokenTable(vocab_size, rank, tokens, free, mean=1.0, spread=0.5),
                self.B: TokenTable(vocab_size, rank, tokens, free, spread=0.0),
                self.P: Scaled(rank, hidden, hidden**-0.5 / hidden_rms),
            }
        )
        self.rank = rank

    def scores(self, lattice: Lattice, before: torch.Tensor) -> torch.Tensor:
        """Logits [n, depth, p, K] of the candidates after each of `before`, [n, depth, p] tokens."""
        query = self[self.A].rows(before) * F.linear(lattice.hidden, self[self.P].value)[:, :, None]
        return lattice.logits[:, :, None] + query @ self[self.B].rows(lattice.ids).transpose(-1, -2)

    def teacher_forced(self, lattice: Lattice) -> torch.Tensor:
        return self.scores(lattice, lattice.prefix[..., None])[:, :, 0]

    def walk(self, lattice: Lattice) -> SelectorWalk:
        """The head on these drafts."""
        first = lattice.anchors[:, None, None].expand(-1, 1, lattice.ids.shape[-1])
        scores = self.scores(lattice, torch.cat((first, lattice.ids[:, :-1]), 1))
        return SelectorWalk(scores.log_softmax(-1) + lattice.mass[..., None, None])

    def config(self, k: int) -> dict:
        """Keys of config.json: at the top level, and under "dflash_config"."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "dflash_config": {"selector_rank": self.rank, "selector_top_k": k},
        }


class SelectorWalk:
    """An evaluate.Head over pair log-probabilities [n, depth, K, K]; the state is the last choice."""

    def __init__(self, pairs: torch.Tensor):
        self.pairs = pairs

    def start(self) -> torch.Tensor:
        return torch.zeros(len(self.pairs), 1, dtype=torch.int64, device=self.pairs.device)

    def log_q(self, depth: int, last: torch.Tensor) -> torch.Tensor:
        return self.pairs[:, depth].gather(1, last[..., None].expand(-1, -1, self.pairs.shape[-1]))

    def follow(
        self, depth: int, last: torch.Tensor, lane: torch.Tensor, choice: torch.Tensor
    ) -> torch.Tensor:
        return choice


class Domino(PathHead):
    """logit[c] + W2[c] silu(W0 [h; s]), with s a GRU's state after the bonus token and the prefix.

    The first position keeps the plain logits.

    Args:
        embed: [vocabulary, hidden], the target's embedding.
        width: the width of the GRU.
        rank: the rank of the correction.
        hidden_rms: size of the drafter's hidden states, for the first weights.
        tokens, free: TokenTable's.
    """

    IH, HH, W0, W2 = (
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    )

    def __init__(self, embed: torch.Tensor, width: int, rank: int, hidden_rms=1.0, tokens=None, free=1.0):
        vocab_size, hidden = embed.shape
        both = (
            torch.cat((torch.full((hidden,), 1 / hidden_rms), torch.ones(width))) * (hidden + width) ** -0.5
        )
        embed_rms = float(embed.float().square().mean().sqrt())
        super().__init__(
            {
                self.IH: Scaled(3 * width, hidden, hidden**-0.5 / embed_rms),
                self.HH: Scaled(3 * width, width, width**-0.5),
                self.W0: Scaled(rank, hidden + width, both),
                self.W2: TokenTable(vocab_size, rank, tokens, free, spread=0.0),
            }
        )
        self.width, self.rank, self.embed = width, rank, embed

    def read(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU's states [..., width] after one more token [...]."""
        x = F.embedding(tokens, self.embed).float().flatten(0, -2)
        new = torch.gru_cell(x, state.flatten(0, -2), self[self.IH].value, self[self.HH].value)
        return new.unflatten(0, tokens.shape)

    def correction(self, hidden: torch.Tensor, state: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What is added to the logits [n, lanes, K].

        Args:
            hidden: [n, hidden].
            state: [n, lanes, width].
            ids: [n, K].
        """
        w0 = self[self.W0].value
        own, prefix = w0.split((w0.shape[1] - self.width, self.width), dim=1)
        inner = F.silu(F.linear(hidden, own)[:, None] + F.linear(state, prefix))
        return inner @ self[self.W2].rows(ids).transpose(-1, -2)

    def teacher_forced(self, lattice: Lattice) -> torch.Tensor:
        n, depth, _ = lattice.ids.shape
        state, states = torch.zeros(n, self.width, device=lattice.ids.device), []
        for tokens in lattice.prefix.unbind(1):
            state = self.read(tokens, state)
            states.append(state)
        flat = [
            x[:, 1:].flatten(0, 1) for x in (lattice.hidden, torch.stack(states, 1)[:, :, None], lattice.ids)
        ]
        later = self.correction(*flat)[:, 0].unflatten(0, (n, depth - 1))
        return lattice.logits + F.pad(later, (0, 0, 1, 0))

    def walk(self, lattice: Lattice) -> DominoWalk:
        """The head on these drafts."""
        return DominoWalk(self, lattice)

    def config(self, k: int) -> dict:
        """Keys of config.json: at the top level, and under "dflash_config"."""
        domino = {
            "projector_type": "domino",
            "shift_label": False,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": self.width,
            "emb_dim": self.rank,
        }
        return {"architectures": ["DFlashDraftModel"], "dflash_config": domino}


class DominoWalk:
    """An evaluate.Head; the state is the GRU's, [n, lanes, width]."""

    def __init__(self, head: Domino, lattice: Lattice):
        self.head, self.lattice, self.mass = head, lattice, lattice.mass

    def start(self) -> torch.Tensor:
        anchors = self.lattice.anchors[:, None]
        return self.head.read(anchors, torch.zeros(*anchors.shape, self.head.width, device=anchors.device))

    def log_q(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        logits, ids = self.lattice.logits[:, depth, None], self.lattice.ids[:, depth]
        if depth:
            logits = logits + self.head.correction(self.lattice.hidden[:, depth], state, ids)
        return logits.log_softmax(-1) + self.mass[:, depth, None, None]

    def follow(
        self, depth: int, state: torch.Tensor, lane: torch.Tensor, choice: torch.Tensor
    ) -> torch.Tensor:
        parents = state.gather(1, lane[..., None].expand(-1, -1, state.shape[-1]))
        return self.head.read(self.lattice.ids[:, depth].gather(1, choice), parents)


def save(head: PathHead, k: int, drafter: Path, folder: Path) -> None:
    """Write a checkpoint for --speculative-draft-model-path.

    It holds the head's weights and a link to the drafter's, so `folder` must stay where it is relative to `drafter`.

    Args:
        head: trained on `drafter`.
        k: candidates per position.
        drafter: folder of the frozen drafter.
        folder: the folder to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(), folder / HEAD_WEIGHTS, metadata={"format": "pt"})
    (folder / HEAD_WEIGHTS).chmod(0o644)  # safetensors writes 0600
    link = folder / DRAFTER_LINK
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(drafter / WEIGHTS, folder))
    content, own = json.loads((drafter / "config.json").read_text()), head.config(k)
    content["architectures"] = own["architectures"]
    content["dflash_config"] |= own["dflash_config"]
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def load(folder: Path, embed: torch.Tensor) -> Selector | Domino:
    """The head in `folder`, in float32 on `embed`'s device.

    Args:
        folder: as save() writes it.
        embed: [vocabulary, hidden], the target's embedding.
    """
    content = json.loads((folder / "config.json").read_text())
    config, dflash = DrafterConfig.from_json(content), content["dflash_config"]
    if dflash.get("projector_type") == "domino":
        head = Domino(embed, dflash["gru_hidden_dim"], dflash["emb_dim"])
    else:
        head = Selector(config.vocab_size, config.hidden_size, dflash["selector_rank"])
    return head.to(embed.device).load(load_file(folder / HEAD_WEIGHTS), embed.device)
