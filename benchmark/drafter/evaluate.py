"""Accept length of a drafter for the chain and for trees, on texts whose greedy tokens are known.

One batched pass drafts a block at every position of a text. Then the steps that a server would take are
replayed. The accept length is the number of tokens that one verify step emits, bonus token included.
"""

from __future__ import annotations

import torch


def tree_threshold(log_q: torch.Tensor, budget: int, top1_path: bool) -> torch.Tensor:
    """The score of the last node that a tree of `budget` drafted nodes takes.

    The tree of the paper (arXiv 2604.12989) holds the `budget` prefixes with the largest sums of log q. A
    prefix's ancestors score at least as much, so the best are found level by level, from the best of the
    level above.

    Args:
        log_q: [n, depth, k] float, the best candidates per position in falling order; k >= budget, or all
            there are.
        budget: nodes of the tree, without the root.
        top1_path: keep the top-1 path at full depth, within the budget.

    Returns:
        [n] the smallest score in the tree. Nodes of a kept top-1 path are in the tree whatever their score.
    """
    n, depth, k = log_q.shape
    level = torch.zeros(n, 1, device=log_q.device)
    every = []
    for d in range(depth):
        scores = (level[:, :, None] + log_q[:, None, d]).flatten(1)
        level = scores.topk(min(budget, scores.shape[1]), dim=1).values
        # The level's best is on the top-1 path. It does not compete for the rest of the budget.
        every.append(level[:, 1:] if top1_path else level)
    budget -= depth if top1_path else 0
    if budget <= 0:
        return torch.full((n,), float("inf"), device=log_q.device)
    return torch.cat(every, 1).topk(budget, dim=1).values[:, -1]


def accepted(
    log_q: torch.Tensor, ids: torch.Tensor, truth: torch.Tensor, budget: int, top1_path: bool = False
) -> torch.Tensor:
    """How many drafted tokens the target accepts.

    Args:
        log_q: [n, depth, k] float, candidates per position in falling order.
        ids: [n, depth, k] their tokens.
        truth: [n, depth] the target's greedy tokens; a negative one matches nothing.
        budget: nodes of the tree, without the root; 0 is the chain of first choices.
        top1_path: as in tree_threshold().

    Returns:
        [n] int64.
    """
    match = ids == truth[..., None]
    chain = match[..., 0].long().cumprod(1).sum(1)
    if budget == 0:
        return chain
    score = torch.where(match, log_q, float("-inf")).amax(-1).cumsum(1)
    # The tolerance: cumsum may add in a different order.
    inside = score >= tree_threshold(log_q, budget, top1_path)[:, None] - 1e-5
    tree = inside.long().cumprod(1).sum(1)
    return torch.maximum(tree, chain.clamp_max(budget)) if top1_path else tree


def replay(steps: torch.Tensor) -> tuple[int, int]:
    """Walk over one text as a server does.

    Args:
        steps: [n] accepted tokens of a draft whose bonus token is token i of the answer.

    Returns:
        Emitted tokens, and verify steps. The first token comes from prefill and counts for neither.
    """
    steps, at, passes = steps.tolist(), 0, 0
    while at < len(steps):
        at += steps[at] + 1
        passes += 1
    return min(at, len(steps)), passes
