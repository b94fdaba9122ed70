"""Builds draft trees from the drafter's hidden states, inside the captured draft graph or eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sgl_kernel.ddtree import DraftTrees, build_trees
from sglang.srt.speculative.ddtree.heads import Head

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.expectation import Expectation


def first_nodes(trees: DraftTrees, num_nodes: int) -> DraftTrees:
    """Copy the first nodes of trees. The copies are the trees that build_trees() makes for this width.

    They keep as many ancestor words as the wider trees, because a workspace for the wider trees expects as many.

    Args:
        trees: the trees of bs requests.
        num_nodes: nodes to keep, root included.

    Returns:
        Trees of width num_nodes.
    """

    def cut(links: torch.Tensor) -> torch.Tensor:
        return torch.where(links[:, :num_nodes] < num_nodes, links[:, :num_nodes], -1)

    return DraftTrees(
        tokens=trees.tokens[:, :num_nodes].contiguous(),
        parents=trees.parents[:, :num_nodes].contiguous(),
        depths=trees.depths[:, :num_nodes].contiguous(),
        ancestors=trees.ancestors[:, :num_nodes].contiguous(),
        first_child=cut(trees.first_child),
        next_sibling=cut(trees.next_sibling),
        sizes=trees.sizes.clamp(max=num_nodes),
    )


def lone_roots(bonus: torch.Tensor, words: int = 1) -> DraftTrees:
    """Make the trees of a step without a draft.

    Args:
        bonus: [bs] int64, the roots' tokens.
        words: ancestor words per node.

    Returns:
        Trees of width 1.
    """
    trees = DraftTrees.allocate(bonus.numel(), 1, bonus.device)
    trees.tokens[:, 0] = bonus
    for links in (trees.parents, trees.first_child, trees.next_sibling):
        links.fill_(-1)
    trees.depths.zero_()
    trees.ancestors = trees.ancestors.new_zeros(bonus.numel(), 1, words)
    trees.ancestors[..., 0] = 1
    trees.sizes.fill_(1)
    return trees


class TreeBuilder:
    """Builds the most probable tree from what a draft head says of its candidates.

    Under tensor parallelism the ranks gather their candidates and one logsumexp per position, never the
    vocabulary.

    Args:
        head: the drafter's.
        block_size: F, positions of a draft pass. Position 0 is the bonus token.
        num_nodes: N, nodes of a tree.
        keep_top1_path: whether a tree always contains the first choice of every depth.
        max_bs: the most requests in a captured graph.
        device: where the trees go.
        expectation: takes the trees' expected tokens; None: all steps have one width.
    """

    def __init__(
        self,
        *,
        head: Head,
        block_size: int,
        num_nodes: int,
        keep_top1_path: bool,
        max_bs: int,
        device: torch.device | str,
        expectation: Expectation | None = None,
    ) -> None:
        self.head = head
        self.expectation = expectation
        self.block_size = block_size
        self.num_nodes = num_nodes
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

    @torch.no_grad()
    def build(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, trees: DraftTrees) -> None:
        """Build the trees of a batch.

        Args:
            hidden_states: [bs * F, hidden], the drafter's.
            input_ids: [bs * F] int64. The first of every F tokens is a bonus token.
            trees: bs trees to write into.
        """
        bonus = input_ids.view(-1, self.block_size)[:, 0].contiguous()
        candidates = self.head.candidates(hidden_states.view(bonus.shape[0], self.block_size, -1), bonus)
        scores = None if self.expectation is None else self.expectation.scores[: bonus.shape[0]]
        build_trees(
            candidates.tokens,
            candidates.log_probs,
            bonus,
            trees,
            log_sum=candidates.log_sum,
            beam=candidates.beam,
            scores=scores,
            keep_top1_path=self.keep_top1_path,
        )
        if self.expectation is not None:
            self.expectation.predict(trees, candidates.tokens)

    def set_anchor(self, hidden: torch.Tensor | None, bs: int) -> None:
        """Give the head the drafter's states of the last committed tokens. Upstream calls it after every commit.

        Args:
            hidden: as for Head.set_anchor().
            bs: its rows.
        """
        self.head.set_anchor(hidden)
