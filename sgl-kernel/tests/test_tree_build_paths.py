"""ddtree_build with candidates that are scored after each of several paths: pairs, and a beam of whole paths."""

import itertools
import math
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import (
    DEVICES,
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
    rows_of,
)
from sgl_kernel.ddtree import MAX_PATHS, Accepted, DraftTrees, accept_path, build_trees

register_cpu_ci(est_time=30, suite="kernel")
register_cuda_ci(est_time=40, suite="gpu")

on_each_kind = pytest.mark.parametrize("kind", ["pairs", "beam"])


def tokens_for(bs, depth, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return candidates_of(bs, depth, width, generator), torch.randint(50_000, (bs,), generator=generator)


def beam_of(log_probs: torch.Tensor) -> torch.Tensor:
    """[bs, D, W] int32: at each position, the W best paths of all that the rows above score."""
    bs, depth, rows, width = log_probs.shape
    beam = torch.full((bs, depth, rows), -1, dtype=torch.int32)
    scores = torch.full((bs, rows), -math.inf)
    scores[:, 0] = 0
    for d in range(1, depth):
        children = (scores[:, :, None] + log_probs[:, d - 1].nan_to_num(-math.inf)).flatten(1)
        scores, best = children.topk(rows)
        beam[:, d] = torch.where(scores > -math.inf, best, -1)
    return beam


def case_of(kind, bs, depth, width, sharpness, seed=0):
    """Candidates, log-probabilities, bonus tokens and the beam or None."""
    candidates, bonus = tokens_for(bs, depth, width, seed)
    log_probs = rows_of(bs, depth, width, width if kind == "pairs" else MAX_PATHS, sharpness, seed)
    return candidates, log_probs, bonus, None if kind == "pairs" else beam_of(log_probs)


def probabilities(log_probs: torch.Tensor, beam: torch.Tensor | None) -> dict[tuple, float]:
    """The probability of every path of one request that the rows score, in float64. A path is a tuple of ranks."""
    depth, _, width = log_probs.shape
    values = log_probs.double()
    found: dict[tuple, float] = {}
    rows: dict[tuple, int | None] = {(): 0}
    for d in range(depth):
        for path in itertools.product(range(width), repeat=d):
            row = rows.get(path)
            if row is None:
                continue
            for rank in range(width):
                child = (*path, rank)
                found[child] = found.get(path, 1.0) * math.exp(values[d, row, rank])
                if d + 1 == depth:
                    continue
                if beam is None:
                    rows[child] = rank
                else:
                    at = (beam[d + 1] == row * width + rank).nonzero()
                    rows[child] = int(at[0]) if len(at) else None
    return found


@on_each_device
@on_each_kind
@pytest.mark.parametrize("depth, width", [(4, 3), (3, 4), (6, 2), (2, 8), (1, 6)])
@pytest.mark.parametrize("sharpness", [0.0, 0.7, 2.0, None])
def test_the_best_of_all_paths(depth, width, sharpness, kind, device):
    """Brute force over every path in float64: no set of N paths has a larger sum of probabilities."""
    candidates, log_probs, bonus, beam = case_of(kind, 1, depth, width, sharpness, seed=depth)
    every = probabilities(log_probs[0], None if beam is None else beam[0])
    sorted_masses = sorted(every.values(), reverse=True)
    for size in range(1, len(every) + 1, 5):
        got = paths_of(built(candidates, log_probs, bonus, size + 1, device, beam=beam), candidates)
        assert len(got) == size
        assert math.fsum(every[path] for path in got) >= math.fsum(sorted_masses[:size]) * (1 - 1e-6)
        assert all(path[:-1] in got for path in got if len(path) > 1)


@on_each_device
def test_a_beam_that_holds_every_path_is_exact(device):
    """Tokens that depend on the token before the last one: only rows for whole paths can say that."""
    depth, width = 4, 3
    candidates, bonus = tokens_for(1, depth, width)
    log_probs = rows_of(1, depth, width, 27, 1.0, seed=5)
    beam = torch.full((1, depth, 27), -1, dtype=torch.int32)
    for d in range(1, depth):
        beam[0, d, : width**d] = torch.arange(width**d)  # path p of a position is row p
    every = {}
    for d in range(depth):
        for index, path in enumerate(itertools.product(range(width), repeat=d + 1)):
            above = every.get(path[:-1], 1.0)
            every[path] = above * math.exp(log_probs[0, d, index // width, path[-1]].double())
    for size in (1, 7, 40, len(every)):
        best = {path for path, _ in sorted(every.items(), key=lambda item: -item[1])[:size]}
        assert paths_of(built(candidates, log_probs, bonus, size + 1, device, beam=beam), candidates) == best


@on_each_device
@on_each_kind
@pytest.mark.parametrize("keep_top1_path", [False, True])
@pytest.mark.parametrize(
    "num_nodes, depth, width, sharpness",
    [
        (256, 32, 32, 1.0),  # the rows do not fit into shared memory
        (256, 32, 32, None),
        (256, 15, 8, 3.0),
        (129, 7, 32, 2.0),
        (65, 15, 8, None),
        (64, 15, 16, 4.0),
        (32, 15, 8, 3.0),
        (16, 31, 4, None),
        (2, 15, 8, 3.0),
        (1, 15, 8, 3.0),
        (12, 1, 32, 2.0),
        (20, 32, 1, 2.0),
        (256, 2, 3, None),  # all 12 paths
    ],
)
def test_every_node(num_nodes, depth, width, sharpness, keep_top1_path, kind, device):
    candidates, log_probs, bonus, beam = case_of(kind, 3, depth, width, sharpness, seed=num_nodes)
    got = built(candidates, log_probs, bonus, num_nodes, device, keep_top1_path=keep_top1_path, beam=beam)
    assert_equal(got, expected_trees(candidates, log_probs, bonus, num_nodes, keep_top1_path, beam))


@on_each_device
def test_pairs_that_do_not_depend_on_the_parent_are_marginals(device):
    generator = torch.Generator().manual_seed(0)
    candidates, bonus = tokens_for(4, 7, 8)
    marginals = log_probs_of(4, 7, 8, 2.0, generator)
    pairs = marginals[:, :, None].expand(-1, -1, 8, -1).contiguous()
    for keep_top1_path in (False, True):
        want = built(candidates, marginals, bonus, 40, device, keep_top1_path=keep_top1_path)
        assert_equal(built(candidates, pairs, bonus, 40, device, keep_top1_path=keep_top1_path), want)


@on_each_device
def test_siblings_whose_scores_round_to_one_value(device):
    """The order is that of the scores, in float32, and of the index. The log-probabilities themselves differ."""
    candidates = torch.tensor([[[10, 11, 12], [20, 21, 22]]])
    log_probs = torch.full((1, 2, 3, 3), -1.0)
    log_probs[0, 0, 0] = torch.tensor([-1000.0, -2000.0, -3000.0])
    log_probs[0, 1, 0] = torch.tensor([-3e-9, -2e-9, -1e-9])  # each sum is -1000
    trees = built(candidates, log_probs, torch.tensor([5]), 5, device)
    assert trees.tokens[0].tolist() == [5, 10, 20, 21, 22]


@on_each_device
def test_equal_tokens_under_one_parent(device):
    """Both become nodes, and the walk takes the better one."""
    candidates = torch.tensor([[[10, 10], [20, 21]]])
    log_probs = torch.tensor([[[[-2.0, -1.0], [-9.0, -9.0]], [[-0.1, -3.0], [-3.0, -0.1]]]])
    trees = built(candidates, log_probs, torch.tensor([5]), 5, device)
    assert trees.tokens[0].tolist() == [5, 10, 21, 10, 20]
    assert trees.parents[0].tolist() == [-1, 0, 1, 0, 3]
    accepted = Accepted.allocate(1, 3, "cpu")
    accept_path(trees, torch.tensor([[10, 21, 7, 20, 7]]), accepted)
    assert accepted.tokens[0].tolist() == [10, 21, 7]


@on_each_device
@on_each_kind
@pytest.mark.parametrize("keep_top1_path", [False, True])
def test_impossible_candidates(keep_top1_path, kind, device):
    """-inf and NaN never become nodes, nor does anything below them. A log-probability above 0 counts as 0."""
    candidates, log_probs, bonus, _ = case_of(kind, 5, 6, 4, 1.0, seed=2)
    log_probs[0, :, :, 2:] = -math.inf
    log_probs[1, 3] = -math.inf
    log_probs[2] = -math.inf
    log_probs[3, 1:, :, 1:] = math.nan
    log_probs[4, :, :, 0] = 1e-6
    beam = None if kind == "pairs" else beam_of(log_probs)
    got = built(candidates, log_probs, bonus, 100, device, keep_top1_path=keep_top1_path, beam=beam)
    assert got.sizes.tolist()[2:4] == [1, 1 + 4 * 6]
    assert got.depths[1].max() == 3
    assert_equal(got, expected_trees(candidates, log_probs, bonus, 100, keep_top1_path, beam))


@on_each_device
def test_a_path_outside_the_beam_has_no_children(device):
    candidates, log_probs, bonus, _ = case_of("pairs", 1, 3, 4, 1.0)
    beam = torch.full((1, 3, 4), -1, dtype=torch.int32)
    beam[0, 1] = torch.tensor([2, 2, -1, -1])  # the first of equal rows counts
    beam[0, 2, 3] = 0 * 4 + 1
    got = paths_of(built(candidates, log_probs, bonus, 64, device, beam=beam), candidates)
    every = (
        [(rank,) for rank in range(4)]
        + [(2, rank) for rank in range(4)]
        + [(2, 1, rank) for rank in range(4)]
    )
    assert got == set(every)


@on_each_device
@pytest.mark.parametrize("kind", ["marginals", "pairs", "beam"])
@pytest.mark.parametrize("keep_top1_path", [False, True])
def test_scores(keep_top1_path, kind, device):
    """A node's score is its parent's and its log-probability after the path to the parent, in float32."""
    candidates, log_probs, bonus, beam = case_of("pairs" if kind == "marginals" else kind, 2, 5, 4, 1.0)
    if kind == "marginals":
        log_probs = log_probs[:, :, 0].sort(-1, descending=True).values
    scores = torch.full((2, 200), math.nan, device=device)
    options = dict(keep_top1_path=keep_top1_path, beam=beam)
    trees = built(candidates, log_probs, bonus, 200, device, scores=scores, **options)
    scores = scores.cpu()
    rows = torch.zeros(2, 200, dtype=torch.int64)
    assert (scores[:, 0] == 0).all()
    for r in range(2):
        size = int(trees.sizes[r])
        assert (scores[r, size:] == -math.inf).all()
        for node in range(1, size):
            depth, parent = int(trees.depths[r, node]), int(trees.parents[r, node])
            rank = candidates[r, depth - 1].tolist().index(int(trees.tokens[r, node]))
            row = int(rows[r, parent])
            own = log_probs[r, depth - 1, rank] if kind == "marginals" else log_probs[r, depth - 1, row, rank]
            assert scores[r, node] == scores[r, parent] + own
            if kind == "pairs":
                rows[r, node] = rank
            elif kind == "beam" and depth < 5:
                found = (beam[r, depth] == row * 4 + rank).nonzero()
                rows[r, node] = found[0, 0] if len(found) else 0


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs CUDA")
@on_each_kind
def test_replays_read_the_current_rows(kind):
    candidates, log_probs, bonus, beam = (
        None if x is None else x.cuda() for x in case_of(kind, 4, 15, 8, 2.0)
    )
    trees = DraftTrees.allocate(4, 40, "cuda")
    build_trees(candidates, log_probs, bonus, trees, beam=beam)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_trees(candidates, log_probs, bonus, trees, beam=beam)
    for seed in (1, 2):
        new = case_of(kind, 4, 15, 8, 2.0, seed=seed)
        for into, source in zip((candidates, log_probs, bonus, beam), new, strict=True):
            if into is not None:
                into.copy_(source)
        graph.replay()
        assert_equal(on_cpu(trees), built(*new[:3], 40, "cpu", beam=new[3]))


def arguments(device):
    candidates, log_probs, bonus, beam = case_of("beam", 2, 3, 4, 1.0)
    return build_arguments(candidates, log_probs, bonus, 5, device, beam=beam)


@on_each_device
def test_registration(device):
    check_registration(torch.ops.sgl_kernel.ddtree_build, arguments(device))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {1: lambda t: t.new_zeros(2, 3, 33, 4)},
            r"log_probs: expected \[bs, D, W, K\] with W of 1 to 32, got 33",
        ),
        ({1: lambda t: t[:, :, :, :3]}, r"log_probs: expected shape \[2, 3, 32, 4\], got \[2, 3, 32, 3\]"),
        ({3: lambda t: None}, r"log_probs: expected W = K = 4 without a beam, got 32"),
        ({3: lambda t: t.long()}, "beam: expected dtype int32, got int64"),
        ({3: lambda t: t[:, :, :4]}, r"beam: expected shape \[2, 3, 32\], got \[2, 3, 4\]"),
        ({1: lambda t: t[:, :, 0].contiguous()}, r"beam: expected None with log_probs of \[bs, D, K\]"),
        (
            {2: lambda t: torch.zeros(2, 3)},
            r"log_sum: expected None with log_probs of \[bs, D, W, K\], which are log-probabilities",
        ),
    ],
)
def test_errors(changes, message):
    assert_refused(torch.ops.sgl_kernel.ddtree_build, arguments("cpu"), changes, message)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
