"""DDTREE with the budget auto on a CUDA device: graphs of several widths, which change from step to step."""

import unittest

from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.budget import AutoGreedy
from support.cuda import CUDA, greedy, greedy_without_waiting, run_and_judge
from support.head_models import write_head
from support.models import write_mla_target, write_models_for

register_cuda_ci(est_time=120, suite="gpu")


class TestBudgetCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        auto = plain | dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_ddtree_budget="auto",
            cuda_graph_bs_decode=[1, 4, 8],  # eight widths of every batch size take long to capture
        )
        mla = dict(model_path=write_mla_target(folder))
        selector = dict(speculative_draft_model_path=write_head(drafter, folder / "selector", "selector"))
        wide = dict(speculative_num_draft_tokens=130, speculative_eagle_topk=12, page_size=16)
        trees = {
            "in turn": ("plain", auto, AutoGreedy(greedy_without_waiting)),
            "its own choices": ("plain", auto, AutoGreedy(greedy_without_waiting, cycle=False)),
            "several words, page 16": ("plain", auto | wide, AutoGreedy(greedy)),
            "no overlap": ("plain", auto | dict(disable_overlap_schedule=True), AutoGreedy(greedy)),
            "no graph": ("plain", auto | dict(disable_cuda_graph=True), AutoGreedy(greedy)),
            "keep": ("plain", auto | dict(speculative_ddtree_top1_path="keep"), AutoGreedy(greedy)),
            "fa3 prefill": ("plain", auto | dict(prefill_attention_backend="fa3"), AutoGreedy(greedy)),
            "selector head": ("plain", auto | selector, AutoGreedy(greedy)),
            "mla": ("mla plain", auto | mla, AutoGreedy(greedy)),
        }
        cls.results = run_and_judge(folder, {"plain": plain, "mla plain": plain | mla}, trees)

    def agree(self, name, least_accepted, plain="plain"):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        assert_first_choices(self, name, result[0], self.results[plain], least_accepted)
        return result

    def test_every_width_in_turn(self):
        *_, waits, widths = self.agree("in turn", 30)
        self.assertEqual(set(widths), {1, 4, 8, 16, 24, 32, 48, 64})
        self.assertEqual(waits, [])

    def test_its_own_choices(self):
        *_, waits, widths = self.agree("its own choices", 5)
        self.assertLessEqual(set(widths), {1, 4, 8, 16, 24, 32, 48, 64})
        self.assertGreater(len(set(widths)), 1)
        self.assertEqual(waits, [])

    def test_ancestors_of_several_words(self):
        self.assertIn(130, self.agree("several words, page 16", 30)[-1])

    def test_without_overlap(self):
        self.agree("no overlap", 30)

    def test_without_graphs(self):
        self.agree("no graph", 30)

    def test_keep_top1_path(self):
        self.agree("keep", 20)

    def test_prefill_on_fa3(self):
        self.agree("fa3 prefill", 30)

    def test_a_head_that_scores_pairs(self):
        self.agree("selector head", 0)

    def test_mla(self):
        self.agree("mla", 0, plain="mla plain")


if __name__ == "__main__":
    unittest.main()
