"""Penalties at every node of a tree, compared with a loop over tokens that follows upstream's definition."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sgl_kernel.ddtree import DraftTrees, build_trees
from sglang.srt.speculative.ddtree import penalties
from sglang.srt.speculative.ddtree.penalties import OutputPenalties
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

VOCABULARY = 11
POOL = 9  # rows of the request pool
STOPS = (1, 4)
OPTIONS = (
    dict(frequency_penalty=0.7),
    dict(presence_penalty=-0.4),
    dict(repetition_penalty=1.7),
    dict(min_new_tokens=6),
    dict(),
    dict(frequency_penalty=-0.3, presence_penalty=0.9, repetition_penalty=0.6, min_new_tokens=9),
)


def request(prompt=5, output=(), **options):
    neutral = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**neutral | options), origin_input_ids=[2] * prompt, output_ids=output
    )


def stop_mask(requests):
    """What upstream's penalizers accumulate if they count no token."""
    mask = torch.zeros(len(requests), VOCABULARY)
    for row, req in zip(mask, requests):
        if req.sampling_params.min_new_tokens:
            row[list(STOPS)] = -float("inf")
    return mask


def penalized(logits, req, output):
    """The logits of one node after the output tokens `output`, computed token by token."""
    params, result = req.sampling_params, logits.clone()
    for token in range(VOCABULARY):
        times = list(output).count(token)
        x = float(logits[token]) - params.frequency_penalty * times
        if times:
            x -= params.presence_penalty
            x = x * params.repetition_penalty if x < 0 else x / params.repetition_penalty
        if len(output) < params.min_new_tokens and token in STOPS:
            x = -float("inf")
        result[token] = x
    return result


class TestNodesOfATree(CustomTestCase):
    def setUp(self):
        self.generator = torch.Generator().manual_seed(7)
        self.requests = [request(prompt=3 + i, **options) for i, options in enumerate(OPTIONS)]
        self.pool_rows = torch.tensor([4, 1, 8, 2, 0, 7], dtype=torch.int32)
        self.penalties = OutputPenalties(POOL, VOCABULARY, "cpu")

    def tokens(self, *shape):
        return torch.randint(VOCABULARY, shape, generator=self.generator)

    def trees(self, bonus, num_nodes, max_depth=5, num_candidates=4):
        """Trees whose paths repeat tokens."""
        bs = len(bonus)
        order = torch.rand(bs, max_depth, VOCABULARY, generator=self.generator).argsort(-1)
        scores = torch.rand(bs, max_depth, num_candidates, generator=self.generator)
        return build_trees(
            order[..., :num_candidates].contiguous(),
            scores.sort(-1, descending=True).values.log(),
            bonus,
            DraftTrees.allocate(bs, num_nodes, "cpu"),
        )

    def begin(self, requests, pool_rows, decoding=None, late=0):
        """Prefill requests; return what the sampler gets. The host is `late` tokens behind for decoding ones."""
        lens = [
            len(req.origin_input_ids) + len(req.output_ids) + late * any(req is r for r in decoding or ())
            for req in requests
        ]
        info = SimpleNamespace(acc_additive_penalties=stop_mask(requests), acc_scaling_penalties=None)
        batch = SimpleNamespace(
            reqs=requests,
            decoding_reqs=decoding,
            req_pool_indices=pool_rows,
            seq_lens=torch.tensor(lens),
            sampling_info=info,
        )
        return self.penalties.begin(batch), info

    def check_nodes(self, outputs, num_nodes):
        """Check a verify step after `outputs`, whose last tokens are the roots."""
        trees = self.trees(torch.tensor([output[-1] for output in outputs]), num_nodes)
        logits = torch.randn(len(outputs) * num_nodes, VOCABULARY, generator=self.generator)
        prefix = torch.tensor([len(r.origin_input_ids) + len(o) - 1 for r, o in zip(self.requests, outputs)])
        positions = (prefix[:, None] + trees.depths).flatten()
        found = logits.clone()
        options = self.penalties.options(self.requests)
        info = SimpleNamespace(acc_additive_penalties=stop_mask(self.requests))
        self.penalties.apply(found, options, info, self.pool_rows, trees, positions)
        for i, (req, output) in enumerate(zip(self.requests, outputs)):
            for node in range(int(trees.sizes[i])):
                path, ancestor = [], node
                while ancestor > 0:
                    path.insert(0, int(trees.tokens[i, ancestor]))
                    ancestor = int(trees.parents[i, ancestor])
                at = i * num_nodes + node
                torch.testing.assert_close(found[at], penalized(logits[at], req, output + path))

    def test_several_steps(self):
        """The first token of a prefill, then steps in which the requests emit different numbers of tokens."""
        self.begin(self.requests, self.pool_rows)
        outputs = [[int(token)] for token in self.tokens(len(self.requests))]
        self.penalties.count(self.pool_rows, torch.tensor(outputs))
        for num_nodes in (24, 70, 2):
            self.check_nodes(outputs, num_nodes)
            emitted = self.tokens(len(outputs), 5)
            lengths = torch.tensor([1, 5, 2, 3, 4, 5], dtype=torch.int32)
            self.penalties.count(self.pool_rows, emitted, lengths)
            outputs = [o + e[:n].tolist() for o, e, n in zip(outputs, emitted, lengths)]
        self.check_nodes(outputs, 24)

    def test_some_requests_at_a_time(self):
        """As if the logits of all took too much memory: first four requests and then two, or one by one."""
        for chunk in (4 * 24 * VOCABULARY, 1):
            with self.subTest(chunk), patch.object(penalties, "LOGITS_PER_CHUNK", chunk):
                self.test_several_steps()

    def test_all_requests_ask(self):
        for req in self.requests:
            req.sampling_params.presence_penalty += 0.5
        self.test_some_requests_at_a_time()

    def test_a_request_that_asks_for_nothing_costs_nothing(self):
        seen = []

        def watched(by_node, options, stops, pool_rows, *rest):
            seen.extend(pool_rows.tolist())

        self.begin(self.requests, self.pool_rows)
        with patch.object(self.penalties, "_apply", watched):
            trees = self.trees(torch.zeros(len(OPTIONS), dtype=torch.int64), 8)
            logits = torch.zeros(len(OPTIONS) * 8, VOCABULARY)
            options = self.penalties.options(self.requests)
            info = SimpleNamespace(acc_additive_penalties=None)
            self.penalties.apply(logits, options, info, self.pool_rows, trees, trees.depths.flatten())
        self.assertEqual(seen, [row for row, asked in zip(self.pool_rows.tolist(), OPTIONS) if asked])

    def check_sampler(self, info, requests, outputs):
        """Apply what begin() gave the sampler as upstream does, additive penalties first."""
        for i, (req, output) in enumerate(zip(requests, outputs)):
            logits = torch.randn(VOCABULARY, generator=self.generator)
            found = logits + info.acc_additive_penalties[i]
            scale = info.acc_scaling_penalties[i]
            found = torch.where(found < 0, found * scale, found / scale)
            torch.testing.assert_close(found, penalized(logits, req, output))

    def test_prefill_after_retraction(self):
        """The output so far counts. What the pool row counted before does not."""
        self.begin(self.requests, self.pool_rows)
        self.penalties.count(self.pool_rows, self.tokens(len(self.requests), 5))
        for length, req in zip((1, 3, 6, 2, 0, 8), self.requests):
            req.output_ids = self.tokens(length).tolist()
        _, info = self.begin(self.requests, self.pool_rows)
        self.check_sampler(info, self.requests, [req.output_ids for req in self.requests])

    def test_requests_whose_prefill_ran_elsewhere(self):
        """They take rows that others have used, and join requests that run already."""
        self.begin(self.requests, self.pool_rows)
        outputs = self.tokens(len(self.requests), 3)
        self.penalties.count(self.pool_rows, outputs)
        outputs = outputs.tolist()
        for i in (1, 2, 4):
            outputs[i] = self.tokens(1 + i).tolist()
            self.requests[i].output_ids = outputs[i]
        batch = SimpleNamespace(req_pool_indices=self.pool_rows)
        self.penalties.resume(batch, [(i, self.requests[i]) for i in (1, 2, 4)])
        self.check_nodes(outputs, 24)

    def test_mixed_batch_keeps_the_counts_of_running_requests(self):
        running, fresh = self.requests[:3], self.requests[3:]
        self.begin(running, self.pool_rows[:3])
        outputs = self.tokens(3, 4)
        self.penalties.count(self.pool_rows[:3], outputs)
        for req, output in zip(running, outputs.tolist()):
            req.output_ids = output[:-3]  # the scheduler is a step behind under overlap scheduling
        _, info = self.begin(self.requests, self.pool_rows, decoding=running, late=3)
        self.check_sampler(info, running + fresh, [*outputs.tolist(), [], [], []])

    def test_nothing_asked_costs_nothing(self):
        options, info = self.begin([request(), request(output=[3])], self.pool_rows[:2])
        self.assertIsNone(options)
        self.assertIsNone(info.acc_scaling_penalties)
        self.assertIsNone(self.penalties._counts)


if __name__ == "__main__":
    unittest.main()
