"""ddtree_build on the CPU and on CUDA: small trees against brute force, every node of large ones against a heap."""

import functools
import math
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import (
    assert_equal,
    assert_refused,
    build_arguments,
    built,
    candidates_of,
    check_registration,
    expected_trees,
    log_probs_of,
    on_cpu,
    on_each_device,
    paths_of,
    poisoned,
    tied_log_probs_of,
)
from sgl_kernel.ddtree import build_trees

register_cpu_ci(est_time=20, suite="kernel")
register_cuda_ci(est_time=30, suite="gpu")


def inputs(bs, depth, width, sharpness, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs = (
        tied_log_probs_of(bs, depth, width, generator)
        if sharpness is None
        else log_probs_of(bs, depth, width, sharpness, generator)
    )
    bonus = torch.randint(50_000, 60_000, (bs,), generator=generator)
    return candidates_of(bs, depth, width, generator), log_probs, bonus


@functools.cache
def all_trees(depth: int, width: int, above: tuple = ()) -> list[frozenset]:
    """Every set of prefixes (tuples of ranks) below `above` that contains the parents of its members."""
    if depth == 0:
        return [frozenset()]
    trees = [frozenset()]
    for rank in range(width):
        child = (*above, rank)
        below = [frozenset()] + [{child} | tree for tree in all_trees(depth - 1, width, child)]
        trees = [tree | more for tree in trees for more in below]
    return trees


@on_each_device
@pytest.mark.parametrize("keep_top1_path", [False, True])
@pytest.mark.parametrize("depth, width", [(3, 2), (2, 3), (1, 6), (6, 1)])
@pytest.mark.parametrize("sharpness", [0.0, 0.5, 1.5, None])
def test_no_tree_is_better(depth, width, sharpness, keep_top1_path, device):
    """Brute force over all trees of every size, in float64. The op compares float32 scores, whose error is a few 1e-7,
    so it may take the worse of two trees that are this close."""
    candidates, log_probs, bonus = inputs(1, depth, width, sharpness, seed=depth)
    values = log_probs[0].tolist()

    @functools.cache
    def probability(prefix):
        return math.exp(math.fsum(values[d][rank] for d, rank in enumerate(prefix)))

    def mass(tree):
        return math.fsum(map(probability, tree))

    def top1_path(size):
        return {(0,) * d for d in range(1, min(size, depth) + 1)} if keep_top1_path else set()

    best: dict[int, float] = {}
    for tree in all_trees(depth, width):
        if top1_path(len(tree)) <= tree:
            best[len(tree)] = max(best.get(len(tree), 0.0), mass(tree))
    for size, largest in best.items():
        got = paths_of(
            built(candidates, log_probs, bonus, size + 1, device, keep_top1_path=keep_top1_path), candidates
        )
        assert len(got) == size and top1_path(size) <= got
        assert mass(got) >= largest * (1 - 1e-6)


@on_each_device
@pytest.mark.parametrize("keep_top1_path", [False, True])
@pytest.mark.parametrize(
    "num_nodes, depth, width, sharpness",
    [
        (256, 32, 32, 1.0),
        (256, 32, 32, 6.0),
        (256, 32, 32, 0.0),
        (256, 32, 32, None),
        (256, 15, 8, 4.0),
        (129, 7, 32, 2.0),
        (128, 15, 4, 3.0),
        (65, 15, 8, None),
        (64, 15, 8, 4.0),
        (33, 31, 8, 9.0),
        (32, 15, 8, 3.0),
        (16, 7, 4, None),
        (2, 15, 8, 3.0),
        (1, 15, 8, 3.0),
        (17, 1, 16, 2.0),
        (12, 1, 32, 2.0),
        (20, 32, 1, 2.0),  # a chain cut short
        (64, 32, 1, 2.0),  # a whole chain: 31 nodes of padding
        (256, 2, 3, None),  # all 12 prefixes
    ],
)
def test_every_node(num_nodes, depth, width, sharpness, keep_top1_path, device):
    candidates, log_probs, bonus = inputs(3, depth, width, sharpness, seed=num_nodes + depth)
    got = built(candidates, log_probs, bonus, num_nodes, device, keep_top1_path=keep_top1_path)
    assert_equal(got, expected_trees(candidates, log_probs, bonus, num_nodes, keep_top1_path))


@on_each_device
def test_stated_order(device):
    """Two equal candidates at two positions: ordered by score, then depth, then the parent's index, then rank."""
    candidates = torch.tensor([[[10, 11], [20, 21]]])
    trees = built(candidates, torch.full((1, 2, 2), -1.0), torch.tensor([5]), 8, device)
    assert trees.tokens[0].tolist() == [5, 10, 11, 20, 21, 20, 21, 5]
    assert trees.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 2, -1]
    assert trees.sizes.tolist() == [7]
    # A certain second position ties each child with its parent. The shallower node comes first.
    log_probs = torch.tensor([[[-1.0, -1.0], [0.0, -3.0]]])
    trees = built(candidates, log_probs, torch.tensor([5]), 5, device)
    assert trees.tokens[0].tolist() == [5, 10, 11, 20, 20]
    # The same holds if rounding puts the probability above 1.
    log_probs[0, 1, 0] = 1e-6
    trees = built(candidates, log_probs, torch.tensor([5]), 5, device)
    assert trees.tokens[0].tolist() == [5, 10, 11, 20, 20]


def test_top1_path_comes_first():
    candidates, log_probs, bonus = inputs(1, 4, 3, 0.1, seed=0)
    trees = built(candidates, log_probs, bonus, 9, "cpu", keep_top1_path=True)
    assert trees.parents[0, 1:5].tolist() == [0, 1, 2, 3]
    assert trees.tokens[0, 1:5].tolist() == candidates[0, :, 0].tolist()
    # Best first alone would not have kept it.
    assert built(candidates, log_probs, bonus, 9, "cpu").depths.max() < 4


@on_each_device
def test_narrow_tree_is_the_start_of_a_wide_one(device):
    """Nodes are numbered best first, so a smaller N keeps the first nodes and nothing else changes."""
    candidates, log_probs, bonus = inputs(6, 5, 4, 2.0, seed=1)
    wide = built(candidates, log_probs, bonus, 20, device)
    for num_nodes in (1, 2, 7, 19):
        narrow = built(candidates, log_probs, bonus, num_nodes, device)
        assert narrow.sizes.tolist() == [num_nodes] * 6
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(narrow, name), getattr(wide, name)[:, :num_nodes]), name


@on_each_device
@pytest.mark.parametrize("keep_top1_path", [False, True])
def test_impossible_candidates(keep_top1_path, device):
    """-inf and NaN never become nodes, nor does anything below them. A log-probability above 0 counts as 0."""
    candidates, log_probs, bonus = inputs(5, 6, 4, 1.0, seed=2)
    log_probs[0, :, 2:] = -math.inf
    log_probs[1, 3] = -math.inf
    log_probs[2] = -math.inf
    log_probs[3, 1:, 1:] = math.nan
    log_probs[4, :, 0] = 1e-6
    got = built(candidates, log_probs, bonus, 100, device, keep_top1_path=keep_top1_path)
    assert got.sizes.tolist()[1:4] == [1 + 4 + 16 + 64, 1, 1 + 4 * 6]
    assert got.depths[1].max() == 3
    assert_equal(got, expected_trees(candidates, log_probs, bonus, 100, keep_top1_path))


@on_each_device
def test_logits_and_their_sum(device):
    """Logits and their logsumexp give the tree of their float32 difference."""
    candidates, log_probs, bonus = inputs(4, 8, 8, 3.0, seed=3)
    log_sum = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 10
    logits = log_probs + log_sum[..., None]
    got = built(candidates, logits, bonus, 64, device, log_sum=log_sum)
    assert_equal(got, expected_trees(candidates, logits - log_sum[..., None], bonus, 64))


@on_each_device
def test_wide_words(device):
    """Words beyond those that N needs are written too."""
    candidates, log_probs, bonus = inputs(2, 4, 4, 2.0, seed=4)
    out = poisoned(2, 10, device)
    out.ancestors = torch.full((2, 10, 6), -1, dtype=torch.int64, device=device)
    build_trees(candidates.to(device), log_probs.to(device), bonus.to(device), out)
    want = expected_trees(candidates, log_probs, bonus, 10)
    assert torch.equal(out.ancestors[..., :1].cpu(), want.ancestors)
    assert not out.ancestors[..., 1:].any()


@on_each_device
def test_equal_on_every_device(device):
    """A batch larger than the number of multiprocessors gives the same bits as on the CPU."""
    for sharpness in (None, 0.3, 5.0):
        candidates, log_probs, bonus = inputs(160, 15, 8, sharpness, seed=5)
        want = built(candidates, log_probs, bonus, 48, "cpu")
        assert_equal(built(candidates, log_probs, bonus, 48, device), want, str(sharpness))


@on_each_device
def test_empty_batch(device):
    candidates, log_probs, bonus = inputs(1, 3, 3, 1.0, seed=6)
    out = on_cpu(poisoned(1, 4, device)).first(0)
    build_trees(candidates[:0], log_probs[:0], bonus[:0], out)
    assert out.tokens.shape == (0, 4)


def arguments(device):
    return build_arguments(*inputs(2, 3, 4, 1.0, seed=7), 5, device)


@on_each_device
def test_registration(device):
    check_registration(torch.ops.sgl_kernel.ddtree_build, arguments(device))


@pytest.mark.parametrize(
    "position, change, message",
    [
        (0, lambda t: t.int(), "candidates: expected dtype int64, got int32"),
        (0, lambda t: t.new_zeros(2, 33, 4), r"candidates: expected \[bs, D, K\] with D of 1 to 32, got 33"),
        (0, lambda t: t.new_zeros(2, 3, 33), r"candidates: expected \[bs, D, K\] with K of 1 to 32, got 33"),
        (0, lambda t: t.new_zeros(2, 0, 4), r"candidates: expected \[bs, D, K\] with D of 1 to 32, got 0"),
        (1, lambda t: t.half(), "log_probs: expected dtype float32, got float16"),
        (1, lambda t: t[:, :2], r"log_probs: expected shape \[2, 3, 4\], got \[2, 2, 4\]"),
        (
            1,
            lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
            "log_probs: expected a contiguous tensor",
        ),
        (4, lambda t: t[:1], r"bonus: expected shape \[2\], got \[1\]"),
        (6, lambda t: t.new_zeros(2, 257), r"tokens: expected \[bs, N\] with N of 1 to 256, got 257"),
        (7, lambda t: t[:, :3], r"parents: expected shape \[2, 5\], got \[2, 3\]"),
        (
            9,
            lambda t: t[:, :, :0],
            r"ancestors: expected at least 1 words per node, got shape \[2, 5, 0\]",
        ),
    ],
)
def test_errors(position, change, message):
    assert_refused(torch.ops.sgl_kernel.ddtree_build, arguments("cpu"), {position: change}, message)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
