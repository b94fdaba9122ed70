"""Expected tokens and accepted nodes: the torch ops against loops over nodes, and the kernels against the ops."""

import os
import subprocess
import sys
import unittest

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path, build_trees
from sglang.srt.speculative.ddtree.expectation import FIXED_POINT, Expectation
from sglang.srt.speculative.ddtree.heads import Candidates
from sglang.srt.speculative.ddtree.tree_builder import first_nodes
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, suite="unit")

VOCABULARY = 12


def step(bs, block_size, num_candidates, num_nodes, width, pairs=False, seed=0):
    """A draft and a verify of random logits: (trees, candidates, scores, accepted)."""
    generator = torch.Generator().manual_seed(seed)
    every = 2 * torch.randn(bs, block_size - 1, VOCABULARY, generator=generator)
    logits, candidates = every.topk(num_candidates)
    found = Candidates(candidates, logits, log_sum=every.logsumexp(-1))
    if pairs:
        shape = (*logits.shape, num_candidates)
        scores = logits[:, :, None] + torch.randn(shape, generator=generator)
        found = Candidates(candidates, scores.log_softmax(-1))
    trees, scores = DraftTrees.allocate(bs, num_nodes, "cpu"), torch.empty(bs, num_nodes)
    build_trees(candidates, found.log_probs, torch.arange(bs), trees, log_sum=found.log_sum, scores=scores)
    cut = first_nodes(trees, width)
    accepted = Accepted.allocate(bs, block_size, "cpu")
    # The drafter's first choice twice out of three times.
    target = torch.randint(VOCABULARY, cut.tokens.shape, generator=generator)
    for r in range(bs):
        for j in range(width):
            child = int(cut.first_child[r, j])
            if child >= 0 and float(torch.rand((), generator=generator)) < 0.8:
                target[r, j] = cut.tokens[r, child]
    accept_path(cut, target, accepted)
    return trees, found, scores, accepted


class TestExpectation(CustomTestCase):
    def check(self, bs, block_size, num_candidates, widths, width, pairs=False):
        trees, candidates, scores, accepted = step(bs, block_size, num_candidates, widths[-1], width, pairs)
        found = Expectation(
            widths=widths,
            max_requests=bs + 1,
            block_size=block_size,
            num_candidates=num_candidates,
            device="cpu",
        )
        found.factors.uniform_(0.3, 1.5)
        rows = torch.arange(bs)  # the first is padding
        found.scores[:bs] = scores
        found.predict(trees, candidates.tokens)
        found.count(trees, accepted, rows, width)
        counts = torch.zeros(2, block_size - 1, num_candidates, dtype=torch.float64)
        for r in range(bs):
            path = accepted.path[r, : accepted.lengths[r]].tolist()
            share = [1.0] * widths[-1]
            for j in range(1, widths[-1]):
                if j >= trees.sizes[r]:
                    share[j] = 0.0
                    self.assertEqual(int(found.ranks[r, j]), -1)
                    continue
                depth, parent = int(trees.depths[r, j]), int(trees.parents[r, j])
                rank = candidates.tokens[r, depth - 1].tolist().index(int(trees.tokens[r, j]))
                if pairs:
                    above = (
                        candidates.tokens[r, depth - 2].tolist().index(int(trees.tokens[r, parent]))
                        if parent
                        else 0
                    )
                    own = float(candidates.log_probs[r, depth - 1, above, rank].exp())
                else:
                    own = float(
                        (candidates.log_probs[r, depth - 1, rank] - candidates.log_sum[r, depth - 1]).exp()
                    )
                share[j] = share[parent] * min(1.0, own * float(found.factors[depth - 1, rank]))
                if r > 0 and j < width and parent in path:
                    counts[0, depth - 1, rank] += own
                    counts[1, depth - 1, rank] += j in path
            expected = [sum(share[:n]) for n in widths] + [len(path)]
            self.assertTrue(torch.allclose(found.report[r], torch.tensor(expected), atol=1e-5))
        counts[0] *= FIXED_POINT
        self.assertTrue(torch.allclose(found.totals.double(), counts, atol=bs * block_size))
        self.assertGreater(int(found.totals[1].sum()), 0)
        self.assertEqual(found.report[bs].tolist(), [0.0] * (len(widths) + 1))

    def test_against_loops_over_nodes(self):
        self.check(5, 4, 3, (1, 4, 9, 12), 9)
        self.check(3, 2, 4, (1, 2, 30), 30)  # the trees are smaller than the width
        self.check(4, 9, 8, (1, 16, 64, 130), 64)

    def test_pairs_against_loops_over_nodes(self):
        self.check(5, 5, 3, (1, 5, 20), 20, pairs=True)
        self.check(3, 9, 8, (1, 9, 64), 9, pairs=True)

    def test_the_kernels_agree(self):
        """In Triton's interpreter: it is chosen when Triton is imported, so they run in a process of their own."""
        ran = subprocess.run(
            [sys.executable, __file__, "kernels"],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual((ran.returncode, ran.stdout.strip()[-9:]), (0, "all right"), ran.stderr[-3000:])


def compare_kernels():
    for bs, block_size, num_candidates, widths, width, pairs in (
        (4, 5, 3, (1, 5, 12), 12, False),
        (3, 8, 8, (1, 8, 16, 40), 16, True),
        (2, 6, 8, (1, 64, 130), 64, False),
    ):
        trees, candidates, scores, accepted = step(bs, block_size, num_candidates, widths[-1], width, pairs)
        rows = torch.arange(bs).flip(0)
        results = []
        for in_kernel in (False, True):
            found = Expectation(
                widths=widths,
                max_requests=bs,
                block_size=block_size,
                num_candidates=num_candidates,
                device="cpu",
            )
            found.factors.copy_(torch.linspace(0.3, 1.4, found.factors.numel()).view_as(found.factors))
            found.scores.copy_(scores)
            predict = found._predict_in_kernel if in_kernel else found._predict_in_torch
            count = found._count_in_kernel if in_kernel else found._count_in_torch
            predict(trees, candidates.tokens)
            count(trees, accepted, rows, width)
            results.append(found)
        ours, theirs = results
        assert torch.equal(ours.ranks, theirs.ranks)
        torch.testing.assert_close(ours.probabilities, theirs.probabilities)
        torch.testing.assert_close(ours.report, theirs.report)
        torch.testing.assert_close(ours.totals, theirs.totals, atol=8, rtol=0.0)
        assert torch.equal(ours.totals[1], theirs.totals[1]) and int(ours.totals[1].sum()) > 0
    print("all right")


if __name__ == "__main__":
    if sys.argv[1:] == ["kernels"]:
        compare_kernels()
    else:
        unittest.main()
