"""Draft trees for the tests: candidates, the rule of the tree in plain Python, and every row's content from it."""

from __future__ import annotations

import heapq
import math
from dataclasses import fields

import numpy
import torch
from sgl_kernel.ddtree import DraftTrees, build_trees

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
Node = tuple  # (depth, parent's row, rank)


def candidates_of(b: int, depth: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[b, L, K] int64, distinct at each position."""
    first = torch.randint(50_000, (b, depth, 1), generator=generator)
    step = torch.randint(1, 1000, (b, depth, 1), generator=generator)
    return first + step * torch.arange(width)


def log_probs_of(
    b: int, depth: int, width: int, sharpness: float, generator: torch.Generator
) -> torch.Tensor:
    """[b, L, K] float32, sorted: the first of a softmax over twice as many tokens. Sharpness 0 is uniform."""
    logits = torch.randn(b, depth, 2 * width, generator=generator) * sharpness
    return torch.log_softmax(logits, -1).topk(width).values.contiguous()


def tied_log_probs_of(b: int, depth: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[b, L, K] float32 of whole numbers: exact sums, and many of them equal."""
    values = -torch.randint(1, 4, (b, depth, width), generator=generator).float()
    return values.sort(-1, descending=True).values


def heap_nodes(log_probs: torch.Tensor, budget: int, keep_top1_path: bool = False) -> list[Node]:
    """The rows after the root, by the rule that build_trees() states: one request's [L, K] on a heap in float32."""
    depth_limit, width = log_probs.shape
    values = numpy.minimum(log_probs.numpy(), numpy.float32(0))  # a NaN stays one, and is not above -inf
    nodes: list[Node] = [(0, -1, 0)]
    scores = [numpy.float32(0)]
    heap: list = []

    def score(node: Node) -> numpy.float32:
        return scores[node[1]] + values[node[0] - 1, node[2]]

    def possible(node: Node) -> bool:
        return node[0] <= depth_limit and node[2] < width and bool(score(node) > -math.inf)

    def consider(*node: int) -> None:
        if possible(node):
            heapq.heappush(heap, (-score(node), *node))

    def add(node: Node) -> None:
        scores.append(score(node))
        nodes.append(node)

    while keep_top1_path and len(nodes) <= budget and possible((len(nodes), len(nodes) - 1, 0)):
        depth = len(nodes)
        add((depth, depth - 1, 0))
        consider(depth, depth - 1, 1)
    consider(len(nodes), len(nodes) - 1, 0)
    while len(nodes) <= budget and heap:
        _, depth, parent, rank = heapq.heappop(heap)
        add((depth, parent, rank))
        consider(depth, parent, rank + 1)
        consider(depth + 1, len(nodes) - 1, 0)
    return nodes[1:]


def trees_of(
    nodes: list[list[Node]],
    candidates: torch.Tensor,
    bonus: torch.Tensor,
    rows: int,
    prefix_lens: torch.Tensor | None = None,
) -> DraftTrees:
    """What build_trees() must write for these nodes of each request, padding included; on the CPU."""
    b = len(nodes)
    trees = DraftTrees.allocate(b, rows, "cpu", positions=prefix_lens is not None)
    for r in range(b):
        masks = [1 << row for row in range(rows)]
        children: dict[int, list[int]] = {}
        trees.tokens[r] = bonus[r]
        trees.parents[r] = -1
        trees.depths[r] = 0
        trees.first_child[r] = -1
        trees.next_sibling[r] = -1
        trees.sizes[r] = 1 + len(nodes[r])
        for row, (depth, parent, rank) in enumerate(nodes[r], start=1):
            trees.tokens[r, row] = candidates[r, depth - 1, rank]
            trees.parents[r, row] = parent
            trees.depths[r, row] = depth
            masks[row] |= masks[parent]
            children.setdefault(parent, []).append(row)
        for parent, siblings in children.items():
            trees.first_child[r, parent] = siblings[0]
            for row, after in zip(siblings, siblings[1:], strict=False):
                trees.next_sibling[r, row] = after
        for row, mask in enumerate(masks):
            for word in range(trees.ancestors.shape[2]):
                bits = mask >> 64 * word & (1 << 64) - 1
                trees.ancestors[r, row, word] = bits - (1 << 64) if bits >> 63 else bits
        if prefix_lens is not None:
            trees.positions[r] = prefix_lens[r] + trees.depths[r].long()
    return trees


def poisoned(b: int, rows: int, device: str, positions: bool = False) -> DraftTrees:
    """Trees that no op has written: a row left unwritten differs from every expectation."""
    trees = DraftTrees.allocate(b, rows, device, positions)
    for tensor in tensors_of(trees).values():
        tensor.fill_(-7777)
    return trees


def built(candidates, log_probs, bonus, rows: int, device: str, **options) -> DraftTrees:
    """build_trees() on a device, its result on the CPU. Tensors among the options go to the device."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = poisoned(candidates.shape[0], rows, device, positions="prefix_lens" in options)
    build_trees(candidates.to(device), log_probs.to(device), bonus.to(device), out, **options)
    return on_cpu(out)


def tensors_of(record) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def on_cpu(record):
    return type(record)(**{name: tensor.cpu() for name, tensor in tensors_of(record).items()})


def assert_equal(got, want, note: str = "") -> None:
    """Every tensor of two records, bit for bit."""
    expected = tensors_of(want)
    assert tensors_of(got).keys() == expected.keys()
    for name, tensor in tensors_of(got).items():
        assert torch.equal(tensor.cpu(), expected[name]), f"{note} {name}:\n{tensor.cpu()}\n{expected[name]}"
