"""The target's tokens at the rows of DDTREE's trees: what the sampler is given, and rows that nothing is allowed at."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree import verify
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

REQUESTS, ROWS, VOCABULARY = 5, 6, 40


def sampling_info():
    """Of REQUESTS requests, each with a temperature of its own."""
    column = torch.arange(1.0, REQUESTS + 1)
    return SamplingBatchInfo(
        temperatures=column[:, None].clone(), top_ps=column / 10, top_ks=column.int(), min_ps=column / 100,
        is_all_greedy=False, is_any_greedy=True, need_top_p_sampling=True, need_top_k_sampling=True,
        need_min_p_sampling=True, vocab_size=VOCABULARY, sampling_seed=column.long(), grammars=[None], logit_bias=column,
    )  # fmt: skip


class Recorder:
    """A sampler whose token is the last choice of its logits, and which overwrites them, as the stock one does."""

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
        self.logits = torch.rand(REQUESTS * ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.positions = torch.arange(REQUESTS * ROWS)
        self.sampler = Recorder()

    def tokens(self, sampled, **options):
        return verify.target_tokens(
            self.logits, sampling_info(), self.sampler, self.positions, sampled=sampled, **options
        )

    def check(self, sampled, **options):
        before = self.logits.clone()
        expected = before.argmax(-1).view(REQUESTS, ROWS)
        expected[sampled] = before.argmin(-1).view(REQUESTS, ROWS)[sampled]
        self.assertEqual(self.tokens(sampled, **options).tolist(), expected.flatten().tolist())
        rows = [row for request in sampled for row in range(request * ROWS, (request + 1) * ROWS)]
        self.assertEqual(sorted(self.sampler.seen), rows)
        for row, seen in self.sampler.seen.items():
            request = row // ROWS + 1
            self.assertEqual(seen, [request, request / 10, request, request / 100, request])
        return before

    def test_all_are_sampled(self):
        self.check([0, 1, 2, 3, 4])
        self.assertEqual(len(self.sampler.sizes), 1)
        self.assertEqual(float(self.logits.abs().sum()), 0.0, "sampled in a copy")

    def test_greedy_requests_are_not(self):
        before = self.check([1, 4])
        torch.testing.assert_close(self.logits, before)

    def test_none_is(self):
        self.assertEqual(self.tokens([]).tolist(), self.logits.argmax(-1).tolist())
        self.assertEqual(self.sampler.sizes, [])

    def test_logits_are_kept(self):
        for sampled in ([0, 1, 2, 3, 4], [2]):
            self.sampler = Recorder()
            before = self.check(sampled, keep_logits=True)
            torch.testing.assert_close(self.logits, before)

    def test_a_bounded_number_at_once(self):
        """Whatever the batch; also where one request's rows are more than that, and one row."""
        for limit in (7 * VOCABULARY, 4 * VOCABULARY + 3, 1):
            for sampled in ([0, 1, 2, 3, 4], [0, 3]):
                with (
                    self.subTest(limit=limit, sampled=sampled),
                    patch.object(verify, "LOGITS_AT_ONCE", limit),
                ):
                    self.setUp()
                    self.check(sampled, keep_logits=True)
                    self.assertLessEqual(max(self.sampler.sizes), max(limit, VOCABULARY))


class TestConstrain(CustomTestCase):
    def test_no_token_is_allowed(self):
        """Token 0 is left then, alone; other rows stay as they are."""
        logits = torch.rand(2 * ROWS, VOCABULARY)
        before = logits.clone()

        def apply(logits):
            logits[3:5] = -float("inf")
            logits[7, 1:] = -float("inf")

        verify.constrain(logits, None, SimpleNamespace(apply=apply), ROWS)
        self.assertEqual(logits[3:5].softmax(-1).argmax(-1).tolist(), [0, 0])
        self.assertEqual(logits[3:5].softmax(-1)[:, 0].tolist(), [1.0, 1.0])
        apply(before)
        before[3:5, 0] = 0.0
        self.assertTrue(torch.equal(logits, before))

    def test_a_bias_that_forbids_the_rest(self):
        logits = torch.zeros(2 * ROWS, VOCABULARY)
        bias = torch.zeros(2, VOCABULARY)
        bias[1, 5:] = -float("inf")

        def apply(logits):
            logits[:, :5] = -float("inf")

        verify.constrain(logits, SimpleNamespace(logit_bias=bias), SimpleNamespace(apply=apply), ROWS)
        self.assertTrue(torch.isfinite(logits[:, 0]).tolist() == [False] * ROWS + [True] * ROWS)


if __name__ == "__main__":
    unittest.main()
