"""The target's token at every node: what the sampler gets, and nodes at which no token is allowed."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree import sampling
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

REQUESTS, NODES, VOCABULARY = 5, 6, 40


def sampling_info():
    """A batch of REQUESTS requests, each with different parameters."""
    column = torch.arange(1.0, REQUESTS + 1)
    return SamplingBatchInfo(
        temperatures=column[:, None].clone(), top_ps=column / 10, top_ks=column.int(), min_ps=column / 100,
        is_all_greedy=False, is_any_greedy=True, need_top_p_sampling=True, need_top_k_sampling=True,
        need_min_p_sampling=True, vocab_size=VOCABULARY, sampling_seed=column.long(), grammars=[None], logit_bias=column,
    )  # fmt: skip


class Recorder:
    """A sampler that picks the least likely token. Like the stock one, it overwrites the logits."""

    def __init__(self):
        self.sizes = []
        self.seen = {}

    def __call__(self, output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions):
        logits = output.next_token_logits
        self.sizes.append(logits.numel())
        tokens = logits.argmin(-1)
        logits.zero_()
        for i, position in enumerate(positions.tolist()):
            self.seen[position] = [
                round(float(values[i]), 3)
                for values in (info.temperatures, info.top_ps, info.top_ks, info.min_ps, info.sampling_seed)
            ]
        assert info.grammars is None and info.logit_bias is None and len(info) == len(tokens)
        return tokens.int()


class TestTargetTokens(CustomTestCase):
    def setUp(self):
        self.logits = torch.rand(REQUESTS * NODES, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.positions = torch.arange(REQUESTS * NODES)
        self.sampler = Recorder()

    def tokens(self, sampled, **options):
        return sampling.target_tokens(
            self.logits, sampling_info(), self.sampler, self.positions, sampled=sampled, **options
        )

    def check(self, sampled, **options):
        before = self.logits.clone()
        expected = before.argmax(-1).view(REQUESTS, NODES)
        expected[sampled] = before.argmin(-1).view(REQUESTS, NODES)[sampled]
        self.assertEqual(self.tokens(sampled, **options).tolist(), expected.flatten().tolist())
        nodes = [node for request in sampled for node in range(request * NODES, (request + 1) * NODES)]
        self.assertEqual(sorted(self.sampler.seen), nodes)
        for node, seen in self.sampler.seen.items():
            request = node // NODES + 1
            self.assertEqual(seen, [request, request / 10, request, request / 100, request])
        return before

    def test_all_are_sampled(self):
        self.check([0, 1, 2, 3, 4])
        self.assertEqual(len(self.sampler.sizes), 1)
        self.assertEqual(float(self.logits.abs().sum()), 0.0, "sampled in a copy")

    def test_greedy_requests_are_not_sampled(self):
        before = self.check([1, 4])
        torch.testing.assert_close(self.logits, before)

    def test_no_request_is_sampled(self):
        self.assertEqual(self.tokens([]).tolist(), self.logits.argmax(-1).tolist())
        self.assertEqual(self.sampler.sizes, [])

    def test_logits_are_kept(self):
        for sampled in ([0, 1, 2, 3, 4], [2]):
            self.sampler = Recorder()
            before = self.check(sampled, keep_logits=True)
            torch.testing.assert_close(self.logits, before)

    def test_chunks_are_bounded(self):
        """Chunks are bounded for every batch, also if one request's nodes, or one node, exceed the bound."""
        for limit in (7 * VOCABULARY, 4 * VOCABULARY + 3, 1):
            for sampled in ([0, 1, 2, 3, 4], [0, 3]):
                with (
                    self.subTest(limit=limit, sampled=sampled),
                    patch.object(sampling, "LOGITS_PER_CHUNK", limit),
                ):
                    self.setUp()
                    self.check(sampled, keep_logits=True)
                    self.assertLessEqual(max(self.sampler.sizes), max(limit, VOCABULARY))

    def test_a_call_takes_more_nodes_if_it_only_samples(self):
        plain = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), False)
        plain["sampling_seed"] = None
        few, many = sampling.LOGITS_PER_CHUNK // 1000, sampling.LOGITS_PER_PLAIN_CHUNK // 1000
        self.assertGreater(many, few)
        self.assertEqual(sampling.nodes_per_call(SimpleNamespace(**plain), 1000, False), many)
        self.assertEqual(sampling.nodes_per_call(SimpleNamespace(**plain), 1000, True), few)
        for name in plain:
            with self.subTest(name):
                info = SimpleNamespace(**plain | {name: True})
                self.assertEqual(sampling.nodes_per_call(info, 1000, False), few)


class TestConstrain(CustomTestCase):
    def test_grammar_and_bias(self):
        """The grammar covers each node, and a request's bias covers each of its nodes."""
        logits = torch.rand(2 * NODES, VOCABULARY)
        expected = logits.clone()
        bias = torch.rand(2, VOCABULARY)

        def apply(logits):
            logits[3:5, 1:] = -float("inf")

        sampling.constrain(logits, SimpleNamespace(logit_bias=bias), SimpleNamespace(apply=apply), NODES)
        apply(expected)
        expected += bias.repeat_interleave(NODES, 0)
        self.assertTrue(torch.equal(logits, expected))


if __name__ == "__main__":
    unittest.main()
