"""Which nodes of a draft tree are ever accepted, by depth and rank, and a correction of the scores with that.

A node's rank is its place among its parent's candidates, and it hangs off the top-1 path if some node above it is
not its parent's first choice.
"""

from __future__ import annotations

import torch

from benchmark.drafter.evaluate import Head, along, beam, tree_threshold

OFF, ON = 0, 1  # is the parent on the top-1 path?


def ranks(log_q: torch.Tensor) -> torch.Tensor:
    """The place of each candidate in the falling order of its row, from 0."""
    order = torch.argsort(log_q, dim=-1, descending=True, stable=True)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


class Counts:
    """Sums over drafts, each [2, depth, ranks]: parent OFF or ON the top-1 path, depth - 1, rank.

    Attributes:
        built: nodes in the trees.
        reached: built nodes whose parent was accepted.
        accepted: built nodes that were accepted.
        expected: sum over reached nodes of the probability that the head gave them.
    """

    FIELDS = ("built", "reached", "accepted", "expected")

    def __init__(self, depth: int, ranks: int, device):
        zeros = lambda: torch.zeros(2, depth, ranks, dtype=torch.float64, device=device)  # noqa: E731
        self.built, self.reached, self.accepted, self.expected = (zeros() for _ in self.FIELDS)

    def add(self, head: Head, ids: torch.Tensor, truth: torch.Tensor, budget: int | None) -> None:
        """Count the trees of some drafts.

        Args:
            head: scores them.
            ids: [n, depth, k] the candidates' tokens.
            truth: [n, depth] the target's greedy tokens; negative past the text's end.
            budget: nodes of a tree, without the root. None: all k candidates of each position count as built
                where their parent was accepted, so that `built` equals `reached`.
        """
        match = ids == truth[..., None]
        n, depth, _ = match.shape
        choice = match.long().argmax(-1)
        rows = along(head, choice)
        rank = ranks(rows)
        own = rank.gather(2, choice[..., None])[..., 0]
        true = match.any(-1).long().cumprod(1).bool()  # the target's path is within the candidates
        start = torch.ones(n, 1, dtype=torch.bool, device=match.device)
        reached = torch.cat((start, true[:, :-1]), 1) & (truth >= 0)
        on = torch.cat((start, (true & (own == 0)).long().cumprod(1).bool()[:, :-1]), 1)
        score = rows.gather(2, choice[..., None])[..., 0].cumsum(1)
        before = torch.cat((score.new_zeros(n, 1), score[:, :-1]), 1)
        inside = torch.ones_like(match)
        if budget is not None:
            levels = list(self._levels(head, depth, budget))
            limit = tree_threshold([level for level, *_ in levels], budget)
            inside = before[..., None] + rows >= limit[:, None, None] - 1e-5
            for d, (level, rank_, on_) in enumerate(levels):
                self._count(self.built, d, on_, rank_, level >= limit[:, None] - 1e-5)
        for d in range(depth):
            test = inside[:, d] & reached[:, d, None]
            on_ = on[:, d, None].expand_as(test)
            self._count(self.reached, d, on_, rank[:, d], test)
            self._count(self.accepted, d, on_, rank[:, d], test & match[:, d])
            self._count(self.expected, d, on_, rank[:, d], test, rows[:, d].exp())
            if budget is None:
                self._count(self.built, d, on_, rank[:, d], test)

    @staticmethod
    def _levels(head: Head, depth: int, width: int):
        """Per depth: scores, ranks, and whether the parent is on the top-1 path, each [n, lanes]."""
        on = None
        for level, lane, choice, log_q in beam(head, depth, width):
            rank = ranks(log_q).expand(-1, 1 if on is None else on.shape[1], -1)
            rank = rank.flatten(1).gather(1, lane * log_q.shape[-1] + choice)
            parent = torch.ones_like(rank, dtype=torch.bool) if on is None else on.gather(1, lane)
            yield level, rank, parent
            on = parent & (rank == 0)

    @staticmethod
    def _count(table, d, on, rank, where, weight=None) -> None:
        at = on.long() * table.shape[2] + rank.clamp_max(table.shape[2] - 1)
        value = where.double() if weight is None else where * weight.double()
        sums = torch.zeros(2 * table.shape[2], dtype=torch.float64, device=table.device)
        table[:, d] += sums.index_add_(0, at.flatten(), value.flatten()).view(2, -1)

    def to_json(self) -> dict:
        """{"on the top-1 path": {"built": [[...] per depth], ...}, "off ...": ...}; the last rank holds the rest."""
        return {
            name: {field: getattr(self, field)[side].round(decimals=1).tolist() for field in self.FIELDS}
            for name, side in (("parent_on_top1_path", ON), ("parent_off_top1_path", OFF))
        }

    def correction(self, prior: float = 20.0) -> torch.Tensor:
        """log(observed / expected) acceptance [2, depth, ranks], drawn towards 0 by `prior` expected acceptances."""
        return ((self.accepted + prior) / (self.expected + prior)).log().float()


class Calibrated:
    """A head whose log-probabilities are corrected by depth, rank and the parent's place on the top-1 path.

    Args:
        head: the head.
        correction: [2, depth, k].
    """

    def __init__(self, head: Head, correction: torch.Tensor):
        self.head, self.correction = head, correction

    def start(self):
        return self.head.start(), None

    def log_q(self, depth: int, state):
        inner, on = state
        log_q = self.head.log_q(depth, inner)
        if on is None:  # the root's children
            on = torch.ones_like(log_q[..., 0], dtype=torch.bool)
        return log_q + self.correction[on.long()[..., None], depth, ranks(log_q)]

    def follow(self, depth: int, state, lane: torch.Tensor, choice: torch.Tensor):
        inner, on = state
        log_q = self.head.log_q(depth, inner)
        first = log_q.argmax(-1)
        same = first.expand(-1, lane.shape[1]) if first.shape[1] == 1 else first.gather(1, lane)
        on = choice == same if on is None else on.gather(1, lane) & (choice == same)
        return self.head.follow(depth, inner, lane, choice), on
