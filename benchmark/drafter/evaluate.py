"""Accepted length of a drafter on texts whose greedy tokens are known, for the chain and for trees.

One batched pass drafts a block at every position of every text; then the steps that a server would take are replayed.
The accepted length counts the bonus token: it is the number of tokens that one verify pass yields.
"""

from __future__ import annotations

import torch


def tree_threshold(log_q: torch.Tensor, budget: int, spine: bool) -> torch.Tensor:
    """The score of the last node that a tree of `budget` nodes takes.

    The tree of the paper (arXiv 2604.12989) holds the `budget` prefixes with the largest sum of log q. A prefix's
    ancestors score at least as much, so the best are found level by level, from the best of the level above.

    Args:
        log_q: [n, depth, k] float, the k >= budget best per position (or all there are), falling.
        spine: also keep the rank-1 path at full depth; it takes its nodes out of the budget.

    Returns:
        [n] the smallest score in the tree; what is on the spine is in it regardless.
    """
    n, depth, k = log_q.shape
    level = torch.zeros(n, 1, device=log_q.device)
    every = []
    for d in range(depth):
        scores = (level[:, :, None] + log_q[:, None, d]).flatten(1)
        level = scores.topk(min(budget, scores.shape[1]), dim=1).values
        # The spine's node is the level's best. It does not compete for the rest of the budget.
        every.append(level[:, 1:] if spine else level)
    budget -= depth if spine else 0
    if budget <= 0:
        return torch.full((n,), float("inf"), device=log_q.device)
    return torch.cat(every, 1).topk(budget, dim=1).values[:, -1]


def accepted(log_q, ids, truth, budget: int, spine: bool = False) -> torch.Tensor:
    """How many drafted tokens the target accepts.

    Args:
        log_q, ids: [n, depth, k] candidates a position, falling.
        truth: [n, depth] the target's greedy tokens; a negative one matches nothing.
        budget: nodes of the tree; 0 is the chain of rank-1 tokens.

    Returns:
        [n] int64.
    """
    match = ids == truth[..., None]
    chain = match[..., 0].long().cumprod(1).sum(1)
    if budget == 0:
        return chain
    score = torch.where(match, log_q, float("-inf")).amax(-1).cumsum(1)
    inside = score >= tree_threshold(log_q, budget, spine)[:, None] - 1e-5  # cumsum may add in another order
    tree = inside.long().cumprod(1).sum(1)
    return torch.maximum(tree, chain.clamp_max(budget)) if spine else tree


def replay(steps: torch.Tensor) -> tuple[int, int]:
    """Walk over one text as a server does.

    Args:
        steps: [n] accepted tokens of a draft whose bonus token is token i of the response.

    Returns:
        (tokens yielded, verify passes). The first token comes from the prefill and counts for neither.
    """
    steps, at, passes = steps.tolist(), 0, 0
    while at < len(steps):
        at += steps[at] + 1
        passes += 1
    return min(at, len(steps)), passes
