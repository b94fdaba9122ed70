"""From the drafter's hidden states to trees. Runs inside the captured draft graph, or eagerly."""

from __future__ import annotations

import torch
from sgl_kernel.ddtree import DraftTrees, build_trees
from sglang.srt.models.dflash import candidate_topk


class TreeBuilder:
    """Takes candidates at each draft position and builds the best tree of them.

    Under tensor parallelism only the candidates and the logsumexp of each rank are gathered, never the vocabulary.

    Args:
        lm_head: the target's, shared by the drafter.
        block_size: F, positions of a draft pass; position 0 is the bonus token.
        rows: N, rows of a tree.
        candidates: K, of each position.
        keep_top1_path: whether the first choices of all depths are always in the tree.
        max_bs: most requests of a captured graph.
        device: of the trees.
    """

    def __init__(self, *, lm_head, block_size, rows, candidates, keep_top1_path, max_bs, device):
        self.lm_head = lm_head
        self.block_size = block_size
        self.rows = rows
        self.candidates = candidates
        self.keep_top1_path = keep_top1_path
        self.device = device
        self.trees = DraftTrees.allocate(max_bs, rows, device)  # what a captured graph builds into

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Builds into self.trees: the hook at the end of the captured draft graph. Arguments as of build()."""
        bs = input_ids.shape[0] // self.block_size
        self.build(hidden_states, input_ids, self.trees.first(bs))

    def build(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, trees: DraftTrees) -> None:
        """Builds the trees of a batch.

        Args:
            hidden_states: [bs * F, hidden] of the drafter.
            input_ids: [bs * F] int64; every F-th is a bonus token.
            trees: of bs requests, to write into.
        """
        bs = trees.tokens.shape[0]
        hidden = hidden_states.view(bs, self.block_size, -1)[:, 1:].reshape(bs * (self.block_size - 1), -1)
        # One candidate a position makes a chain, whatever the scores; upstream's fused kernel wants two (with one it
        # gave ids past the vocabulary on an H200).
        tokens, logits, log_sum = candidate_topk(
            hidden, self.lm_head, self.candidates, with_partition=self.candidates > 1
        )
        shape = (bs, self.block_size - 1, self.candidates)
        build_trees(
            tokens.view(shape),
            logits.float().view(shape),
            input_ids.view(bs, -1)[:, 0].contiguous(),
            trees,
            log_sum=None if log_sum is None else log_sum.float().view(shape[:2]),
            keep_top1_path=self.keep_top1_path,
        )
