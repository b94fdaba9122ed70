"""DDTREE on a CUDA device with targets that have recurrent layers: graphs, overlap scheduling, the radix cache."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices, assert_same_noise
from support.cuda import (
    CUDA,
    PROMPTS,
    TOKENS,
    decoding_noise,
    greedy,
    greedy_without_waiting,
    run_and_judge,
)
from support.engine import Greedy
from support.hybrid_models import (
    write_kimi_linear,
    write_lfm2,
    write_nemotron_h,
    write_qwen3_5,
    write_qwen3_next,
)
from support.jobs import sample
from support.load import retractions, schedule, serve
from support.models import write_models_for
from support.processes import EngineProcess, run_engine
from support.sampling import SamplingCheck

register_cuda_ci(est_time=300, suite="gpu")

LOAD_SECONDS = 20
INTERVAL = 64  # tokens between the states that the radix cache keeps
ARGUMENTS = (
    CUDA
    | dict(
        max_mamba_cache_size=96,  # without a number, upstream gives half of the free memory to states
        mamba_track_interval=INTERVAL,
        linear_attn_prefill_backend="triton",  # FlashInfer's, the default on sm_90, is compiled anew in each engine
    )
)


class _Noise:
    """Runs a job, and returns its result, the noise of decoding, and the free states before and after both."""

    def __init__(self, job):
        self.job = job

    def __call__(self, engine):
        before = engine.free_states()
        result, noise = self.job(engine), decoding_noise(engine)
        return result, noise, (before, engine.free_states())


class _OfTree(_Noise):
    """The same, as run_and_judge() wants it from an engine with trees."""

    def __call__(self, engine):
        result, *others = super().__call__(engine)
        return (*result, *others)


def continue_from_cache(engine):
    """Answer PROMPTS, then ask for each prompt with its answer, whose states are in the radix cache.

    Returns:
        Both answers of each prompt as one, and of each second request: the tokens of the first prompt, its own,
        and how many of them were cached.
    """
    free = engine.free_slots()
    options = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    first = engine.generate(PROMPTS, **options)
    answers = [list(request.output_ids) for request in first]  # a last path may go on after the last token
    prompts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers)]
    second = engine.generate(prompts, **options)
    requests = [*first, *second]
    found = Greedy(
        [[*answer, *list(request.output_ids)[:TOKENS]] for answer, request in zip(answers, second)],
        sum(request.spec_verify_ct for request in requests),
        sum(request.spec_num_correct_drafts for request in requests),
        (free, engine.free_slots()),
    )
    lengths = [(len(a), len(b), request.cached_tokens) for a, b, request in zip(PROMPTS, prompts, second)]
    return found, lengths


# Not CustomTestCase: its module needs packages that a bare CUDA host lacks.
class HybridCase(unittest.TestCase):
    """A target, and engines that serve it with trees. They run at once, and plain decoding judges their answers.

    Attributes:
        write: writes the target.
        arguments: the arguments of all engines, in addition to ARGUMENTS.
        engines: by name: arguments of the engine and its job.
    """

    write: ClassVar[Callable[..., str]]
    arguments: ClassVar[dict[str, Any]] = {}
    engines: ClassVar[dict[str, tuple[dict[str, Any], Callable[..., Any]]]]

    @classmethod
    def setUpClass(cls):
        folder, _, drafter = write_models_for(cls)
        plain = (
            ARGUMENTS | cls.arguments | dict(model_path=cls.write(folder / "hybrid", dtype="bfloat16", d=128))
        )
        tree = plain | dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )
        trees = {
            name: ("plain", tree | arguments, _OfTree(job)) for name, (arguments, job) in cls.engines.items()
        }
        cls.results = run_and_judge(folder, {"plain": plain}, trees, around_judge={"plain": _Noise})

    def result(self, name):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def agree(self, name, least_accepted=30):
        found, *_, noise, states = self.result(name)
        gaps, plain_noise, _ = self.result("plain")
        assert_same_noise(self, name, noise, plain_noise)
        # A token that is chosen instead of the first choice has gained, and the first choice has lost, at most this.
        tie = 2 * max(abs(value) for row in plain_noise for value in row)
        assert_first_choices(self, name, found, gaps, least_accepted=least_accepted, tie=tie)
        self.assertEqual(*states, f"{name}: states leaked")


class StepChecks:
    """Test methods for a HybridCase.

    Attributes:
        largest_difference: the largest difference between a layer's outputs and those of upstream's verify, both in
            bfloat16.
    """

    largest_difference = 0.1
    engines = {
        "tree": ({}, greedy_without_waiting),
        "validate": (dict(speculative_ddtree_verify="validate"), greedy),
    }

    def test_tree(self):
        self.agree("tree")
        self.assertEqual(self.result("tree")[2], [], "waits between draft and commit")

    def test_validate(self):
        """Upstream's verify, which keeps a state per node, computes the same."""
        self.agree("validate")
        value, layer, _ = self.result("validate")[1]
        print(f"largest difference {value} in layer {layer}")
        self.assertGreater(value, 0.0, "two kernels agree to the last bit; did both run?")
        self.assertLess(value, self.largest_difference)


class TestQwen3Next(StepChecks, HybridCase):
    write = staticmethod(partial(write_qwen3_next, shared_expert=True))


class TestQwen35(StepChecks, HybridCase):
    write = staticmethod(write_qwen3_5)


class TestQwen35Moe(StepChecks, HybridCase):
    write = staticmethod(partial(write_qwen3_5, experts=True))


class TestNemotronH(StepChecks, HybridCase):
    write = staticmethod(write_nemotron_h)
    # Outputs of its Mamba2 layers reach 12, where neighbouring bfloat16 numbers are 0.0625 apart.
    largest_difference = 0.25


class TestKimiLinear(StepChecks, HybridCase):
    write = staticmethod(write_kimi_linear)
    engines = StepChecks.engines | {"no graph": (dict(disable_cuda_graph=True), greedy)}

    def test_no_graph(self):
        self.agree("no graph")


class TestLfm2(StepChecks, HybridCase):
    """In validate mode only its attention is compared: upstream's verify of its convolutions knows no trees."""

    write = staticmethod(write_lfm2)
    arguments = dict(attention_backend="fa3")  # for prefill; upstream asserts that it is not triton


class TestBFloat16States(HybridCase):
    write = staticmethod(write_qwen3_5)  # dense: a flipped choice of experts would make noise of its own
    arguments = dict(mamba_ssm_dtype="bfloat16")
    engines = {"tree": ({}, greedy)}

    def test_tree(self):
        self.agree("tree")


class TestModes(HybridCase):
    write = staticmethod(TestQwen3Next.write)
    engines = {
        "64 nodes": (dict(speculative_num_draft_tokens=64), greedy),
        "no graph": (dict(disable_cuda_graph=True), greedy),
        "mixed": (dict(chunked_prefill_size=64, enable_mixed_chunk=True), greedy),
        "auto": (dict(speculative_ddtree_budget="auto", speculative_num_draft_tokens=None), greedy),
        "fa3": (dict(attention_backend="fa3"), greedy),
    }

    def test_widest_tree(self):
        self.agree("64 nodes")

    def test_no_graph(self):
        self.agree("no graph")

    def test_prefill_on_another_backend(self):
        self.agree("fa3")

    def test_several_widths(self):
        self.agree("auto")

    def test_mixed_prefill(self):
        self.agree("mixed")


class TestRadixCache(HybridCase):
    write = staticmethod(TestQwen3Next.write)
    engines = {
        "no_buffer": (
            dict(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True),
            continue_from_cache,
        ),
        "extra_buffer": (dict(mamba_radix_cache_strategy="extra_buffer"), continue_from_cache),
        "lazy": (dict(mamba_radix_cache_strategy="extra_buffer_lazy"), continue_from_cache),
    }

    def test_whole_answers(self):
        """no_buffer keeps the state at the end of an answer, if the last path ended there.

        Upstream gives up the state of a path that went on: it cannot be turned back to the end of the answer.
        """
        self.agree("no_buffer")
        ended = 0
        for prompt, length, cached in self.result("no_buffer")[1]:
            # The last token's KV is not committed, so one token more is no more KV.
            at_the_end = length - prompt <= TOKENS + 1
            ended += at_the_end
            self.assertEqual(cached, length - 1 if at_the_end else prompt)
        self.assertGreater(ended, 0)

    def test_tracked_states(self):
        """extra_buffer keeps the last state at a multiple of the interval that a path passed."""
        for name, least in (("extra_buffer", 5), ("lazy", 1)):  # lazy gives up some states
            self.agree(name)
            inside = [cached for prompt, _, cached in self.result(name)[1] if cached > prompt]
            self.assertGreaterEqual(len(inside), least)
            self.assertTrue(all(cached % INTERVAL == 0 for cached in inside), inside)


def exact_triples(engine, prompt):
    """Return the probability of each triple of first tokens, [vocabulary] * 3. One prefill gives one token's."""
    tokens = range(engine.scheduler.model_config.vocab_size)

    def after(prefixes):
        prompts = [[*prompt, *prefix] for prefix in prefixes]
        return torch.cat(engine.log_probabilities(prompts, [[0]] * len(prompts))).exp()  # before that token

    first, second = after([[]])[0], after([[a] for a in tokens])
    third = after([[a, b] for a in tokens for b in tokens])
    return ((first[:, None] * second)[..., None] * third.view(*second.shape, -1)).tolist()


class TestSamplingKDA(SamplingCheck, unittest.TestCase):
    """Sampled answers against the distribution of plain prefill. The other kinds of layers do this on the CPU."""

    def test_temperature_1(self):
        folder, _, drafter = write_models_for(type(self))
        plain = ARGUMENTS | dict(model_path=write_kimi_linear(folder / "hybrid", dtype="bfloat16", d=128))
        tree = plain | dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )
        answers = EngineProcess(tree, sample, self.prompt, self.count, dict(temperature=1.0))
        exact = EngineProcess(plain, exact_triples, self.prompt)
        exact = torch.tensor(exact.result(), dtype=torch.float64)
        self.assertLess(self.statistic(answers.result(), exact), 1.0)


class _Load:
    """Serves plans of many kinds of requests, one after the other, for some seconds.

    Returns:
        Plans, retractions, and for each plan the free KV slots and the free states before and after.
    """

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, engine):
        retracted, found = retractions(engine), []
        began = time.monotonic()
        while not found or time.monotonic() - began < self.seconds:
            states = engine.free_states()
            _, slots = serve(engine, schedule(len(found), grammars=False))
            found.append((slots, (states, engine.free_states())))
            print(
                f"plan {len(found)}: KV slots {slots}, states {found[-1][1]}, retracted {len(retracted)}",
                flush=True,
            )
        return len(retracted), found


class TestLoad(unittest.TestCase):
    """Requests that arrive over time, end early, are aborted and, as the KV pool is small, retracted."""

    def test_no_slot_and_no_state_leaks(self):
        folder, _, drafter = write_models_for(type(self))
        arguments = ARGUMENTS | dict(
            model_path=write_qwen3_next(folder / "hybrid", dtype="bfloat16", d=128, shared_expert=True),
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
            max_total_tokens=1000,  # with 1600 a slow host may get no retraction within LOAD_SECONDS
            chunked_prefill_size=128,
        )
        retracted, found = run_engine(arguments, _Load(LOAD_SECONDS))
        print(f"{len(found)} plans, {retracted} retractions")
        for slots, states in found:
            self.assertEqual(*slots, "KV slots leaked")
            self.assertEqual(*states, "states leaked")
        self.assertGreater(retracted, 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
