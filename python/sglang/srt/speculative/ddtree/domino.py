"""Domino: a head that scores a candidate after the whole path, with a GRU over the path's tokens.

There are too many paths to score all of them. They grow level by level, as a beam of a fixed width: each level scores
the candidates after each path of the beam, and the best of all these become the next beam. The tree takes the best
nodes of everything that was scored.

Source: the weights and the formula are those of SGLang 0.5.23's DFlashDraftModel with projector_type "domino".
"""

from __future__ import annotations

import torch
from sgl_kernel.ddtree import MAX_ROWS
from sglang.srt.speculative.ddtree.heads import Candidates, Head, HeadParts, conditional
from torch.nn import functional

BEAM_WIDTH = MAX_ROWS


class DominoHead(Head):
    """Adds W2[token] . silu(W0 [h; s]) to a candidate's logit. s is the GRU's state after the bonus token and the path.

    The candidates of the first position keep their logits.
    """

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        drafter = parts.drafter
        self.embed = parts.embed
        self.first = 0 if drafter.shift_label else 1  # the draft position whose hidden state gives depth 1
        self.gru = drafter.prefix_gru
        self.inner, self.outer = drafter.embed_proj[0], drafter.embed_proj[2]

    def candidates(self, hidden: torch.Tensor, bonus: torch.Tensor) -> Candidates:
        bs, block_size, _ = hidden.shape
        depth = block_size - 1
        hidden = hidden[:, self.first : self.first + depth]
        tokens, logits, log_sum = self.top(hidden)
        width = self.num_candidates
        shape = bs, depth, BEAM_WIDTH
        beam = torch.full(shape, -1, dtype=torch.int32, device=hidden.device)
        log_probs = logits.new_full((*shape, width), -float("inf"))
        log_probs[:, 0, 0] = logits[:, 0] - log_sum[:, 0, None]
        scores = logits.new_full((bs, BEAM_WIDTH), -float("inf"))  # of each path of the beam
        scores[:, 0] = 0.0
        root = self._read(bonus, hidden.new_zeros(bs, self.gru.hidden_size))
        states = root[:, None].expand(-1, BEAM_WIDTH, -1)
        for position in range(1, depth):
            every = (scores[:, :, None] + log_probs[:, position - 1]).flatten(1)
            scores, best = every.topk(BEAM_WIDTH)
            beam[:, position] = torch.where(scores > -float("inf"), best, -1)
            above = best // width
            states = states.gather(1, above[..., None].expand(-1, -1, states.shape[2]))
            states = self._read(tokens[:, position - 1].gather(1, best % width), states)
            corrected = logits[:, position, None] + self._correction(
                hidden[:, position], states, tokens[:, position]
            )
            log_probs[:, position] = conditional(corrected, logits[:, position], log_sum[:, position])
        return Candidates(tokens, log_probs, beam=beam)

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the GRU's states after one more token of each path.

        Args:
            tokens: [...] int64.
            states: [..., width of the GRU] before.
        """
        embedded = self.embed(tokens).to(states.dtype).flatten(0, -2)
        gru = self.gru
        after = torch.gru_cell(embedded, states.flatten(0, -2), gru.weight_ih_l0, gru.weight_hh_l0)
        return after.view_as(states)

    def _correction(self, hidden: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits: [bs, W, K] float32.

        Args:
            hidden: [bs, hidden] of the position.
            states: [bs, W, width of the GRU].
            tokens: [bs, K] int64, the position's candidates.
        """
        both = torch.cat((hidden[:, None].expand(-1, states.shape[1], -1), states), dim=-1)
        inner = functional.silu(self.inner(both))
        return (inner @ self.outer.weight[tokens].transpose(-1, -2)).float()
