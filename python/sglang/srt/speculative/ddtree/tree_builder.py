"""Builds draft trees from the drafter's hidden states, inside the captured draft graph or eagerly."""

from __future__ import annotations

import torch
from sgl_kernel.ddtree import DraftTrees, build_trees
from sglang.srt.speculative.ddtree.candidates import top_candidates


class TreeBuilder:
    """Takes K candidates at each draft position and builds the most probable tree from them.

    Under tensor parallelism the ranks gather their candidates and one logsumexp per position, never the
    vocabulary.

    Args:
        lm_head: the target's LM head, which the drafter shares.
        block_size: F, positions of a draft pass. Position 0 is the bonus token.
        num_nodes: N, nodes of a tree.
        num_candidates: K, candidates per position.
        keep_top1_path: whether a tree always contains the first choice of every depth.
        max_bs: the most requests in a captured graph.
        device: where the trees go.
    """

    def __init__(
        self,
        *,
        lm_head: torch.nn.Module,
        block_size: int,
        num_nodes: int,
        num_candidates: int,
        keep_top1_path: bool,
        max_bs: int,
        device: torch.device | str,
    ) -> None:
        self.lm_head = lm_head
        self.block_size = block_size
        self.num_nodes = num_nodes
        self.num_candidates = num_candidates
        self.keep_top1_path = keep_top1_path
        self.max_bs = max_bs
        self.device = device
        # Captured graphs write and read here. Zeroed, because a verify graph also runs on the trees of its
        # padding, which no draft may have built yet.
        self.trees = DraftTrees.allocate(max_bs, num_nodes, device)
        for tensor in (self.trees.tokens, self.trees.parents, self.trees.depths, self.trees.ancestors):
            tensor.zero_()

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Build into self.trees. This is the hook at the end of the captured draft graph.

        Args:
            hidden_states: [bs * F, hidden], the drafter's.
            input_ids: [bs * F] int64. The first of every F tokens is a bonus token.
        """
        bs = input_ids.shape[0] // self.block_size
        self.build(hidden_states, input_ids, self.trees.first(bs))

    def build(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, trees: DraftTrees) -> None:
        """Build the trees of a batch.

        Args:
            hidden_states: [bs * F, hidden], the drafter's.
            input_ids: [bs * F] int64. The first of every F tokens is a bonus token.
            trees: bs trees to write into.
        """
        bs, max_depth = trees.tokens.shape[0], self.block_size - 1
        hidden = hidden_states.view(bs, self.block_size, -1)[:, 1:].reshape(bs * max_depth, -1)
        tokens, logits, log_sum = top_candidates(hidden, self.lm_head, self.num_candidates)
        shape = (bs, max_depth, self.num_candidates)
        build_trees(
            tokens.view(shape),
            logits.view(shape),
            input_ids.view(bs, -1)[:, 0].contiguous(),
            trees,
            log_sum=log_sum.view(shape[:2]),
            keep_top1_path=self.keep_top1_path,
        )
