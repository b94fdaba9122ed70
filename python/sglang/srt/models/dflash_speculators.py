"""DFlash drafters whose files are in the layout of the Speculators library, for DDTREE.

Source: the names of the weights are those of vllm-project/speculators (src/speculators/model.py and models/dflash).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models.dflash import DFlash2DraftModel, DFlashDraftModel
from sglang.srt.runtime_context import get_spec
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]
HEAD = "lm_head.weight"  # the drafter's own LM head
MASK = "t2d"  # which of the target's tokens the rows of that head are


class DraftHead(nn.Module):
    """An LM head over some of the target's tokens. Every rank has all of it.

    Args:
        size: number of these tokens.
        hidden: width of the drafter.
    """

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, hidden), requires_grad=False)
        self.register_buffer("tokens", torch.arange(size), persistent=False)  # the target's token of each row

    def load(self, weight: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Take the weights of a checkpoint.

        Args:
            weight: [size, hidden].
            mask: [the target's vocabulary] bool, true for `size` tokens.

        Raises:
            ValueError: one is missing, or has another size.
        """
        size = self.weight.shape[0]
        found = [] if mask is None else mask.bool().nonzero()[:, 0]
        shape = None if weight is None else tuple(weight.shape)
        if weight is None or shape != tuple(self.weight.shape) or len(found) != size:
            raise ValueError(
                f"DDTREE: the drafter's weights: expected {HEAD} of shape {tuple(self.weight.shape)} and {MASK} with "
                f"{size} tokens, because of draft_vocab_size, got {HEAD} of shape {shape} and {MASK} with {len(found)}."
            )
        self.weight.data.copy_(weight)
        self.tokens.copy_(found)


class SpeculatorsMixin:
    """What both kinds of drafters share. A mixin for DFlashDraftModel.

    Attributes:
        draft_head: the drafter's own LM head. None: it drafts with the target's.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        if get_spec().speculative_algorithm != "DDTREE":
            raise ValueError(
                "the drafter: expected the layout of DFlash's authors, got that of the Speculators library, which only "
                "--speculative-algorithm DDTREE reads."
            )
        super().__init__(config, quant_config, prefix)  # type: ignore[call-arg]  # the model's constructor
        size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.draft_head = DraftHead(size, config.hidden_size) if size != config.vocab_size else None

    def load_weights(self, weights: Weights) -> None:
        own: dict[str, torch.Tensor] = {}
        super().load_weights(self._renamed(weights, own))  # type: ignore[misc]
        if self.draft_head is not None:
            self.draft_head.load(own.get(HEAD), own.get(MASK))

    @staticmethod
    def _renamed(weights: Weights, own: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what upstream's model reads, under its names, and put the LM head's parts into `own`."""
        for name, weight in weights:
            name = name.removeprefix("model.")
            if name in (HEAD, MASK):
                own[name] = weight
            else:
                yield name.replace("_codebook.weight", "_codebook"), weight


class SpeculatorsDFlashDraftModel(SpeculatorsMixin, DFlashDraftModel):
    """A plain drafter."""


class SpeculatorsDFlash2DraftModel(SpeculatorsMixin, DFlash2DraftModel):
    """A drafter with convolutions and a selector."""


EntryClass = [SpeculatorsDFlashDraftModel, SpeculatorsDFlash2DraftModel]
