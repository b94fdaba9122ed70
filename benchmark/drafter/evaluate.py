"""Accept length of a drafter for the chain and for trees, on texts whose greedy tokens are known.

One batched pass drafts a block at every position of a text. Then the steps that a server would take are
replayed. The accept length is the number of tokens that one verify step emits, bonus token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch


class Head(Protocol):
    """What a tree asks of a drafter, for n drafts at once.

    A lane is one prefix of each draft. All lanes have the same length, and the state is what the head has to
    know about them.
    """

    def start(self) -> Any:
        """The state of one lane, the empty prefix."""

    def log_q(self, depth: int, state: Any) -> torch.Tensor:
        """Log-probabilities [n, lanes, k] of the candidates that follow prefixes of `depth` tokens.

        One lane stands for all if they are equal.
        """

    def follow(self, depth: int, state: Any, lane: torch.Tensor, choice: torch.Tensor) -> Any:
        """The state of new lanes: lane[n, i], extended by candidate choice[n, i] of position `depth`."""


class Marginals:
    """The plain DFlash head. A candidate's probability does not depend on the prefix.

    Args:
        log_q: [n, depth, k].
    """

    def __init__(self, log_q: torch.Tensor):
        self.table = log_q

    def start(self) -> None:
        return None

    def log_q(self, depth: int, state: None) -> torch.Tensor:
        return self.table[:, depth, None]

    def follow(self, depth: int, state: None, lane: torch.Tensor, choice: torch.Tensor) -> None:
        return None


def beam(head: Head, depth: int, width: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Find the `width` best prefixes of every length.

    A prefix's ancestors score at least as much. So the best of a level descend from the best of the level
    above, and with `width` nodes per level a tree of `width` nodes is exact.

    Yields:
        For each depth: scores in falling order, the parents' lanes and the choices, each [n, at most width],
        and log_q of the depth, [n, lanes, k].
    """
    state, level = head.start(), None
    for d in range(depth):
        log_q = head.log_q(d, state)
        scores = log_q if level is None else level[:, :, None] + log_q
        k = scores.shape[-1]
        level, at = scores.flatten(1).topk(min(width, scores[0].numel()), dim=1)
        lane, choice = at // k, at % k
        yield level, lane, choice, log_q
        state = head.follow(d, state, lane, choice)


def tree_threshold(levels: Sequence[torch.Tensor], budget: int, top1_path: bool = False) -> torch.Tensor:
    """The score of the last node that a tree of `budget` drafted nodes takes.

    The tree of the paper (arXiv 2604.12989) holds the `budget` prefixes with the largest sums of log q.

    Args:
        levels: per depth, the best scores in falling order, at least `budget` or all there are.
        budget: nodes of the tree, without the root.
        top1_path: keep the top-1 path at full depth, within the budget. For Marginals only, whose best prefix
            of every length is on that path.

    Returns:
        [n] the smallest score in the tree. Nodes of a kept top-1 path are in the tree whatever their score.
    """
    if top1_path:  # its nodes do not compete for the rest of the budget
        levels, budget = [level[:, 1:] for level in levels], budget - len(levels)
    if budget <= 0:
        return torch.full((len(levels[0]),), float("inf"), device=levels[0].device)
    scores = torch.cat(list(levels), 1)
    return scores.topk(min(budget, scores.shape[1]), dim=1).values[:, -1]


def along(head: Head, choices: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, depth, k] of the candidates that follow each prefix of a path.

    Args:
        choices: [n, depth] the path's candidates.
    """
    state, rows = head.start(), []
    lane = torch.zeros_like(choices[:, :1])
    for d in range(choices.shape[1]):
        rows.append(head.log_q(d, state)[:, 0])
        state = head.follow(d, state, lane, choices[:, d : d + 1])
    return torch.stack(rows, 1)


def top1(head: Head, depth: int) -> torch.Tensor:
    """The candidates [n, depth] of the top-1 path."""
    return torch.cat([choice for _, _, choice, _ in beam(head, depth, 1)], 1)


def truth_scores(head: Head, match: torch.Tensor) -> torch.Tensor:
    """Scores [n, depth] of the target's own path: -inf from the first token that is no candidate.

    Args:
        match: [n, depth, k] whether the candidate is the target's token.
    """
    rows = along(head, match.long().argmax(-1))
    return torch.where(match, rows, float("-inf")).amax(-1).cumsum(1)


def accepted(
    head: Head, ids: torch.Tensor, truth: torch.Tensor, budgets: Sequence[int], top1_path: bool = False
) -> torch.Tensor:
    """How many drafted tokens the target accepts.

    Args:
        head: scores the candidates.
        ids: [n, depth, k] the candidates' tokens.
        truth: [n, depth] the target's greedy tokens; a negative one matches nothing.
        budgets: nodes of each tree, without the root; 0 is the chain of first choices.
        top1_path: as in tree_threshold().

    Returns:
        [len(budgets), n] int64.
    """
    match, depth = ids == truth[..., None], ids.shape[1]
    chain = match.gather(2, top1(head, depth)[..., None])[..., 0].long().cumprod(1).sum(1)
    if not any(budgets):
        return chain.expand(len(budgets), -1)
    score = truth_scores(head, match)
    levels = [level for level, *_ in beam(head, depth, max(budgets))]
    every = []
    for budget in budgets:
        # The tolerance: the two sums may add in a different order.
        inside = score >= tree_threshold(levels, budget, top1_path)[:, None] - 1e-5
        tree = inside.long().cumprod(1).sum(1)
        tree = torch.maximum(tree, chain.clamp_max(budget)) if top1_path else tree
        every.append(tree if budget else chain)
    return torch.stack(every)


def visits(steps: list[int]) -> list[int]:
    """The drafts of one text that a server makes.

    Args:
        steps: accepted tokens of a draft whose bonus token is token i of the answer.

    Returns:
        Their indices i.
    """
    at, seen = 0, []
    while at < len(steps):
        seen.append(at)
        at += steps[at] + 1
    return seen


def replay(steps: torch.Tensor) -> tuple[int, int]:
    """Walk over one text as a server does.

    Args:
        steps: [n] accepted tokens of a draft whose bonus token is token i of the answer.

    Returns:
        Emitted tokens, and verify steps. The first token comes from prefill and counts for neither.
    """
    steps = steps.tolist()
    seen = visits(steps)
    return min(seen[-1] + steps[seen[-1]] + 1, len(steps)) if seen else 0, len(seen)
