"""DDTREE on a CUDA device against plain decoding: graphs, overlap scheduling, every verify mode."""

import unittest

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import TIE, assert_first_choices
from support.cuda import CUDA, greedy, greedy_without_waiting, run_and_judge
from support.drafters import write_speculators
from support.head_models import HEADS, write_head
from support.models import (
    VOCABULARY,
    write_fp8_target,
    write_gpt_oss_target,
    write_minimax_m2_target,
    write_mla_target,
    write_models_for,
)
from support.window_models import write_gemma4, write_mimo_v2

register_cuda_ci(est_time=120, suite="gpu")

ERROR = 1.0  # what the wrong kernel adds to its output
LAYERS = 3  # of the target


class _WrongKernel:
    """A job that runs greedy() on an engine whose tree kernel is wrong in the last layer."""

    def __call__(self, engine):
        return greedy(engine)

    def before(self):
        from sglang.srt.layers.attention.ddtree_backend import TreeVerifyMixin

        right = TreeVerifyMixin._tree_attention

        def wrong(backend, q, layer, forward_batch, **options):
            out = right(backend, q, layer, forward_batch, **options)
            is_last = layer.layer_id == LAYERS - 1 and backend.tree_mode == "validate"  # not the drafter's
            return out.add_(ERROR) if is_last else out

        TreeVerifyMixin._tree_attention = wrong


class _UpstreamsPath:
    """A job that runs greedy() on an engine that prepares every forward as upstream does (see step_graphs.py)."""

    def __call__(self, engine):
        return greedy(engine)

    def before(self):
        from sglang.srt.speculative.ddtree.step_graphs import StepGraphs

        StepGraphs.can_run = lambda self, bs: False


class _WithoutExperts:
    """Runs a job on a gpt-oss or MiniMax-M2 whose experts are one function without weights. No test is about experts."""

    def __init__(self, job):
        self.job = job

    def __call__(self, engine):
        return self.job(engine)

    def before(self):
        from sglang.srt.models import gpt_oss, minimax_m2

        class Function(torch.nn.Module):
            def __init__(self, **config):
                super().__init__()

            def forward(self, hidden_states, forward_batch=None):
                return torch.sin(hidden_states)

        gpt_oss.GptOssSparseMoeBlock = minimax_m2.MiniMaxM2MoE = Function


class Results:
    """Methods of a unittest.TestCase.

    Attributes:
        results: what run_and_judge() returned.
    """

    def result(self, name):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def agree(self, name, least_accepted, plain="plain", tie=TIE):
        assert_first_choices(self, name, self.result(name)[0], self.result(plain), least_accepted, tie)


# Not CustomTestCase: its module needs packages that a bare CUDA host lacks.
class TestDDTreeCuda(Results, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(speculative_algorithm="DDTREE", speculative_draft_model_path=drafter)
        nodes_32 = tree | dict(speculative_num_draft_tokens=32)
        validate = nodes_32 | dict(speculative_ddtree_verify="validate")
        nodes_130 = tree | dict(speculative_num_draft_tokens=130, speculative_eagle_topk=12, page_size=16)
        mla = dict(model_path=write_mla_target(folder))
        fp8 = dict(kv_cache_dtype="fp8_e4m3")
        # The layers of an FP8 checkpoint have KV scales. They are 1 unless the checkpoint holds others, and
        # only an fp8 cache uses them.
        unscaled = dict(model_path=write_fp8_target(target, folder / "unscaled"))
        scaled = dict(model_path=write_fp8_target(target, folder / "scaled", k_scale=0.5, v_scale=0.25)) | fp8
        # Name: the plain decoding that judges the answers, the engine's arguments, its job.
        trees = {
            "native": ("plain", nodes_32, greedy_without_waiting),
            "upstream's path": ("plain", nodes_32, _UpstreamsPath()),
            "as wide as the block": ("plain", tree | dict(speculative_num_draft_tokens=8), greedy),
            "validate": ("plain", validate, greedy),
            "wrong": ("plain", validate, _WrongKernel()),
            "triton, page 64": (
                "plain",
                tree
                | dict(speculative_num_draft_tokens=70, page_size=64, speculative_ddtree_verify="triton"),
                greedy,
            ),
            "native, page 16, no overlap": ("plain", nodes_130 | dict(disable_overlap_schedule=True), greedy),
            "chain": ("plain", tree | dict(speculative_eagle_topk=1), greedy),
            "no graph": ("plain", nodes_32 | dict(disable_cuda_graph=True), greedy),
            "mla": ("mla plain", nodes_32 | mla, greedy),
            "fp8": ("fp8 plain", nodes_32 | fp8, greedy),
            "mixed prefill": (
                "plain",
                nodes_32 | dict(chunked_prefill_size=64, enable_mixed_chunk=True),
                greedy,
            ),
            "unscaled": ("plain", nodes_32 | unscaled, greedy),
            "scaled": ("scaled plain", nodes_32 | scaled, greedy),
        }
        for head in HEADS:
            with_head = dict(speculative_draft_model_path=write_head(drafter, folder / head, head))
            trees[head] = ("plain", nodes_32 | with_head, greedy_without_waiting)
            trees[f"{head}, no graph"] = (
                "plain",
                nodes_32 | with_head | dict(disable_cuda_graph=True),
                greedy,
            )
        plains = {
            "plain": plain, "mla plain": plain | mla, "fp8 plain": plain | fp8, "scaled plain": plain | scaled,
        }  # fmt: skip
        cls.results = run_and_judge(folder, plains, trees)

    def test_native_never_waits_between_draft_and_commit(self):
        self.agree("native", 50)
        self.assertEqual(self.result("native")[2], [])

    def test_heads_that_know_the_path(self):
        for head in HEADS:
            with self.subTest(head):
                self.agree(head, 20)
                self.assertEqual(self.result(head)[2], [])

    def test_heads_that_know_the_path_without_graphs(self):
        for head in HEADS:
            with self.subTest(head):
                self.agree(f"{head}, no graph", 20)

    def test_forwards_that_upstream_prepares(self):
        self.agree("upstream's path", 50)

    def test_a_tree_as_wide_as_the_block(self):
        """Upstream then gives drafter and target the same input buffers."""
        self.agree("as wide as the block", 30)

    def test_triton(self):
        self.agree("triton, page 64", 50)

    def test_mla(self):
        self.agree("mla", 30, plain="mla plain")

    def test_fp8_kv(self):
        self.agree("fp8", 30, plain="fp8 plain", tie=None)

    def test_mixed_prefill(self):
        self.agree("mixed prefill", 50)

    def test_fp8_checkpoint(self):
        self.agree("unscaled", 50)

    def test_fp8_checkpoint_with_scales_and_fp8_kv(self):
        self.agree("scaled", 30, plain="scaled plain", tie=None)

    def test_no_overlap(self):
        self.agree("native, page 16, no overlap", 50)

    def test_chain(self):
        self.agree("chain", 5)

    def test_no_graph(self):
        self.agree("no graph", 50)

    def test_validate(self):
        self.agree("validate", 50)
        value, _, _ = self.result("validate")[1]
        self.assertGreater(value, 0.0, "two kernels agree to the last bit; did both run?")
        self.assertLess(value, 0.05)  # the outputs are bfloat16 numbers below 4

    def test_a_wrong_kernel_is_reported_from_replays(self):
        """The error, its layer and its request are found in replays, where none of our Python runs."""
        self.agree("wrong", 50)  # `validate` serves the base backend's result
        value, layer, request = self.result("wrong")[1]
        self.assertAlmostEqual(value, ERROR, delta=0.1)
        self.assertEqual(layer, LAYERS - 1)
        self.assertRegex(request, "^r[0-9]+$")


class TestModelsCuda(Results, unittest.TestCase):
    """A target that offers its hidden states to EAGLE3 only, and drafters in the layout of the Speculators library."""

    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, speculative_num_draft_tokens=32,
        )  # fmt: skip
        minimax = dict(model_path=write_minimax_m2_target(folder))
        tokens = [token for token in range(VOCABULARY) if token not in (5, 11)]
        reduced = write_speculators(drafter, folder / "reduced", tokens=tokens, head=target)
        selector = write_speculators(write_head(drafter, folder / "head", "selector"), folder / "dflash2")
        without_experts = _WithoutExperts(greedy)
        trees = {
            "minimax": ("minimax plain", tree | minimax, without_experts),
            "own head": ("plain", tree | dict(speculative_draft_model_path=reduced), greedy_without_waiting),
            "selector": ("plain", tree | dict(speculative_draft_model_path=selector), greedy_without_waiting),
        }
        plains = {"plain": plain, "minimax plain": plain | minimax}
        cls.results = run_and_judge(folder, plains, trees, around_judge={"minimax plain": _WithoutExperts})

    def test_minimax_m2(self):
        self.agree("minimax", 20, plain="minimax plain")

    def test_an_own_head_over_some_of_the_tokens(self):
        self.agree("own head", 20)
        self.assertEqual(self.result("own head")[2], [])

    def test_a_selector(self):
        self.agree("selector", 20)
        self.assertEqual(self.result("selector")[2], [])


class TestWindowsCuda(Results, unittest.TestCase):
    """Targets whose window layers have a KV pool of their own: gpt-oss with sinks, MiMo-V2 and Gemma 4 with two KV shapes.

    The judge is a prefill: the Triton decode kernel of SGLang 0.5.23 sees one token less of a window.
    """

    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, speculative_num_draft_tokens=32,
        )  # fmt: skip
        sinks = dict(model_path=write_gpt_oss_target(folder), moe_runner_backend="triton")
        shapes = dict(model_path=write_mimo_v2(folder / "mimo"))
        gemma4 = dict(model_path=write_gemma4(folder / "gemma4"))
        one_pool, on_triton = dict(disable_hybrid_swa_memory=True), dict(speculative_ddtree_verify="triton")
        validate = dict(speculative_ddtree_verify="validate")
        without_experts = _WithoutExperts(greedy)
        trees = {
            "sinks": ("sinks plain", tree | sinks, without_experts),
            "sinks, one pool": ("sinks plain", tree | sinks | one_pool, without_experts),
            "sinks, triton": ("sinks plain", tree | sinks | one_pool | on_triton, without_experts),
            "shapes": ("shapes plain", tree | shapes | dict(page_size=16), greedy),
            "shapes, triton": ("shapes plain", tree | shapes | on_triton, greedy),
            "shapes, validate": ("shapes plain", tree | shapes | validate, greedy),
            "gemma4": ("gemma4 plain", tree | gemma4, greedy),
        }
        plains = {
            "sinks plain": plain | sinks,
            "shapes plain": plain | shapes,
            "gemma4 plain": plain | gemma4,
        }
        cls.results = run_and_judge(folder, plains, trees, around_judge={"sinks plain": _WithoutExperts})

    def test_sinks(self):
        self.agree("sinks", 20, plain="sinks plain")

    def test_sinks_in_one_pool(self):
        self.agree("sinks, one pool", 20, plain="sinks plain")

    def test_sinks_on_triton(self):
        self.agree("sinks, triton", 20, plain="sinks plain")

    def test_another_kv_shape(self):
        self.agree("shapes", 30, plain="shapes plain")

    def test_another_kv_shape_on_triton(self):
        self.agree("shapes, triton", 30, plain="shapes plain")

    def test_gemma4(self):
        self.agree("gemma4", 20, plain="gemma4 plain")

    def test_both_kernels_see_the_same_window(self):
        self.agree("shapes, validate", 30, plain="shapes plain")
        value, _, _ = self.result("shapes, validate")[1]
        self.assertGreater(value, 0.0)
        self.assertLess(value, 0.05)


if __name__ == "__main__":
    unittest.main(verbosity=2)
