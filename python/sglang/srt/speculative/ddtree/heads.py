"""Draft heads: how probable each candidate is, given the path above it.

A drafter's pass gives a hidden state for each draft position. Its head turns them into K candidates per position and
their log-probabilities. What these depend on differs:

    MarginalHead   the position alone (DFlash)
    SelectorHead   also the previous token (DFlash2)
    LiLiCorrHead   also the previous token, by a transformer over all candidates (LiLiCorr)
    DominoHead     the whole path, by a GRU (Domino; in domino.py)

head_class() decides which one a drafter has. The rest of DDTREE does not know.

A head that scores only the K candidates redistributes their mass. The mass itself is that of the marginals. So a head
whose correction is zero gives the marginals.

Source: the weights and their formulas are those of SGLang 0.5.23's DFlashDraftModel, DFlash2DraftModel and
LiLiCorrDraftModel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sgl_kernel.ddtree import MAX_CANDIDATES
from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.speculative.ddtree.candidates import IDENTITY, LogitTransform, top_candidates
from torch import nn

# SGLang's draft models by head, and ours (models/dflash_speculators.py).
PLAIN_MODELS = (
    "DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel", "SpeculatorsDFlashDraftModel",
)  # fmt: skip
SELECTOR_MODELS = (
    "DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel", "SpeculatorsDFlash2DraftModel",
)  # fmt: skip
LILICORR_MODELS = ("LiLiCorrDraftModel",)
DRAFT_MODELS = PLAIN_MODELS + SELECTOR_MODELS + LILICORR_MODELS

DEFAULT_BLOCK_SIZE = 16  # for a drafter whose config has none


@dataclass(frozen=True)
class Candidates:
    """Candidates of bs requests and their log-probabilities, as build_trees() takes them.

    Attributes:
        tokens: [bs, D, K] int64.
        log_probs: float32, [bs, D, K] of marginals, [bs, D, K, K] of pairs, or [bs, D, W, K] with a beam.
        log_sum: [bs, D] float32 or None.
        beam: [bs, D, W] int32 or None.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    log_sum: torch.Tensor | None = None
    beam: torch.Tensor | None = None


@dataclass(frozen=True)
class HeadParts:
    """What a head is made of.

    Attributes:
        drafter: the draft model.
        lm_head: the target's LM head, which the drafter shares.
        embed: the target's input embedding.
        num_candidates: K.
        max_requests: rows of the slot table.
    """

    drafter: Any
    lm_head: nn.Module
    embed: nn.Module
    num_candidates: int
    max_requests: int


class Head:
    """What the tree builder asks of a drafter.

    Args:
        parts: what the head is made from.
    """

    def __init__(self, parts: HeadParts) -> None:
        # Only a drafter in the layout of the Speculators library may have a head of its own.
        own = getattr(parts.drafter, "draft_head", None)
        self.lm_head = parts.lm_head if own is None else own
        self.target_tokens = None if own is None else own.tokens
        self.num_candidates = parts.num_candidates

    @classmethod
    def trained_candidates(cls, config: Any) -> int | None:
        """Return the K that the head was trained with, or None if any K will do.

        Args:
            config: the drafter's configuration.
        """
        return None

    @classmethod
    def refuse_widths(cls, config: Any, block_size: int, num_candidates: int) -> None:
        """Refuse widths that the head cannot work with.

        Args:
            config: the drafter's configuration.
            block_size: F.
            num_candidates: K.

        Raises:
            ArgumentRefused: names the argument, what was expected and what was given.
        """

    def begin(self, rows: torch.Tensor) -> None:
        """Begin a step or a prefill.

        Args:
            rows: [bs] int64, the requests' rows of the slot table.
        """

    def set_anchor(self, hidden: torch.Tensor | None) -> None:
        """Take what the drafter knows of each request's last committed token.

        Args:
            hidden: [bs, hidden], the drafter's projection of the target's hidden states, in the order of begin(). The
                batch may be padded. None: there is no batch.
        """

    def forget(self, rows: torch.Tensor) -> None:
        """Forget what set_anchor() was given for requests that used these rows earlier.

        Args:
            rows: int64, rows of the slot table. Their requests now have had no prefill on this server.
        """

    def candidates(self, hidden: torch.Tensor, bonus: torch.Tensor) -> Candidates:
        """Score the candidates of each draft position.

        Args:
            hidden: [bs, F, hidden] of the drafter.
            bonus: [bs] int64, the token at position 0.

        Returns:
            The candidates of D = F - 1 positions.
        """
        raise NotImplementedError

    def top(
        self, hidden: torch.Tensor, transform: LogitTransform = IDENTITY
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the candidates of the marginals.

        Args:
            hidden: [bs, D, hidden], one state per position to fill.
            transform: applied to the logits.

        Returns:
            Tokens [bs, D, K] int64, their logits [bs, D, K] float32, and the logsumexp of all logits [bs, D] float32.
        """
        bs, depth, width = hidden.shape
        tokens, logits, log_sum = top_candidates(
            hidden.reshape(bs * depth, width), self.lm_head, self.num_candidates, transform
        )
        if self.target_tokens is not None:
            tokens = self.target_tokens[tokens]
        return tokens.view(bs, depth, -1), logits.view(bs, depth, -1), log_sum.view(bs, depth)


def conditional(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Turn scores of the candidates into log-probabilities.

    Args:
        scores: [..., W, K], logits of the candidates after each of W paths.
        mass: [...], the log of what the candidates' probabilities add up to.

    Returns:
        [..., W, K] float32.
    """
    return torch.log_softmax(scores.float(), -1) + mass[..., None, None]


class MarginalHead(Head):
    """The drafter's own distribution, whatever the path is."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self.transform = _transform_of(parts.drafter)

    def candidates(self, hidden: torch.Tensor, bonus: torch.Tensor) -> Candidates:
        tokens, logits, log_sum = self.top(hidden[:, 1:], self.transform)
        return Candidates(tokens, logits, log_sum=log_sum)


class SelectorHead(Head):
    """Adds <A[previous token] * (P h), B[token]> to a candidate's logit, with tables A and B of low rank."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self.transform = _transform_of(parts.drafter)
        selector = parts.drafter.candidate_selector
        self.before, self.after = selector.predecessor_codebook, selector.successor_codebook
        self.project = selector.hidden_projection

    @classmethod
    def trained_candidates(cls, config: Any) -> int | None:
        return min(_dflash_config(config)["selector_top_k"], MAX_CANDIDATES)

    def candidates(self, hidden: torch.Tensor, bonus: torch.Tensor) -> Candidates:
        hidden = hidden[:, 1:]
        tokens, logits, log_sum = self.top(hidden, self.transform)
        first = bonus[:, None, None].expand(-1, 1, tokens.shape[2])
        previous = torch.cat((first, tokens[:, :-1]), dim=1)
        query = self.before[previous].float() * self.project(hidden).float()[:, :, None]
        pairs = query @ self.after[tokens].float().transpose(-1, -2)
        return Candidates(tokens, conditional(logits[:, :, None] + pairs, logits.logsumexp(-1) - log_sum))


class LiLiCorrHead(Head):
    """Scores pairs of candidates by what a transformer over all candidates says of them.

    Its anchor is the drafter's state of the last committed token. It is kept by request, because the batch changes
    between two steps.
    """

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self.head, self.embed = parts.drafter.lilicorr, parts.embed
        weight = self.head.slot_embedding
        self.head.materialize_inference_buffers(weight.device, weight.dtype)
        self.rows = torch.zeros(parts.max_requests, dtype=torch.int64, device=weight.device)
        self.anchors = weight.new_zeros(parts.max_requests, self.head.context_proj.input_size)
        self.has_anchor = torch.zeros(parts.max_requests, dtype=torch.bool, device=weight.device)

    @classmethod
    def trained_candidates(cls, config: Any) -> int | None:
        return _dflash_config(config)["lilicorr_candidate_topk"]

    @classmethod
    def refuse_widths(cls, config: Any, block_size: int, num_candidates: int) -> None:
        trained, longest = cls.trained_candidates(config), trained_block_size(config)
        if num_candidates != trained:
            raise ArgumentRefused(
                f"DDTREE: --speculative-eagle-topk: expected {trained} or no value, got {num_candidates}: the drafter's "
                "LiLiCorr head works with as many candidates as it was trained with."
            )
        if block_size > longest:
            raise ArgumentRefused(
                f"DDTREE: --speculative-dflash-block-size: expected at most {longest}, got {block_size}: the drafter's "
                "LiLiCorr head was trained with no more positions."
            )

    def begin(self, rows: torch.Tensor) -> None:
        self.rows.zero_()  # padding: row 0 belongs to no request
        self.rows[: rows.numel()].copy_(rows)

    def set_anchor(self, hidden: torch.Tensor | None) -> None:
        if hidden is not None:
            rows = self.rows[: hidden.shape[0]]
            self.anchors[rows] = hidden.to(self.anchors.dtype)
            self.has_anchor.index_fill_(0, rows, True)

    def forget(self, rows: torch.Tensor) -> None:
        self.has_anchor.index_fill_(0, rows, False)

    def candidates(self, hidden: torch.Tensor, bonus: torch.Tensor) -> Candidates:
        hidden, head = hidden[:, 1:], self.head
        bs = bonus.shape[0]
        tokens, logits, log_sum = self.top(hidden)
        start, pairs = head.log_factors(
            *head.score(
                token_embeddings=self.embed(tokens)[:, None],
                candidate_log_probs=(logits - log_sum[..., None])[:, None],
                pass_hidden=hidden[:, None],
                anchor_hidden=self.anchors[self.rows[:bs], None],
                anchor_valid=self.has_anchor[self.rows[:bs], None],
            )
        )
        first = start[:, :, None].expand(-1, -1, tokens.shape[2], -1)
        scores = torch.cat((first, pairs[:, 0]), dim=1)
        return Candidates(tokens, conditional(scores, logits.logsumexp(-1) - log_sum))


def _dflash_config(config: Any) -> dict[str, Any]:
    return getattr(config, "dflash_config", None) or {}


def _transform_of(drafter: Any) -> LogitTransform:
    """Return what a drafter does to its logits."""
    config = drafter.draft_config
    return LogitTransform(config.output_multiplier, config.final_logit_softcapping)


def trained_block_size(config: Any) -> int:
    """Return the F that a drafter was trained with.

    Args:
        config: the drafter's configuration.
    """
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    return parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=DEFAULT_BLOCK_SIZE)


def head_class(config: Any) -> type[Head]:
    """Decide which head a drafter has.

    Args:
        config: the drafter's, without head_faults().
    """
    from sglang.srt.speculative.ddtree.domino import DominoHead

    architectures = set(config.architectures)
    if architectures.intersection(SELECTOR_MODELS):
        return SelectorHead
    if architectures.intersection(LILICORR_MODELS):
        return LiLiCorrHead
    return DominoHead if _is_domino(config) else MarginalHead


def _is_domino(config: Any) -> bool:
    """Return whether a drafter's configuration asks for Domino, as upstream reads it."""
    inner = _dflash_config(config).get("projector_type")
    return (inner or getattr(config, "projector_type", None)) == "domino"


def head_faults(config: Any, vocab_size: int) -> Iterator[str]:
    """Find what does not fit together in a head's configuration.

    Upstream's loader drops the weights of a head that the architecture does not have.

    Args:
        config: the drafter's, whose architecture is one of the models above.
        vocab_size: the vocabulary of the target.

    Yields:
        For each key that does not fit: its name, what was expected and what was given.
    """
    from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config

    inner, architectures = _dflash_config(config), list(config.architectures)
    kind = head_class(config)
    has_lilicorr = (
        any(key.startswith("lilicorr_") for key in inner) and inner.get("lilicorr_enabled") is not False
    )
    for head, models, keys, are_there in (
        (SelectorHead, SELECTOR_MODELS, "selector_rank", bool(inner.get("selector_rank"))),
        (LiLiCorrHead, LILICORR_MODELS, "the lilicorr_ keys", has_lilicorr),
    ):
        if are_there and kind is not head:
            yield (
                f"architectures: expected one of {list(models)}, because dflash_config has {keys}, got {architectures}: "
                "SGLang would drop the head's weights."
            )
        elif kind is head and not are_there:
            yield f"dflash_config: expected {keys} with {architectures}, got none."
    if _is_domino(config) and kind in (SelectorHead, LiLiCorrHead):
        yield f"dflash_config.projector_type: expected one head, got domino in addition to that of {architectures}."
    if kind is LiLiCorrHead and has_lilicorr:
        try:
            parse_lilicorr_draft_config(draft_hf_config=config)
        except ValueError as error:
            yield f"dflash_config: expected the keys of a LiLiCorr head, got one with a wrong value: {error}"
    own = getattr(config, "vocab_size", None)
    if (kind is SelectorHead or _is_domino(config)) and own is not None and own < vocab_size:
        yield f"vocab_size: expected {vocab_size}, the target's, for the head's tables of tokens, got {own}."


def make_head(config: Any, parts: HeadParts) -> Head:
    """Make the head of a drafter.

    Args:
        config: the drafter's configuration.
        parts: what the head is made from.
    """
    return head_class(config)(parts)
