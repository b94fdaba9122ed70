"""How many tokens a draft should emit, and how many of its nodes were accepted: the budget's kernels.

A kernel at the end of the draft graph sums the calibrated probabilities of the nodes of each width. The sum is the number
of tokens that a verify of this width is expected to emit. A kernel in the commit graph counts, by depth and rank, which
nodes were tested and which were accepted. The host reads both two steps later. Calibration turns the counts into factors,
which the host copies back for the next drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sgl_kernel.ddtree import Accepted, DraftTrees, ancestor_mask

LATE = 2  # a step's report is read this many steps later: by then its copy to the host has arrived
# Sums of integers do not depend on the order of the atomics, so all processes get the same.
FIXED_POINT = 1 << 16


class Expectation:
    """Holds what the kernels write and read: predict() runs in the draft graph, count() in the commit graph.

    Args:
        widths: N of every verify, ascending.
        max_requests: most requests of a step.
        block_size: F.
        num_candidates: K.
        device: the device of the trees.
    """

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        max_requests: int,
        block_size: int,
        num_candidates: int,
        device: torch.device | str,
    ) -> None:
        self.widths = widths
        shape = (block_size - 1, num_candidates)
        # [D, K], what the conditional probabilities are multiplied with. Row d is of depth d + 1.
        self.factors = torch.ones(shape, dtype=torch.float32, device=device)
        # [2, D, K], since the start: acceptances that were expected, in fixed point, and acceptances.
        self.totals = torch.zeros((2, *shape), dtype=torch.int64, device=device)
        # By request: the expected tokens of each width, and in the last column the emitted tokens.
        self.report = torch.zeros(max_requests, len(widths) + 1, dtype=torch.float32, device=device)
        # By request and node: its rank among the candidates of its position, or -1 for the root and padding; its
        # probability given its parent, as drafted; and its score from build_trees().
        self.ranks = torch.full((max_requests, widths[-1]), -1, dtype=torch.int32, device=device)
        self.probabilities = torch.zeros(max_requests, widths[-1], dtype=torch.float32, device=device)
        self.scores = torch.zeros(max_requests, widths[-1], dtype=torch.float32, device=device)
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)

    def predict(self, trees: DraftTrees, candidates: torch.Tensor) -> None:
        """Write ranks, probabilities, and the expected tokens of the report.

        Args:
            trees: the trees of the widest N. build_trees() has written their nodes' scores to self.scores.
            candidates: [bs, D, K] int64, the tokens that they were built from.
        """
        predict = self._predict_in_kernel if trees.tokens.is_cuda else self._predict_in_torch
        predict(trees, candidates)

    def _predict_in_torch(self, trees: DraftTrees, candidates: torch.Tensor) -> None:
        bs, num_nodes = trees.tokens.shape
        scores = self.scores[:bs]
        at = (trees.depths.long() - 1).clamp(min=0)
        request = torch.arange(bs)[:, None]
        node = torch.arange(num_nodes)
        drafted = (node > 0) & (node < trees.sizes[:, None])
        rank = (candidates[request, at] == trees.tokens[..., None]).long().argmax(-1)
        of_parent = scores.gather(1, trees.parents.long().clamp(min=0))
        probability = torch.where(drafted, (scores - of_parent).exp(), 0.0)
        self.ranks[:bs] = torch.where(drafted, rank, -1)
        self.probabilities[:bs] = probability
        calibrated = (probability * self.factors[at, rank]).clamp(1e-9, 1.0).log()
        calibrated = torch.where(drafted, calibrated, 0.0)
        on_path = ancestor_mask(trees.ancestors, num_nodes).float()  # [bs, node, ancestor]
        accepted = torch.where(drafted, (on_path @ calibrated[..., None])[..., 0].exp(), 0.0)
        self.report[:bs, :-1] = 1.0 + accepted.cumsum(1)[:, self._widths.long() - 1]

    def _predict_in_kernel(self, trees: DraftTrees, candidates: torch.Tensor) -> None:
        bs, num_nodes = trees.tokens.shape
        _predict_kernel[bs,](
            trees.tokens, trees.parents, trees.depths, trees.ancestors, trees.sizes, candidates, self.scores,
            self.factors, self._widths, self.ranks, self.probabilities, self.report, N=num_nodes,
            NODES=triton.next_power_of_2(num_nodes), WORDS=trees.ancestors.shape[2], D=candidates.shape[1],
            K=candidates.shape[2], WIDTHS=self._widths.numel(),
            COLUMNS=triton.next_power_of_2(self._widths.numel()), num_warps=4,
        )  # fmt: skip

    def count(self, trees: DraftTrees, accepted: Accepted, rows: torch.Tensor, num_nodes: int) -> None:
        """Add a step to the totals, and write its emitted tokens to the report.

        Args:
            trees: the trees of the widest N that predict() was given.
            accepted: the accepted paths of the step.
            rows: [bs] the requests' rows of the slot table. Row 0 is padding.
            num_nodes: N of the step.
        """
        count = self._count_in_kernel if rows.is_cuda else self._count_in_torch
        count(trees, accepted, rows, num_nodes)

    def _count_in_torch(
        self, trees: DraftTrees, accepted: Accepted, rows: torch.Tensor, num_nodes: int
    ) -> None:
        bs, ranks = rows.numel(), self.ranks[: rows.numel()]
        depths = trees.depths.long()
        node = torch.arange(depths.shape[1])
        drafted = (ranks >= 0) & (node < num_nodes) & (rows[:, None] > 0)
        above = (depths - 1).clamp(min=0)
        lengths = accepted.lengths[:, None]
        tested = drafted & (above < lengths) & (accepted.path.gather(1, above) == trees.parents)
        last = accepted.path.shape[1] - 1
        kept = tested & (depths < lengths) & (accepted.path.gather(1, depths.clamp(max=last)) == node)
        cells = above * self.totals.shape[2] + ranks.clamp(min=0)
        fixed = (self.probabilities[:bs].clamp(max=1.0) * FIXED_POINT).round().long()
        flat = self.totals.view(2, -1)
        flat[0].scatter_add_(0, cells.flatten(), torch.where(tested, fixed, 0).flatten())
        flat[1].scatter_add_(0, cells.flatten(), kept.long().flatten())
        self.report[:bs, -1] = accepted.lengths

    def _count_in_kernel(
        self, trees: DraftTrees, accepted: Accepted, rows: torch.Tensor, num_nodes: int
    ) -> None:
        width = trees.tokens.shape[1]
        _count_kernel[rows.numel(),](
            trees.parents, trees.depths, accepted.path, accepted.lengths, rows, self.ranks, self.probabilities,
            self.totals, self.report, num_nodes, N=width, NODES=triton.next_power_of_2(width),
            F=accepted.path.shape[1], K=self.totals.shape[2], CELLS=self.totals[0].numel(),
            COLUMNS=self.report.shape[1], SCALE=FIXED_POINT, num_warps=1,
        )  # fmt: skip


@triton.jit
def _predict_kernel(  # type: ignore[no-untyped-def]
    tokens,
    parents,
    depths,
    ancestors,
    sizes,
    candidates,
    scores,
    factors,
    widths,
    ranks,
    probabilities,
    report,
    N: tl.constexpr,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    WIDTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    here = node < N
    token = tl.load(tokens + row * N + node, mask=here, other=-1)
    depth = tl.load(depths + row * N + node, mask=here, other=0)
    drafted = (node > 0) & (node < tl.load(sizes + row))
    at = tl.where(drafted, depth - 1, 0)
    position = row * D + at
    rank = tl.full([NODES], -1, tl.int32)
    for i in tl.static_range(K):
        found = drafted & (tl.load(candidates + position * K + i, mask=drafted, other=-2) == token)
        rank = tl.where(found, i, rank)
    tl.store(ranks + row * N + node, rank, mask=here)
    parent = tl.load(parents + row * N + node, mask=drafted, other=0)
    score = tl.load(scores + row * N + node, mask=drafted, other=0.0)
    of_parent = tl.load(scores + row * N + parent, mask=drafted, other=0.0)
    probability = tl.where(drafted, tl.exp(score - of_parent), 0.0)
    tl.store(probabilities + row * N + node, probability, mask=here)
    factor = tl.load(factors + at * K + tl.maximum(rank, 0), mask=drafted, other=1.0)
    calibrated = tl.log(tl.minimum(tl.maximum(probability * factor, 1e-9), 1.0))
    calibrated = tl.where(drafted, calibrated, 0.0)
    if WORDS == 1:
        bits = tl.load(ancestors + row * N + node, mask=here, other=0)
        on_path = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) == 1
        total = tl.sum(tl.where(on_path, calibrated[None, :], 0.0), axis=1)
    else:  # such a tile would not fit the registers
        total = tl.zeros([NODES], tl.float32)
        for word in tl.static_range(WORDS):
            bits = tl.load(ancestors + (row * N + node) * WORDS + word, mask=here, other=0)
            for bit in range(64):
                of_ancestor = tl.sum(tl.where(node == 64 * word + bit, calibrated, 0.0), axis=0)
                total += tl.where(((bits >> bit) & 1) == 1, of_ancestor, 0.0)
    kept = tl.where(drafted, tl.exp(total), 0.0)
    column = tl.arange(0, COLUMNS)  # all widths in one reduction: each takes a microsecond of the step
    width = tl.load(widths + column, mask=column < WIDTHS, other=0)
    expected = 1.0 + tl.sum(tl.where(node[None, :] < width[:, None], kept[None, :], 0.0), axis=1)
    tl.store(report + row * (WIDTHS + 1) + column, expected, mask=column < WIDTHS)


@triton.jit
def _count_kernel(  # type: ignore[no-untyped-def]
    parents,
    depths,
    path,
    lengths,
    rows,
    ranks,
    probabilities,
    totals,
    report,
    num_nodes,
    N: tl.constexpr,
    NODES: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    CELLS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
):
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    here = node < N
    rank = tl.load(ranks + row * N + node, mask=here, other=-1)
    depth = tl.load(depths + row * N + node, mask=here, other=0)
    parent = tl.load(parents + row * N + node, mask=here, other=-1)
    length = tl.load(lengths + row)
    counted = tl.where(tl.load(rows + row) > 0, num_nodes, 0)
    drafted = here & (rank >= 0) & (node < counted)
    above = tl.where(drafted, depth - 1, 0)
    inside = drafted & (above < length)
    tested = inside & (tl.load(path + row * F + above, mask=inside, other=-1) == parent)
    reached = tested & (depth < length)
    kept = reached & (tl.load(path + row * F + depth, mask=reached, other=-1) == node)
    probability = tl.load(probabilities + row * N + node, mask=here, other=0.0)
    fixed = (tl.minimum(probability, 1.0) * SCALE + 0.5).to(tl.int64)
    cell = above * K + tl.maximum(rank, 0)
    tl.atomic_add(totals + cell, fixed, mask=tested)
    tl.atomic_add(totals + CELLS + cell, tl.full([NODES], 1, tl.int64), mask=kept)
    tl.store(report + row * COLUMNS + COLUMNS - 1, length.to(tl.float32))
