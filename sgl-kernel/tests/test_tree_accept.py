"""ddtree_accept against a walk over the child links in plain Python."""

import random
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import (
    assert_equal,
    built,
    candidates_of,
    check_registration,
    log_probs_of,
    on_cpu,
    on_each_device,
    tensors_of,
    trees_of,
)
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path

register_cpu_ci(est_time=15, suite="kernel")
register_cuda_ci(est_time=20, suite="gpu")


def walk(trees: DraftTrees, target: torch.Tensor, block_size: int) -> Accepted:
    bs = target.shape[0]
    out = Accepted.allocate(bs, block_size, "cpu")
    for r in range(bs):
        path, emitted, node = [], [], 0
        while node >= 0 and len(path) < block_size:
            path.append(node)
            emitted.append(int(target[r, node]))
            node = int(trees.first_child[r, node])
            while node >= 0 and int(trees.tokens[r, node]) != emitted[-1]:
                node = int(trees.next_sibling[r, node])
        padding = [0] * (block_size - len(path))
        out.path[r] = torch.tensor(path + padding)
        out.tokens[r] = torch.tensor(emitted + padding)
        out.lengths[r] = len(path)
        out.bonus[r] = emitted[-1]
    return out


def accepted(trees: DraftTrees, target: torch.Tensor, block_size: int, device: str) -> Accepted:
    out = Accepted.allocate(target.shape[0], block_size, device)
    for tensor in tensors_of(out).values():
        tensor.fill_(-7777)
    trees = DraftTrees(**{name: tensor.to(device) for name, tensor in tensors_of(trees).items()})
    return on_cpu(accept_path(trees, target.to(device), out))


def random_trees(
    bs: int, depth: int, width: int, num_nodes: int, keep_top1_path: bool, seed: int
) -> DraftTrees:
    generator = torch.Generator().manual_seed(seed)
    candidates = candidates_of(bs, depth, width, generator)
    log_probs = log_probs_of(bs, depth, width, 2.0, generator)
    return built(candidates, log_probs, torch.arange(bs), num_nodes, "cpu", keep_top1_path=keep_top1_path)


def random_target(trees: DraftTrees, rng: random.Random, hit_rate: float) -> torch.Tensor:
    """For each node with children, the token of any of them, or a miss."""
    target = -1 - trees.tokens  # tokens that no node has
    for r in range(target.shape[0]):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(trees.parents[r].tolist()):
            if parent >= 0:
                children.setdefault(parent, []).append(node)
        for parent, nodes in children.items():
            if rng.random() < hit_rate:
                target[r, parent] = trees.tokens[r, rng.choice(nodes)]
    return target


@on_each_device
@pytest.mark.parametrize("keep_top1_path", [False, True])
@pytest.mark.parametrize(
    "num_nodes, depth, width", [(1, 3, 3), (2, 3, 3), (16, 7, 4), (32, 15, 8), (33, 15, 8), (256, 32, 32)]
)
@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_walk(num_nodes, depth, width, keep_top1_path, hit_rate, device):
    trees = random_trees(5, depth, width, num_nodes, keep_top1_path, seed=num_nodes)
    target = random_target(trees, random.Random(num_nodes), hit_rate)
    got = accepted(trees, target, depth + 1, device)
    assert_equal(got, walk(trees, target, depth + 1))
    assert hit_rate > 0 or got.lengths.tolist() == [1] * 5
    if hit_rate == 1 and keep_top1_path and num_nodes > depth:
        assert got.lengths.max() > 1


def chain(num_nodes: int) -> DraftTrees:
    nodes = [[(node, node - 1, 0) for node in range(1, num_nodes)]]
    candidates = torch.arange(1, num_nodes).view(1, num_nodes - 1, 1)
    return trees_of(nodes, candidates, torch.tensor([0]), num_nodes)


@on_each_device
@pytest.mark.parametrize("block_size", [1, 2, 9, 33, 256])
def test_whole_chain(block_size, device):
    """A chain of 256 nodes is accepted as far as the output reaches."""
    got = accepted(chain(256), torch.arange(1, 257).view(1, 256), block_size, device)
    assert got.path[0].tolist() == list(range(block_size))
    assert got.tokens[0].tolist() == list(range(1, block_size + 1))
    assert (got.lengths.item(), got.bonus.item()) == (block_size, block_size)


@on_each_device
def test_padding_is_never_accepted(device):
    """Padding holds the root's token. A target that repeats this token must not reach the padding."""
    candidates = torch.tensor([[[10], [20]]])
    trees = built(candidates, torch.tensor([[[-1.0], [-1.0]]]), torch.tensor([5]), 40, "cpu")
    assert trees.tokens[0, 3:].unique().tolist() == [5]
    got = accepted(trees, torch.full((1, 40), 5), 3, device)
    assert (got.path.tolist(), got.tokens.tolist(), got.lengths.tolist()) == ([[0, 0, 0]], [[5, 0, 0]], [1])


@on_each_device
def test_equal_siblings(device):
    """If two siblings hold the same token, the first is taken."""
    nodes = [[(1, 0, 0), (1, 0, 1), (2, 2, 0), (2, 1, 0)]]
    trees = trees_of(nodes, torch.tensor([[[7, 7], [8, 9]]]), torch.tensor([1]), 5)
    got = accepted(trees, torch.tensor([[7, 8, 8, 3, 4]]), 3, device)
    assert (got.path.tolist(), got.tokens.tolist()) == ([[0, 1, 4]], [[7, 8, 4]])


@on_each_device
def test_large_token_ids(device):
    """Tokens are compared in all 64 bits."""
    nodes = [[(1, 0, 0), (1, 0, 1)]]
    trees = trees_of(nodes, torch.tensor([[[3, 3 + 2**32]]]), torch.tensor([1]), 3)
    got = accepted(trees, torch.tensor([[3 + 2**32, 0, 0]]), 2, device)
    assert got.path.tolist() == [[0, 2]]


@on_each_device
def test_wide_batch(device):
    trees = random_trees(300, 15, 8, 32, False, seed=9)
    target = random_target(trees, random.Random(9), 0.9)
    assert_equal(accepted(trees, target, 16, device), walk(trees, target, 16))


@on_each_device
def test_registration(device):
    trees, out = chain(5), Accepted.allocate(1, 3, device)
    given = (t.to(device) for t in (trees.tokens, trees.parents, torch.zeros(1, 5, dtype=torch.int64)))
    arguments = [*given, out.path, out.tokens, out.lengths, out.bonus]
    check_registration(torch.ops.sgl_kernel.ddtree_accept, arguments)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("target", torch.zeros(1, 5, dtype=torch.int32), "target: expected dtype int64, got int32"),
        ("target", torch.zeros(5, dtype=torch.int64), r"target: expected shape \[1, 5\], got \[5\]"),
        ("path", torch.zeros(1, 0, dtype=torch.int64), r"path: expected \[bs, F\] with F of 1 to 256, got 0"),
        ("lengths", torch.zeros(1, dtype=torch.int64), "lengths: expected dtype int32, got int64"),
        ("tokens", torch.zeros(1, 4, dtype=torch.int64), r"output: expected shape \[1, 3\], got \[1, 4\]"),
    ],
)
def test_errors(name, value, message):
    target, out = torch.zeros(1, 5, dtype=torch.int64), Accepted.allocate(1, 3, "cpu")
    if name == "target":
        target = value
    else:
        setattr(out, name, value)
    with pytest.raises((ValueError, RuntimeError), match=message):
        accept_path(chain(5), target, out)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
