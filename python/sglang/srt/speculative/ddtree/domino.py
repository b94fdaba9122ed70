"""Domino: a head that scores a candidate after the whole path, with a GRU over the path's tokens.

There are too many paths to score all of them. They grow level by level, as a beam of a fixed width: each level scores
the candidates after each path of the beam, and the best of all these become the next beam. The tree takes the best
nodes of everything that was scored.

Source: the weights and the formula are those of SGLang 0.5.23's DFlashDraftModel with projector_type "domino".
"""

from __future__ import annotations

import torch
from sgl_kernel.ddtree import MAX_PATHS
from sglang.srt.speculative.ddtree.heads import Candidates, Head, HeadParts, conditional
from torch.nn import functional

BEAM_WIDTH = MAX_PATHS


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
        bs, depth = hidden.shape[0], hidden.shape[1] - 1
        hidden = hidden[:, self.first : self.first + depth]
        tokens, logits, log_sum = self.top(hidden)
        width = self.num_candidates
        # What does not depend on the path, for all positions at once.
        embedded = self.embed(tokens).to(hidden.dtype)
        own = functional.linear(hidden, self.inner.weight[:, : hidden.shape[2]])
        vectors = self.outer.weight[tokens].transpose(-1, -2)
        mass = logits.logsumexp(-1) - log_sum

        log_probs = logits.new_full((bs, depth, BEAM_WIDTH, width), -float("inf"))
        log_probs[:, 0, 0] = logits[:, 0] - log_sum[:, 0, None]
        # Of each path of the beam. At first there is only the root.
        scores = logits.new_full((bs, BEAM_WIDTH), -float("inf"))
        scores[:, 0] = 0.0
        root = self._read(
            self.embed(bonus)[:, None].to(hidden.dtype), hidden.new_zeros(bs, 1, self.gru.hidden_size)
        )
        states = root.expand(-1, BEAM_WIDTH, -1)
        beam = [torch.full((bs, BEAM_WIDTH), -1, device=tokens.device)]
        for position in range(1, depth):
            every = (scores[:, :, None] + log_probs[:, position - 1]).flatten(1)
            scores, best = every.topk(BEAM_WIDTH)
            beam.append(torch.where(scores > -float("inf"), best, -1))
            last = _take(embedded[:, position - 1], best % width)
            states = self._read(last, _take(states, best // width))
            correction = self._inner(own[:, position], states) @ vectors[:, position]
            corrected = logits[:, position, None] + correction.float()
            log_probs[:, position] = conditional(corrected, mass[:, position])
        return Candidates(tokens, log_probs, beam=torch.stack(beam, dim=1).int())

    def _read(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the GRU's states after one more token of each path.

        Args:
            embedded: [bs, W, hidden], the tokens' embeddings.
            states: [bs, W, width of the GRU] before.
        """
        gru = self.gru
        after = torch.gru_cell(
            embedded.flatten(0, 1), states.flatten(0, 1), gru.weight_ih_l0, gru.weight_hh_l0
        )
        return after.view_as(states)

    def _inner(self, own: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the inner layer of the correction: [bs, W, rank].

        Args:
            own: [bs, rank], what the position's hidden state gives.
            states: [bs, W, width of the GRU].
        """
        of_states = functional.linear(states, self.inner.weight[:, -states.shape[2] :])
        return functional.silu(own[:, None] + of_states)


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[b, index[b, w]]: [bs, W, size] of rows [bs, R, size]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))
