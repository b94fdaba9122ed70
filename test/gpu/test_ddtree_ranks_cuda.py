"""DDTREE on two CUDA devices, with tensor parallelism over NCCL, against plain decoding on one device."""

import os
import unittest
from unittest import mock

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import assert_first_choices
from support.budget import AutoGreedy
from support.cuda import CUDA, greedy, greedy_without_waiting, run_and_judge
from support.head_models import write_head
from support.models import write_mla_target, write_models_for

register_cuda_ci(est_time=90, suite="gpu")

# Each rank holds 64 tokens. Upstream splits at multiples of 64, so with 16 tokens rank 1 would have none to draft from.
VOCABULARY = 128


@unittest.skipIf(torch.cuda.device_count() < 2, "needs two CUDA devices")
class TestRanksCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls, vocabulary=VOCABULARY)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=96,
            speculative_eagle_topk=32,
            tp_size=2,
            disable_custom_all_reduce=True,
            enforce_disable_flashinfer_allreduce_fusion=True,
        )
        auto = tree | dict(speculative_ddtree_budget="auto", speculative_num_draft_tokens=64)
        mla_target = write_mla_target(folder, vocabulary=VOCABULARY)
        selector = dict(speculative_draft_model_path=write_head(drafter, folder / "selector", "selector"))
        cls.trees = {
            "graphs": ("plain", tree, greedy_without_waiting),
            "no graph": ("plain", tree | dict(disable_cuda_graph=True), greedy),
            "no overlap": ("plain", tree | dict(disable_overlap_schedule=True), greedy),
            "prefill on fa3, page 16": ("plain", tree | dict(attention_backend="fa3", page_size=16), greedy),
            "selector head": ("plain", tree | selector, greedy),
            "mla": ("mla plain", tree | dict(model_path=mla_target), greedy),
            "auto, widths in turn": ("plain", auto, AutoGreedy(greedy_without_waiting)),
            "auto, its own choices": ("plain", auto, AutoGreedy(greedy, cycle=False)),
        }
        plains = {"plain": plain, "mla plain": plain | dict(model_path=mla_target)}
        # Several engines start at once, so a rank may find less free memory on its device than the other on its own.
        with mock.patch.dict(os.environ, SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="0"):
            cls.results = run_and_judge(folder, plains, cls.trees, at_once=4)

    def result(self, name):
        """What an engine's processes returned."""
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def test_answers(self):
        """Both ranks emit the same tokens, and these are plain decoding's first choices."""
        for name, (judge, _, _) in self.trees.items():
            with self.subTest(name):
                first, second = self.result(name)
                self.assertEqual(first[0], second[0])
                gaps = self.result(judge)
                # The budget of a drafter this bad mostly chooses steps without a tree.
                least_accepted = 1 if name == "auto, its own choices" else 10
                assert_first_choices(self, name, first[0], gaps, least_accepted)

    def test_no_rank_waits_between_draft_and_commit(self):
        for waits in (
            result[2] for name in ("graphs", "auto, widths in turn") for result in self.result(name)
        ):
            self.assertEqual(waits, [])

    def test_both_ranks_choose_the_same_widths(self):
        for name in ("auto, widths in turn", "auto, its own choices"):
            first, second = self.result(name)
            self.assertEqual(first[-1], second[-1], name)
            self.assertGreater(len(set(first[-1])), 1, name)


if __name__ == "__main__":
    unittest.main()
