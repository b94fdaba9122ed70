"""DDTREE on targets with recurrent layers emits what plain decoding emits, and keeps no state per node."""

import os
import shutil
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.hybrid_models import write_lfm2, write_nemotron_h, write_qwen3_5, write_qwen3_next
from support.jobs import fill_context, greedy
from support.load import schedule, serve
from support.models import VOCABULARY, write_models
from support.processes import run_engine, run_ranks
from support.prompts import PROMPTS, TOKENS
from support.sampling import SamplingCheck

register_cpu_ci(est_time=240, suite="e2e")

TREE = dict(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32)


class HybridCase(CustomTestCase):
    """A target with recurrent layers, and the engine arguments of both kinds of decoding.

    Attributes:
        write: writes the target.
        vocabulary: number of tokens of the drafter.
    """

    write: Callable[[Path], str]
    vocabulary = VOCABULARY

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        attention_target, drafter = write_models(Path(folder.name), vocabulary=cls.vocabulary)
        cls.target = cls.write(Path(folder.name, "hybrid"))
        for tokenizer in Path(attention_target).glob("tokenizer*"):
            shutil.copy(tokenizer, cls.target)
        # Upstream keeps convolution windows in bfloat16 whatever the model's dtype is. Its radix cache for
        # recurrent states does not overlap on a CPU.
        environment = mock.patch.dict(os.environ, SGLANG_MAMBA_CONV_DTYPE="float32")
        environment.start()
        cls.addClassCleanup(environment.stop)
        cls.plain = dict(
            model_path=cls.target,
            disable_overlap_schedule=True,
            # Upstream would size the pool of states by the memory that is free now.
            mem_fraction_static=0.5,
            max_mamba_cache_size=64,
        )
        cls.tree = cls.plain | TREE | dict(speculative_draft_model_path=drafter)


def greedy_and_states(engine):
    """Greedy answers, free states before and after, and whether the pool has room for states per node."""
    before = engine.free_states()
    found = greedy(engine)
    cache = engine.scheduler.req_to_token_pool.mamba_pool.mamba_cache
    return found, (before, engine.free_states()), hasattr(cache, "intermediate_ssm")


def first_choices(target, prompt, output):
    """The target's first choice after the prompt and after each token of the output, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def answer_twice(engine):
    """Ask for a prompt, then for the prompt with its whole answer, whose state is in the radix cache."""
    prompt = PROMPTS[4]
    (first,) = engine.generate([prompt], temperature=0, max_new_tokens=40, ignore_eos=True)
    answer = list(first.output_ids)
    (second,) = engine.generate([prompt + answer], temperature=0, max_new_tokens=20, ignore_eos=True)
    (fresh,) = engine.generate([[*prompt, *answer]], temperature=0, max_new_tokens=20, ignore_eos=True)
    return answer, list(second.output_ids)[:20], second.cached_tokens, list(fresh.output_ids)[:20]


class _Retracting:
    """Runs serve() and counts retractions."""

    def __call__(self, engine, planned):
        queue, retracted = engine.scheduler._add_request_to_queue, []

        def watched(request, is_retracted=False, **options):
            retracted.extend([request.rid] * is_retracted)
            return queue(request, is_retracted=is_retracted, **options)

        engine.scheduler._add_request_to_queue = watched
        states = engine.free_states()
        outputs, slots = serve(engine, planned)
        return outputs, slots, (states, engine.free_states()), len(retracted)


class GreedyChecks:
    """Test methods for a HybridCase."""

    least_accepted = 30

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = run_engine(cls.plain, greedy).outputs

    def check(self, **arguments):
        found, states, per_node = run_engine(self.tree | arguments, greedy_and_states)
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertEqual(*states, "states leaked")
        self.assertFalse(per_node, "the pool has room for a state per node")
        self.assertGreaterEqual(found.accepted, self.least_accepted)
        self.assertLess(found.steps, len(PROMPTS) * TOKENS)

    def test_plain_decoding_is_transformers(self):
        """The torch kernels of the CPU profile compute these layers."""
        prompt, output = PROMPTS[3], self.expected[3]
        self.assertEqual(first_choices(self.target, prompt, output), output)

    def test_tree(self):
        self.check()

    def test_chunked_and_mixed_prefill(self):
        self.check(chunked_prefill_size=16, enable_mixed_chunk=True)

    def test_without_radix_cache(self):
        self.check(disable_radix_cache=True)


class TestQwen3Next(GreedyChecks, HybridCase):
    write = staticmethod(write_qwen3_next)

    def test_ancestors_of_several_words(self):
        self.check(speculative_num_draft_tokens=130, speculative_eagle_topk=12)

    def test_chain(self):
        self.least_accepted = 5
        self.check(speculative_num_draft_tokens=8, speculative_eagle_topk=1)

    def test_radix_cache(self):
        answer, second, cached, fresh = run_engine(self.tree, answer_twice)
        self.assertGreaterEqual(cached, len(PROMPTS[4]) + 40, "the answer's state was not in the cache")
        plain_answer, *_ = run_engine(self.plain, answer_twice)
        self.assertEqual(answer[:40], plain_answer[:40])
        self.assertEqual(second, fresh)

    def test_context_ends(self):
        plain, tree = run_engine(self.plain, fill_context), run_engine(self.tree, fill_context)
        self.assertEqual(tree, plain)

    def test_aborts_and_retractions(self):
        planned = schedule(5, grammars=False)
        expected, *_ = run_engine(self.plain | dict(max_total_tokens=1200), _Retracting(), planned)
        outputs, slots, states, retracted = run_engine(
            self.tree | dict(max_total_tokens=1200), _Retracting(), planned
        )
        self.assertEqual(outputs, expected)
        self.assertEqual(*slots, "KV slots leaked")
        self.assertEqual(*states, "states leaked")
        self.assertGreater(retracted, 0)


class TestQwen35(GreedyChecks, HybridCase):
    write = staticmethod(write_qwen3_5)


class TestNemotronH(GreedyChecks, HybridCase):
    write = staticmethod(write_nemotron_h)


class TestLfm2(GreedyChecks, HybridCase):
    write = staticmethod(write_lfm2)


class TestTensorParallel(HybridCase):
    """Two ranks over gloo, with half of the heads each. The vocabulary is large enough to be split."""

    write = staticmethod(partial(write_qwen3_next, vocabulary=128))
    vocabulary = 128

    def test_two_ranks(self):
        first, second = run_ranks(self.tree | dict(tp_size=2, speculative_eagle_topk=32), greedy)
        self.assertEqual(first, second)
        self.assertEqual(first.outputs, run_engine(self.plain, greedy).outputs)
        self.assertGreater(first.accepted, 20)


class TestSampling(SamplingCheck, HybridCase):
    write = staticmethod(write_qwen3_next)
    reference_dtype = torch.float32  # transformers has no experts in float64

    def test_temperature_1(self):
        self.check(temperature=1.0)


class TestSamplingMamba2(TestSampling):
    write = staticmethod(write_nemotron_h)


class TestSamplingShortConvolution(TestSampling):
    write = staticmethod(write_lfm2)


if __name__ == "__main__":
    unittest.main()
