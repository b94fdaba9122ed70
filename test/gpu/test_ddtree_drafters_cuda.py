"""DDTREE on a CUDA device with options of a drafter that upstream's DFLASH takes, against plain decoding."""

import unittest

from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.cuda import CUDA, greedy, greedy_without_waiting, run_and_judge
from support.drafters import variants, write_variant
from support.models import write_models_for

register_cuda_ci(est_time=90, suite="gpu")

WINDOW = dict(speculative_draft_window_size=6)


# Not CustomTestCase: its module needs packages that a bare CUDA host lacks.
class TestDraftersCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )
        trees = {
            "none": ("plain", tree, greedy),
            "draft window": ("plain", tree | WINDOW, greedy_without_waiting),
            "draft window, no graph": ("plain", tree | WINDOW | dict(disable_cuda_graph=True), greedy),
        }
        for name, changes in variants(drafter).items():
            variant = dict(speculative_draft_model_path=write_variant(drafter, folder / name, **changes))
            trees[name] = ("plain", tree | variant, greedy)
        cls.names = list(trees)
        cls.results = run_and_judge(folder, {"plain": plain}, trees)

    def result(self, name):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def test_answers(self):
        for name in self.names:
            with self.subTest(name):
                assert_first_choices(self, name, self.result(name)[0], self.result("plain"), 10)

    def test_a_draft_window_changes_what_is_drafted(self):
        steps = {
            name: self.result(name)[0].steps for name in self.names if "window, no" in name or name == "none"
        }
        self.assertEqual(len(set(steps.values())), len(steps), steps)

    def test_a_draft_window_never_waits(self):
        self.assertEqual(self.result("draft window")[2], [])


if __name__ == "__main__":
    unittest.main()
