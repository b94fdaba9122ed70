"""A pair of servers, of which one prefills and the other decodes with DDTREE, emits what one server emits."""

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci
from support.cases import DDTreeCase
from support.disaggregation import kv_of_prompts, run_pair
from support.hybrid_models import write_qwen3_next
from support.jobs import exhaust_grammar, greedy
from support.models import write_models
from support.penalties import PENALTIES, answer_by_definition, answer_with_penalties
from support.processes import run_engine
from support.prompts import PROMPTS
from support.window_models import WindowedLlama, write_windowed_llama

register_cpu_ci(est_time=130, suite="e2e")

LENGTH = 12


def sample_with_seeds(engine):
    """Answers to PROMPTS, each with a seed, and the log-probabilities of their tokens."""
    requests = [
        engine.submit(
            prompt, max_new_tokens=LENGTH, ignore_eos=True, temperature=1.5, top_p=0.9, sampling_seed=seed,
            return_logprob=True,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    engine.finish(requests)
    return (
        [list(request.output_ids)[:LENGTH] for request in requests],
        [value for request in requests for value in request.logprob.output_token_logprobs_val[:LENGTH]],
    )


class TestGreedy(DDTreeCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = run_engine(cls.plain, greedy).outputs

    def check(self, decode=None, **arguments):
        """The decoding engine answers as plain decoding does, and both engines free what they used."""
        sent, found = run_pair(self.tree | arguments, greedy, decode=decode)
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual([output[:1] for output in sent.outputs], [output[:1] for output in self.expected])
        self.assertEqual(*found.free_slots, "KV slots of the decoding engine leaked")
        self.assertEqual(*sent.free_slots, "KV slots of the prefilling engine leaked")
        return found

    def test_it_drafts_as_one_server_does(self):
        arguments = dict(speculative_num_draft_tokens=32)
        found, alone = self.check(**arguments), run_engine(self.tree | arguments, greedy)
        self.assertEqual((found.steps, found.accepted), (alone.steps, alone.accepted))

    def test_chunks_pages_and_a_budget(self):
        arguments = dict(page_size=16, chunked_prefill_size=32, speculative_ddtree_budget="auto")
        self.check(**arguments)
        self.check(decode={"overlap": True}, **arguments)

    def test_kv(self):
        """The KV of target and drafter arrives as it was computed."""
        sent, received = run_pair(self.tree, kv_of_prompts)
        self.assertEqual(received, sent)
        self.assertEqual(len({kv for pair in sent for kv in pair}), 2 * len(PROMPTS))

    def test_a_pool_for_windows(self):
        """The prefilling engine sends only the window of these layers. Slots outside of it hold NaN."""
        with tempfile.TemporaryDirectory() as folder:
            windowed = dict(model_path=write_windowed_llama(self.target, Path(folder, "windowed")))
            plain = self.plain | windowed | dict(disable_hybrid_swa_memory=True)
            expected, _ = run_engine(plain, WindowedLlama(greedy))
            _, (found, freed) = run_pair(self.tree | windowed, WindowedLlama(greedy))
        self.assertEqual(found.outputs, expected.outputs)
        self.assertGreater(freed, 0)

    def test_recurrent_layers(self):
        """The states arrive as well."""
        recurrent = dict(disable_overlap_schedule=True, mem_fraction_static=0.5, max_mamba_cache_size=64)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, SGLANG_MAMBA_CONV_DTYPE="float32"),  # upstream's default is bfloat16
        ):
            recurrent["model_path"] = write_qwen3_next(Path(folder, "hybrid"))
            expected = run_engine(self.plain | recurrent, greedy).outputs
            _, found = run_pair(self.tree | recurrent, greedy)
        self.assertEqual(found.outputs, expected)
        self.assertGreater(found.accepted, 20)

    def test_two_ranks_on_each_side(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        # Upstream splits a vocabulary at multiples of 64, and each of two ranks must have tokens to draft from.
        target, drafter = write_models(Path(folder.name), vocabulary=128)
        tree = self.tree | dict(model_path=target, speculative_draft_model_path=drafter, tp_size=2)
        _, (first, second) = run_pair(tree | dict(speculative_eagle_topk=32), greedy)
        self.assertEqual(first, second)
        self.assertEqual(first.outputs, run_engine(dict(model_path=target), greedy).outputs)
        self.assertGreater(first.accepted, 20)


class TestState(DDTreeCase):
    """What a prefill on the same server would have set."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tree |= {"skip_tokenizer_init": False, "speculative_num_draft_tokens": 32}
        cls.by_definition = [answer_by_definition(cls.target, *case) for case in zip(PROMPTS, PENALTIES)]

    def test_penalties(self):
        _, (outputs, accepted, _) = run_pair(self.tree, answer_with_penalties)
        self.assertEqual(outputs, self.by_definition)
        self.assertGreater(accepted, 30)

    def test_penalties_after_a_retraction(self):
        """With overlap scheduling, a step may be on its way when its request is retracted."""
        # Upstream admits no request before the pool has room for these reserved tokens.
        small = dict(max_total_tokens=480, num_reserved_decode_tokens=8)
        _, (outputs, _, retracted) = run_pair(
            self.tree | {"speculative_num_draft_tokens": 16, "overlap": True},
            answer_with_penalties,
            decode=small,
        )
        self.assertEqual(outputs, self.by_definition)
        self.assertGreater(retracted, 0)

    def test_grammar(self):
        _, (greedy_one, sampled, free) = run_pair(self.tree, exhaust_grammar)
        self.assertEqual([greedy_one, sampled[1], free[1]], [("ab0", "abort"), "abort", "length"])
        self.assertRegex(sampled[0], "^ab[01]$")

    def test_seeds_and_log_probabilities(self):
        (_, (outputs, values)) = run_pair(self.tree, sample_with_seeds)
        alone, expected = run_engine(self.tree, sample_with_seeds)
        self.assertEqual(outputs, alone)
        for value, one in zip(values, expected, strict=True):
            self.assertAlmostEqual(value, one, places=4)


if __name__ == "__main__":
    unittest.main()
