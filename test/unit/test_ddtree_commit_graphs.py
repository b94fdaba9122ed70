"""The graphs of accept and commit, on a CPU: what they compute, and where their results are."""

import unittest
from types import SimpleNamespace

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path, build_trees
from sglang.srt.speculative.ddtree.commit_graphs import CommitGraphs, _Graph
from sglang.srt.speculative.ddtree.tree_builder import first_nodes
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

MAX_BS, NUM_NODES, BLOCK_SIZE, WIDTH, VOCABULARY = 4, 9, 5, 6, 4


class TestCommitGraphs(CustomTestCase):
    def setUp(self):
        generator = torch.Generator().manual_seed(1)
        self.trees = DraftTrees.allocate(MAX_BS, NUM_NODES, "cpu")
        shape = (MAX_BS, BLOCK_SIZE - 1, 2)
        build_trees(
            torch.rand(*shape[:2], VOCABULARY, generator=generator).argsort(-1)[..., :2].contiguous(),
            torch.rand(shape, generator=generator).log().sort(-1, descending=True).values,
            torch.arange(MAX_BS),
            self.trees,
        )
        self.target = torch.randint(VOCABULARY, (MAX_BS, NUM_NODES), generator=generator)
        self.seq_lens = torch.tensor([10, 20, 30, 40])
        self.slots = torch.arange(MAX_BS * NUM_NODES) + 100
        self.committed = []
        self.window = torch.arange(MAX_BS * NUM_NODES).view(MAX_BS, NUM_NODES) + 1000
        self.graphs = CommitGraphs(
            trees=self.trees, slots=self.window, block_size=BLOCK_SIZE, commit=self.commit
        )

    def commit(self, hidden, accepted, positions, slots, draft_slots):
        self.committed.append((hidden, accepted.lengths.clone(), positions, slots, draft_slots))

    def replay(self, bs, padded_bs, num_nodes=NUM_NODES):
        """CommitGraphs.replay() with a graph that runs eagerly."""
        hidden = torch.rand(padded_bs * num_nodes, WIDTH)
        path = torch.zeros(padded_bs, BLOCK_SIZE, dtype=torch.int64)
        outputs = torch.zeros(padded_bs * (BLOCK_SIZE + 3), dtype=torch.int64)
        graphs = self.graphs

        class Eager:
            def replay(_):
                graphs._run(padded_bs, hidden, path, outputs, buffers)

        buffers = SimpleNamespace(
            seq_lens=self.seq_lens,
            out_cache_loc=self.slots,
            input_ids=self.trees.tokens[:padded_bs, :num_nodes].contiguous().flatten(),
        )
        graphs._graphs[num_nodes, padded_bs] = _Graph(Eager(), outputs, path)
        graphs.target(bs, num_nodes).copy_(self.target[:bs, :num_nodes])
        return graphs.replay(bs, padded_bs, num_nodes), outputs

    def test_it_accepts_and_commits(self):
        for bs, padded_bs in ((1, 1), (3, 4), (4, 4)):
            (accepted, new_seq_lens), _ = self.replay(bs, padded_bs)
            expected = Accepted.allocate(bs, BLOCK_SIZE, "cpu")
            accept_path(self.trees.first(bs), self.target[:bs].contiguous(), expected)
            for name in ("path", "tokens", "lengths", "bonus"):
                got = getattr(accepted, name)
                self.assertTrue(got.is_contiguous(), name)
                self.assertTrue(torch.equal(got, getattr(expected, name)), name)
            self.assertEqual(new_seq_lens.tolist(), (self.seq_lens[:bs] + expected.lengths).tolist())
            _, lengths, positions, slots, draft_slots = self.committed.pop()
            self.assertEqual(draft_slots.tolist(), self.window[:padded_bs, :BLOCK_SIZE].tolist())
            self.assertEqual(lengths[:bs].tolist(), expected.lengths.tolist())
            self.assertEqual(positions[bs - 1].tolist(), list(range(10 * bs, 10 * bs + BLOCK_SIZE)))
            self.assertEqual(slots.tolist(), self.slots[: padded_bs * NUM_NODES].view(-1, NUM_NODES).tolist())

    def test_the_first_nodes(self):
        """A narrower verify accepts what a tree of its width would, and moves KV between its own slots."""
        for num_nodes in (1, 3, 7):
            (accepted, _), _ = self.replay(2, 2, num_nodes)
            expected = Accepted.allocate(2, BLOCK_SIZE, "cpu")
            trees = first_nodes(self.trees.first(2), num_nodes)
            accept_path(trees, self.target[:2, :num_nodes].contiguous(), expected)
            self.assertEqual(accepted.tokens.tolist(), expected.tokens.tolist())
            self.assertEqual(accepted.lengths.tolist(), expected.lengths.tolist())
            hidden, _, _, slots, draft_slots = self.committed.pop()
            self.assertEqual(slots.tolist(), self.slots[: 2 * num_nodes].view(2, -1).tolist())
            self.assertEqual((hidden.shape[0], draft_slots.shape), (2 * num_nodes, (2, BLOCK_SIZE)))

    def test_the_next_replay_leaves_the_results_alone(self):
        """Under overlap scheduling, the host reads them while the next step runs."""
        (accepted, new_seq_lens), outputs = self.replay(2, 2)
        before = [
            accepted.tokens.clone(),
            accepted.lengths.clone(),
            accepted.bonus.clone(),
            new_seq_lens.clone(),
        ]
        outputs.fill_(-1)
        after = [accepted.tokens, accepted.lengths, accepted.bonus, new_seq_lens]
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(before, after)))


if __name__ == "__main__":
    unittest.main()
