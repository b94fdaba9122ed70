"""Draft trees for the tests: candidates, the tree rule in plain Python, the tensors that follow, and checks of an op."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch
from sgl_kernel.ddtree import DraftTrees, build_trees

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
Node = tuple  # (depth, index of the parent, rank)


def candidates_of(bs: int, depth: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[bs, D, K] int64, distinct at each position."""
    first = torch.randint(50_000, (bs, depth, 1), generator=generator)
    step = torch.randint(1, 1000, (bs, depth, 1), generator=generator)
    return first + step * torch.arange(width)


def log_probs_of(
    bs: int, depth: int, width: int, sharpness: float, generator: torch.Generator
) -> torch.Tensor:
    """[bs, D, K] float32, sorted: the best half of a softmax over 2 K tokens. Sharpness 0 is uniform."""
    logits = torch.randn(bs, depth, 2 * width, generator=generator) * sharpness
    return torch.log_softmax(logits, -1).topk(width).values.contiguous()


def tied_log_probs_of(bs: int, depth: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[bs, D, K] float32 of whole numbers, whose sums are exact and often equal."""
    values = -torch.randint(1, 4, (bs, depth, width), generator=generator).float()
    return values.sort(-1, descending=True).values


def rows_of(bs: int, depth: int, width: int, rows: int, sharpness: float | None, seed: int) -> torch.Tensor:
    """[bs, D, W, K] float32 in no order. Sharpness None: whole numbers, as tied_log_probs_of() has them."""
    generator = torch.Generator().manual_seed(seed)
    if sharpness is None:
        return -torch.randint(1, 4, (bs, depth, rows, width), generator=generator).float()
    logits = torch.randn(bs, depth, rows, width, generator=generator) * sharpness
    return torch.log_softmax(logits, -1)


def heap_nodes(
    log_probs: torch.Tensor,
    num_nodes: int,
    keep_top1_path: bool = False,
    beam: torch.Tensor | None = None,
) -> list[Node]:
    """The nodes after the root by the rule of build_trees(), found with a heap in float32.

    Args:
        log_probs: [D, K] or [D, W, K] of one request.
        num_nodes: N.
        keep_top1_path: as in build_trees().
        beam: [D, W] of one request, or None.
    """
    max_depth, width = log_probs.shape[0], log_probs.shape[-1]
    values = log_probs.view(max_depth, -1, width).numpy()
    values = numpy.minimum(values, numpy.float32(0))  # NaN stays NaN, which is not above -inf
    nodes: list[Node] = []
    scores: list[numpy.float32] = []
    rows: list[int | None] = []
    heap: list = []

    def row_of(depth: int, parent: int, rank: int) -> int | None:
        if depth == 0 or log_probs.dim() == 2:
            return 0
        if beam is None:
            return rank
        found = (beam[depth] == rows[parent] * width + rank).nonzero()  # type: ignore[operator]
        return int(found[0]) if len(found) else None

    def add(score: numpy.float32, *node: int) -> list:
        """Returns the node's children, best first."""
        depth, index = node[0], len(nodes)
        nodes.append(node)
        scores.append(score)
        rows.append(row_of(*node) if depth < max_depth else None)
        if rows[-1] is None:
            return []
        sums = [(score + value, rank) for rank, value in enumerate(values[depth, rows[-1]])]
        return sorted((-total, depth + 1, index, rank) for total, rank in sums if total > -math.inf)

    children = add(numpy.float32(0), 0, -1, 0)
    while keep_top1_path and len(nodes) < num_nodes and children:
        (score, *node), *rest = children
        heap += rest
        children = add(-score, *node)
    heap += children
    heapq.heapify(heap)
    while len(nodes) < num_nodes and heap:
        score, *node = heapq.heappop(heap)
        for child in add(-score, *node):
            heapq.heappush(heap, child)
    return nodes[1:]


def ancestor_rows(parents: Sequence[int], words: int) -> list[list[int]]:
    """Each node's ancestor words as signed 64-bit integers, in plain Python. The root's parent is -1."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    unsigned = [[mask >> 64 * w & (1 << 64) - 1 for w in range(words)] for mask in masks]
    return [[word - (1 << 64) if word >> 63 else word for word in row] for row in unsigned]


def trees_of(
    nodes: list[list[Node]], candidates: torch.Tensor, bonus: torch.Tensor, num_nodes: int
) -> DraftTrees:
    """What build_trees() must write for these nodes of each request, padding included. On the CPU."""
    bs = len(nodes)
    trees = DraftTrees.allocate(bs, num_nodes, "cpu")
    for r in range(bs):
        children: dict[int, list[int]] = {}
        trees.tokens[r] = bonus[r]
        trees.parents[r] = -1
        trees.depths[r] = 0
        trees.first_child[r] = -1
        trees.next_sibling[r] = -1
        trees.sizes[r] = 1 + len(nodes[r])
        for node, (depth, parent, rank) in enumerate(nodes[r], start=1):
            trees.tokens[r, node] = candidates[r, depth - 1, rank]
            trees.parents[r, node] = parent
            trees.depths[r, node] = depth
            children.setdefault(parent, []).append(node)
        for parent, siblings in children.items():
            trees.first_child[r, parent] = siblings[0]
            for node, after in zip(siblings, siblings[1:], strict=False):
                trees.next_sibling[r, node] = after
        words = ancestor_rows(trees.parents[r].tolist(), trees.ancestors.shape[2])
        trees.ancestors[r] = torch.tensor(words, dtype=torch.int64)
    return trees


def expected_trees(
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    bonus: torch.Tensor,
    num_nodes: int,
    keep_top1_path: bool = False,
    beam: torch.Tensor | None = None,
) -> DraftTrees:
    """What build_trees() must write, by the rule in plain Python."""
    beams = [None] * len(log_probs) if beam is None else beam
    nodes = [heap_nodes(one, num_nodes, keep_top1_path, of) for one, of in zip(log_probs, beams, strict=True)]
    return trees_of(nodes, candidates, bonus, num_nodes)


def paths_of(trees: DraftTrees, candidates: torch.Tensor) -> set:
    """The tuples of ranks of one request's nodes, derived only from its tokens and parents."""
    paths: dict[int, tuple] = {0: ()}
    for node in range(1, int(trees.sizes[0])):
        parent = int(trees.parents[0, node])
        assert parent < node
        above = paths[parent]
        paths[node] = (*above, candidates[0, len(above)].tolist().index(int(trees.tokens[0, node])))
    return set(paths.values()) - {()}


def poisoned(bs: int, num_nodes: int, device: str) -> DraftTrees:
    """Trees that no op has written. An element left unwritten differs from every expected value."""
    trees = DraftTrees.allocate(bs, num_nodes, device)
    for tensor in tensors_of(trees).values():
        tensor.fill_(-7777)
    return trees


def built(
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    bonus: torch.Tensor,
    num_nodes: int,
    device: str,
    **options: Any,
) -> DraftTrees:
    """Run build_trees() on a device and return the result on the CPU. Tensors in `options` move to the device."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = poisoned(candidates.shape[0], num_nodes, device)
    build_trees(candidates.to(device), log_probs.to(device), bonus.to(device), out, **options)
    return on_cpu(out)


def build_arguments(
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    bonus: torch.Tensor,
    num_nodes: int,
    device: str,
    *,
    beam: torch.Tensor | None = None,
) -> list[Any]:
    """The arguments of torch.ops.sgl_kernel.ddtree_build, in its order."""
    candidates, log_probs, bonus = (x.to(device) for x in (candidates, log_probs, bonus))
    beam = None if beam is None else beam.to(device)
    bs = candidates.shape[0]
    trees = tensors_of(poisoned(bs, num_nodes, device)).values()
    scores = torch.empty(bs, num_nodes, device=device)
    return [candidates, log_probs, None, beam, bonus, False, *trees, scores]


def check_registration(op: Any, arguments: Sequence[Any]) -> None:
    """The schema (mutations and aliases), fake tensors and autograd registration are as torch requires."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, arguments, test_utils=tests)


def assert_refused(
    op: Any, arguments: Sequence[Any], changes: dict[int, Callable[[Any], Any]], message: str
) -> None:
    """Assert that an op refuses its arguments, some of which are changed, by position."""
    changed = list(arguments)
    for position, change in changes.items():
        changed[position] = change(changed[position])
    with pytest.raises((ValueError, RuntimeError), match=message):
        op(*changed)


def tensors_of(record: Any) -> dict[str, torch.Tensor]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def on_cpu(record: Any) -> Any:
    return type(record)(**{name: tensor.cpu() for name, tensor in tensors_of(record).items()})


def assert_equal(got: Any, want: Any, note: str = "") -> None:
    """Compare every tensor of two records bit for bit."""
    expected = tensors_of(want)
    assert tensors_of(got).keys() == expected.keys()
    for name, tensor in tensors_of(got).items():
        assert torch.equal(tensor.cpu(), expected[name]), f"{note} {name}:\n{tensor.cpu()}\n{expected[name]}"
