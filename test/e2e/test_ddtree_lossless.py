"""DDTREE emits what plain decoding emits: the same tokens if greedy, the same distribution if sampling."""

import tempfile
import unittest
from pathlib import Path

import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.adapters import WithAdapters, write_adapters
from support.cases import DDTreeCase
from support.jobs import (
    answer_twice,
    continue_sessions,
    exhaust_grammar,
    fill_context,
    greedy,
    sample,
    share_pool,
    stop_everywhere,
)
from support.logit_processors import answer_with_processors, fail_beside_others
from support.models import text_of, write_models
from support.penalties import PenaltyChecks
from support.processes import run_engine, run_ranks
from support.prompts import PROMPTS, TOKENS
from support.sampling import SamplingChecks

register_cpu_ci(est_time=310, suite="e2e")


class TestGreedy(DDTreeCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = run_engine(cls.plain, greedy).outputs

    def check(self, least_accepted, **arguments):
        found = run_engine(self.tree | arguments, greedy)
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertGreaterEqual(found.accepted, least_accepted)
        self.assertLess(found.steps, len(PROMPTS) * TOKENS)

    def test_tree(self):
        self.check(50, speculative_num_draft_tokens=32)

    def test_chain(self):
        """With one candidate per position the tree is DFLASH's chain."""
        self.check(5, speculative_num_draft_tokens=8, speculative_eagle_topk=1)

    def test_ancestors_of_several_words(self):
        self.check(100, speculative_num_draft_tokens=130, speculative_eagle_topk=12)

    def test_smallest_tree(self):
        self.check(5, speculative_num_draft_tokens=2)

    def test_keep_top1_path(self):
        self.check(30, speculative_num_draft_tokens=16, speculative_ddtree_top1_path="keep")

    def test_page_16(self):
        self.check(50, speculative_num_draft_tokens=32, page_size=16)

    def test_page_64(self):
        self.check(50, speculative_num_draft_tokens=32, page_size=64)

    def test_chunked_and_mixed_prefill(self):
        self.check(50, speculative_num_draft_tokens=32, chunked_prefill_size=16, enable_mixed_chunk=True)


def greedy_and_sampled(engine):
    options = {"temperature": 1.5, "top_p": 0.9, "frequency_penalty": 0.3}
    return greedy(engine), sample(engine, PROMPTS[2], 8, options)


class TestTensorParallel(CustomTestCase):
    """Two ranks over gloo. The vocabulary is large enough to be split: each rank holds 64 tokens."""

    def test_two_ranks(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        target, drafter = write_models(Path(folder.name), vocabulary=128)
        arguments = dict(
            model_path=target,
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=96,
            speculative_eagle_topk=32,
        )
        first, second = run_ranks(arguments | {"tp_size": 2}, greedy_and_sampled)
        self.assertEqual(first, second)
        alone = run_engine(arguments, greedy)
        # The same tokens in the same number of steps: two ranks build the tree that one rank builds.
        self.assertEqual(first[0], alone)
        self.assertGreater(alone.accepted, 30)
        self.assertEqual(alone.outputs, run_engine({"model_path": target}, greedy).outputs)


def answers_of_each_length(engine):
    """Answers of 0 to 20 tokens, so that many end inside an accepted path."""
    requests = [
        engine.submit(PROMPTS[2], temperature=0, max_new_tokens=tokens, ignore_eos=True)
        for tokens in range(21)
    ]
    return [list(request.output_ids_through_stop) for request in engine.finish(requests)]


def answers_with_logit_bias(engine):
    """Every second request has a bias."""
    bias = {"5": 2.0, "12": 1.0, "7": -3.0}
    requests = [
        engine.submit(
            prompt,
            temperature=0,
            max_new_tokens=20,
            ignore_eos=True,
            **({"logit_bias": bias} if i % 2 else {}),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [list(request.output_ids_through_stop) for request in engine.finish(requests)]


def logprobs(engine):
    """For each request: its tokens, and all reported log-probabilities by kind."""
    requests = engine.generate(
        PROMPTS, temperature=0, max_new_tokens=19, ignore_eos=True,
        return_logprob=True, top_logprobs_num=3, token_ids_logprob=[4, 11], logprob_start_len=0,
    )  # fmt: skip
    kinds = ("token_logprobs_val", "top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val")

    def reported(request):
        output = list(request.output_ids_through_stop)
        values = {}
        for kind in kinds:
            values["input_" + kind] = [v for v in getattr(request.logprob, "input_" + kind) if v is not None]
            # The last path may go past the end. Upstream's streamer drops the rest.
            values["output_" + kind] = getattr(request.logprob, "output_" + kind)[: len(output)]
        return output, values

    return [reported(request) for request in requests]


REGEX = r'\{"[ab]+":[01]+(,"[abc]+":\[[01]*\])*\}'


def answers_with_grammar(engine):
    """The text of each answer. Every second request has a grammar."""
    requests = [
        engine.submit(
            prompt, temperature=0, max_new_tokens=40, **({"regex": REGEX} if i % 2 else {"ignore_eos": True})
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [text_of(request.output_ids[:40]) for request in engine.finish(requests)]


def answers_with_stop_tokens(engine):
    requests = engine.generate(PROMPTS, temperature=0, max_new_tokens=48, stop_token_ids=[3, 9])
    return [list(request.output_ids_through_stop) for request in requests]


class _Windows:
    """A job with a target whose layers 0 and 2 have a window of 16 tokens that its config does not mention.

    Returns the greedy answers, and the window that the target's runner gives its attention backends.
    """

    def before(self):
        from sglang.srt.models import llama

        class Windowed(llama.RadixAttention):
            def __init__(self, *args, layer_id, **options):
                super().__init__(*args, layer_id=layer_id, **options)
                self.sliding_window_size = 16 if layer_id != 1 else -1

        llama.RadixAttention = Windowed

    def __call__(self, engine):
        return greedy(engine), engine.scheduler.tp_worker.model_runner.sliding_window_size


class TestFeatures(DDTreeCase):
    arguments = {"speculative_num_draft_tokens": 32}

    def both(self, job):
        """The job's result with plain decoding and with DDTREE."""
        return run_engine(self.plain, job), run_engine(self.tree | self.arguments, job)

    def test_sliding_windows(self):
        (plain, plain_window), (tree, tree_window) = self.both(_Windows())
        self.assertEqual(tree.outputs, plain.outputs)
        self.assertNotEqual(
            plain.outputs, run_engine(self.plain, greedy).outputs, "the windows change nothing"
        )
        self.assertGreater(tree.accepted, 50)
        self.assertEqual((plain_window, tree_window), (None, 16))

    def test_radix_cache_sees_compacted_kv(self):
        self.check_cache()

    def test_radix_cache_in_pages(self):
        self.check_cache(page_size=16)

    def check_cache(self, **arguments):
        answer, second, cached = run_engine(self.tree | self.arguments | arguments, answer_twice)
        self.assertGreater(cached, len(PROMPTS[4]) + 10, "the answer's KV was not in the cache")
        self.assertEqual(run_engine(self.plain, answer_twice)[0], answer)
        self.assertEqual(second[:10], answer[30:])

    def test_stop_tokens(self):
        plain, tree = self.both(answers_with_stop_tokens)
        self.assertEqual(tree, plain)

    def test_stops_inside_a_path(self):
        """The first stop ends the answer: a string of several tokens, a regex, a token or the length."""
        arguments = {"skip_tokenizer_init": False}
        plain, _ = run_engine(self.plain | arguments | {"disable_overlap_schedule": True}, stop_everywhere)
        tree, inside = run_engine(self.tree | self.arguments | arguments, stop_everywhere)
        for expected, found in zip(plain, tree, strict=True):
            self.assertEqual(found, expected)
        self.assertGreater(inside, 20, "few answers stopped inside their last path")

    def test_grammar(self):
        """Requests with a grammar share a batch with requests without one."""
        arguments = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
        plain = run_engine(self.plain | arguments, answers_with_grammar)
        self.assertEqual(run_engine(self.tree | self.arguments | arguments, answers_with_grammar), plain)
        for i, text in enumerate(plain):
            if i % 2 and text.endswith("</s>"):
                self.assertRegex(text.removesuffix("</s>"), f"^{REGEX}$")

    def test_grammar_that_allows_no_token(self):
        """Only its own request ends. Sampling from a row without a possible token would end the server."""
        arguments = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
        *constrained, free = run_engine(self.tree | self.arguments | arguments, exhaust_grammar)
        for text, reason in constrained:
            self.assertRegex(text, "^ab[01]$")
            self.assertEqual(reason, "abort")
        self.assertEqual(free[1], "length")

    def test_logprobs(self):
        """For input and output: the token's own, the three largest, and those of two given tokens."""
        plain, tree = self.both(logprobs)
        for (tokens, values), (tree_tokens, tree_values) in zip(plain, tree):
            self.assertEqual(tree_tokens, tokens)
            for kind, expected in values.items():
                with self.subTest(kind):
                    # Two attention implementations in float32 differ by rounding.
                    torch.testing.assert_close(
                        torch.tensor(tree_values[kind]), torch.tensor(expected), atol=1e-3, rtol=1e-3
                    )

    def test_an_answer_ends_inside_a_path(self):
        plain, tree = self.both(answers_of_each_length)
        self.assertEqual(tree, plain)
        self.assertEqual([len(output) for output in tree[1:]], list(range(1, 21)))

    def test_context_ends(self):
        plain, tree = self.both(fill_context)
        self.assertEqual(tree, plain)
        self.assertEqual(tree[1], 0, "KV slots leaked")

    def test_logit_bias(self):
        plain, tree = self.both(answers_with_logit_bias)
        self.assertEqual(tree, plain)


class TestLogitProcessors(DDTreeCase):
    """Each request has its own processor or none. Some processors read the output so far.

    With overlap scheduling, plain decoding shows them one token less.
    """

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.plain |= dict(enable_custom_logit_processor=True, disable_overlap_schedule=True)
        cls.tree |= dict(enable_custom_logit_processor=True, speculative_num_draft_tokens=32)
        cls.expected, _ = run_engine(cls.plain, answer_with_processors)
        cls.without = run_engine(cls.plain, greedy).outputs

    def check(self, **arguments):
        found, accepted = run_engine(self.tree | arguments, answer_with_processors)
        self.assertEqual(found, self.expected)
        self.assertGreater(accepted, 20)

    def test_they_change_the_answers(self):
        same = [a == b for a, b in zip(self.expected, self.without, strict=True)]
        self.assertEqual(same, [True] + [False] * 5)

    def test_tree(self):
        self.check()

    def test_overlap(self):
        """Each step begins before the scheduler has the tokens of the last one."""
        self.check(overlap=True)

    def test_mixed_prefill_and_overlap(self):
        self.check(overlap=True, chunked_prefill_size=16, enable_mixed_chunk=True)

    def test_one_that_fails_ends_its_request_only(self):
        reasons, others = run_engine(self.tree, fail_beside_others)
        for reason, text in zip(reasons, ("it cannot work", "cannot write to its request"), strict=True):
            self.assertEqual((reason["type"], reason["status_code"]), ("abort", 400))
            self.assertIn(text, reason["message"])
        self.assertEqual(others, self.without)


class TestAdapters(DDTreeCase):
    def test_lora(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        lora = write_adapters(self.target, folder) | dict(lora_backend="torch_native")
        plain = run_engine(self.plain | lora, WithAdapters())
        without = run_engine(self.plain, greedy)
        same = [a == b for a, b in zip(plain.outputs, without.outputs, strict=True)]
        self.assertEqual(same, [True, False, False] * 2, "each adapter should change its answers")
        tree = self.tree | lora
        found = run_engine(tree, WithAdapters())
        self.assertEqual(found.outputs, plain.outputs)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertGreater(found.accepted, 20)
        for budget in ("auto", "8"):
            with self.subTest(budget=budget):
                outputs = run_engine(tree | dict(speculative_ddtree_budget=budget), WithAdapters()).outputs
                self.assertEqual(outputs, plain.outputs)


class TestSessions(DDTreeCase):
    def check(self, streaming, **arguments):
        plain = run_engine(self.plain | arguments, continue_sessions, streaming)
        tree = run_engine(self.tree | arguments, continue_sessions, streaming)
        self.assertEqual((tree.prompts, tree.found.outputs), (plain.prompts, plain.found.outputs))
        self.assertEqual(*tree.found.free_slots, "KV slots leaked")
        self.assertGreater(tree.inside, 3, "few answers stopped inside their last path")

    def test_turns_go_on_after_the_stop(self):
        self.check(streaming=False)

    def test_turns_go_on_from_kv_that_is_kept(self):
        self.check(streaming=True, enable_streaming_session=True)

    def test_sessions_share_a_small_pool(self):
        # In the end, the sessions hold nearly 700 tokens.
        pool = dict(enable_streaming_session=True, max_total_tokens=800)
        expected, _, _ = run_engine(self.plain | pool, share_pool)
        answers, leaked, retracted = run_engine(self.tree | pool, share_pool)
        self.assertEqual(answers, expected)
        self.assertEqual(leaked, 0)
        self.assertGreater(retracted, len(expected), "no request was retracted twice")


class TestPenalties(PenaltyChecks, DDTreeCase):
    pass


class TestSampling(SamplingChecks, DDTreeCase):
    pass


if __name__ == "__main__":
    unittest.main()
