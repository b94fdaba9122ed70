"""DDTREE on a CUDA device with targets that have recurrent layers: graphs, overlap scheduling, the radix cache."""

import unittest

from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import TIE, assert_first_choices
from support.cuda import CUDA, PROMPTS, TOKENS, greedy, greedy_without_waiting, run_and_judge
from support.engine import Greedy
from support.hybrid_models import write_kimi_linear, write_nemotron_h, write_qwen3_5, write_qwen3_next
from support.models import write_models_for

register_cuda_ci(est_time=180, suite="gpu")

INTERVAL = 64  # tokens between the states that the radix cache keeps


class _States:
    """Runs a job, and adds the free states before and after to its result."""

    def __init__(self, job):
        self.job = job

    def __call__(self, engine):
        before = engine.free_states()
        result = self.job(engine)
        return (*result, (before, engine.free_states()))


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
class TestDDTreeHybridCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, _, drafter = write_models_for(cls)
        bf16 = dict(dtype="bfloat16", d=128)
        targets = {
            "next": write_qwen3_next(folder / "next", **bf16, shared_expert=True),
            "qwen3.5": write_qwen3_5(folder / "qwen3.5", **bf16),
            "qwen3.5 moe": write_qwen3_5(folder / "qwen3.5-moe", **bf16, experts=True),
            "nemotron": write_nemotron_h(folder / "nemotron", **bf16),
            "kimi": write_kimi_linear(folder / "kimi", **bf16),
        }
        # Without a number, upstream gives half of the free memory to states.
        common = CUDA | dict(max_mamba_cache_size=96, mamba_track_interval=INTERVAL)
        plains = {f"{name} plain": common | dict(model_path=target) for name, target in targets.items()}
        plains["bf16 plain"] = plains["next plain"] | dict(mamba_ssm_dtype="bfloat16")
        tree = dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )
        trees = {
            name: (f"{name} plain", plains[f"{name} plain"] | tree, _States(greedy_without_waiting))
            for name in targets
        }
        no_buffer = dict(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)
        for name, target, arguments, job in (
            ("next, 64 nodes", "next", dict(speculative_num_draft_tokens=64), greedy),
            ("next, no graph", "next", dict(disable_cuda_graph=True), greedy),
            ("next, mixed", "next", dict(chunked_prefill_size=64, enable_mixed_chunk=True), greedy),
            ("next, bfloat16 states", "bf16", {}, greedy),
            ("next, no_buffer", "next", no_buffer, continue_from_cache),
            (
                "next, extra_buffer",
                "next",
                dict(mamba_radix_cache_strategy="extra_buffer"),
                continue_from_cache,
            ),
            ("next, lazy", "next", dict(mamba_radix_cache_strategy="extra_buffer_lazy"), continue_from_cache),
            ("kimi, no graph", "kimi", dict(disable_cuda_graph=True), greedy),
        ):
            plain = f"{target} plain"
            trees[name] = plain, plains[plain] | tree | arguments, _States(job)
        cls.judges = {name: plain for name, (plain, _, _) in trees.items()}
        cls.results = run_and_judge(folder, plains, trees)

    def result(self, name):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def agree(self, name, least_accepted=30, tie=TIE):
        result = self.result(name)
        assert_first_choices(
            self, name, result[0], self.result(self.judges[name]), least_accepted=least_accepted, tie=tie
        )
        self.assertEqual(*result[-1], f"{name}: states leaked")

    def check_without_waiting(self, name):
        self.agree(name)
        self.assertEqual(self.result(name)[2], [], f"{name}: waits between draft and commit")

    def test_qwen3_next(self):
        self.check_without_waiting("next")

    def test_qwen3_5(self):
        self.check_without_waiting("qwen3.5")

    def test_qwen3_5_moe(self):
        self.check_without_waiting("qwen3.5 moe")

    def test_nemotron_h(self):
        self.check_without_waiting("nemotron")

    def test_kimi_linear(self):
        self.check_without_waiting("kimi")

    def test_widest_tree(self):
        self.agree("next, 64 nodes")

    def test_no_graph(self):
        self.agree("next, no graph")
        self.agree("kimi, no graph")

    def test_mixed_prefill(self):
        self.agree("next, mixed")

    def test_bfloat16_states(self):
        self.agree("next, bfloat16 states")

    def test_radix_cache_of_whole_answers(self):
        """no_buffer keeps the state at the end of an answer."""
        self.agree("next, no_buffer")
        for _, length, cached in self.result("next, no_buffer")[1]:
            self.assertEqual(cached, length - 1)

    def test_radix_cache_of_tracked_states(self):
        """extra_buffer keeps the last state at a multiple of the interval that a path passed."""
        for name, least in (("next, extra_buffer", 5), ("next, lazy", 1)):  # lazy gives up some states
            self.agree(name)
            inside = [cached for prompt, _, cached in self.result(name)[1] if cached > prompt]
            self.assertGreaterEqual(len(inside), least)
            self.assertTrue(all(cached % INTERVAL == 0 for cached in inside), inside)


if __name__ == "__main__":
    unittest.main(verbosity=2)
