"""DDTREE with `--speculative-ddtree-budget auto`: answers stay exact while the widths of the trees change."""

import itertools
import tempfile
import unittest
from pathlib import Path

from sglang.srt.speculative.ddtree.draw import draw, find_tree
from sglang.srt.speculative.ddtree.trace import read_trace, replay
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.budget import Auto
from support.cases import DDTreeCase
from support.jobs import answer_twice, greedy, sample
from support.models import write_models
from support.penalties import PENALTIES, answer_by_definition, answer_with_penalties
from support.processes import run_engine, run_ranks
from support.prompts import PROMPTS
from support.sampling import SamplingCheck

register_cpu_ci(est_time=150, suite="e2e")


class BudgetCase(DDTreeCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tree = cls.tree | {"speculative_ddtree_budget": "auto"}

    def changes(self, widths):
        return sum(a != b for a, b in zip(widths, widths[1:]))


class TestGreedy(BudgetCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = run_engine(cls.plain, greedy).outputs

    def check(self, cycle, **arguments):
        found, widths = run_engine(self.tree | arguments, Auto(greedy, cycle))
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        return found, widths

    def test_every_width_in_turn(self):
        found, widths = self.check(cycle=True)
        self.assertEqual(set(widths), {1, 4, 8, 16, 24, 32, 48, 64})
        self.assertEqual(self.changes(widths), len(widths) - 1)
        self.assertGreater(found.accepted, 20)

    def test_in_pages(self):
        self.check(cycle=True, page_size=16, speculative_num_draft_tokens=20)

    def test_a_tree_of_several_words(self):
        _, widths = self.check(cycle=True, speculative_num_draft_tokens=130, speculative_eagle_topk=12)
        self.assertIn(130, widths)

    def test_keep_top1_path(self):
        self.check(cycle=True, speculative_ddtree_top1_path="keep")

    def test_its_own_choices(self):
        """It tries other widths than its choice, and none that it has no graph for."""
        _, widths = self.check(cycle=False)
        self.assertGreater(self.changes(widths), 2)
        self.assertLessEqual(set(widths), {1, 4, 8, 16, 24, 32, 48, 64})

    def test_penalties(self):
        arguments = self.tree | {"skip_tokenizer_init": False}
        found, _ = run_engine(arguments, Auto(answer_with_penalties))
        expected = [answer_by_definition(self.target, *case) for case in zip(PROMPTS, PENALTIES)]
        self.assertEqual(found[0], expected)

    def test_radix_cache(self):
        """The cache holds the KV of steps of every width, also the drafter's."""
        (answer, second, cached), _ = run_engine(self.tree, Auto(answer_twice))
        self.assertGreater(cached, len(PROMPTS[4]) + 10, "the answer's KV was not in the cache")
        self.assertEqual(run_engine(self.plain, answer_twice)[0], answer)
        self.assertEqual(second[:10], answer[30:])


class TestTrace(BudgetCase):
    def test_a_replay_makes_the_same_choices(self):
        """The trace also holds every tree, and what each step emitted adds up to the answers."""
        trace = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace.jsonl")
        found, widths = run_engine(
            self.tree | {"speculative_ddtree_trace": str(trace)}, Auto(greedy, cycle=False)
        )
        recorded, chosen = replay(read_trace(trace))
        self.assertEqual(recorded, chosen)
        self.assertEqual(recorded, widths)
        steps = [line for line in read_trace(trace) if "step" in line]
        self.assertEqual([line["width"] for line in steps], widths[: len(steps)])
        self.assertGreaterEqual(len(steps), len(widths) - 2)
        emitted = {}
        for line in steps:
            for request in line["requests"]:
                self.assertLessEqual(len(request["tokens"]), line["width"])
                self.assertEqual(
                    request["emitted"][:-1], [request["tokens"][node] for node in request["path"][1:]]
                )
                emitted.setdefault(request["id"], []).extend(request["emitted"])
        answers = {f"r{i + 1}": output for i, output in enumerate(found.outputs)}
        for name, output in answers.items():
            tokens = emitted[name]
            self.assertEqual(tokens[:20], output[1:21], "the first token is prefill's")
        step, entry = find_tree(trace, None, None)
        self.assertIn(
            f"{len(entry['tokens'])} nodes", draw(entry, f"step {step}: {len(entry['tokens'])} nodes")
        )

    def test_a_trace_of_one_width(self):
        trace = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace.jsonl")
        fixed = {"speculative_ddtree_budget": "16", "speculative_ddtree_trace": str(trace)}
        run_engine(self.tree | fixed, greedy)
        lines = list(read_trace(trace))
        self.assertEqual({line["width"] for line in lines[1:]}, {16})
        self.assertTrue(any(len(request["path"]) > 1 for line in lines[1:] for request in line["requests"]))


class TestSampling(SamplingCheck, BudgetCase):
    def test_every_width_in_turn(self):
        options = dict(temperature=1.0)
        answers, widths = run_engine(self.tree, Auto(sample), self.prompt, self.count, options)
        self.assertEqual(set(widths), {1, 4, 8, 16, 24, 32, 48, 64})
        self.assertLess(self.statistic(answers, self.exact(**options)), 1.0)

    def test_its_own_choices(self):
        options = dict(temperature=1.5, top_p=0.7)
        arguments = self.tree | {"skip_tokenizer_init": False}
        answers, widths = run_engine(arguments, Auto(sample, cycle=False), self.prompt, self.count, options)
        self.assertGreater(len(set(widths)), 1)
        self.assertLess(self.statistic(answers, self.exact(**options)), 1.0)


class TestTensorParallel(CustomTestCase):
    def test_two_ranks_choose_the_same_widths(self):
        """Over gloo. If their choices differed, a rank would wait for a forward that the other does not run."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        target, drafter = write_models(Path(folder), vocabulary=128)
        arguments = dict(
            model_path=target, speculative_algorithm="DDTREE", speculative_draft_model_path=drafter,
            speculative_ddtree_budget="auto", tp_size=2,
        )  # fmt: skip
        first, second = run_ranks(arguments, Auto(greedy, cycle=False))
        self.assertEqual(first, second)
        found, widths = first
        self.assertGreater(len(set(widths)), 1)
        self.assertEqual(found.outputs, run_engine({"model_path": target}, greedy).outputs)


class AfterPlainSteps:
    """A job: greedy answers, the first steps with a width, the others with 32 nodes.

    Returns:
        Accepted tokens of the steps with 32 nodes.
    """

    def __init__(self, width):
        self.width = width

    def __call__(self, engine):
        budget, steps, accepted = engine.scheduler.draft_worker.control.budget, itertools.count(), []
        budget.choose = lambda load: self.width if next(steps) < 20 else 32
        budget.observe = lambda step: accepted.append(step.emitted - 1.0) if step.width == 32 else None
        engine.generate([PROMPTS[2]] * 4, temperature=0, max_new_tokens=80, ignore_eos=True)
        return sum(accepted) / len(accepted)


class TestDrafter(BudgetCase):
    def test_its_kv_follows_without_a_draft(self):
        """After steps without a draft, drafts are as good as after steps with one."""
        with_drafts, without = (run_engine(self.tree, AfterPlainSteps(width)) for width in (16, 1))
        self.assertGreater(with_drafts, 0.3)
        self.assertGreater(without, 0.7 * with_drafts)


if __name__ == "__main__":
    unittest.main()
