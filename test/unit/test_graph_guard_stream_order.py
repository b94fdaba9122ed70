"""The repairs of upstream's ordering faults, with fake streams on the CPU."""

import sys
import types
import unittest
from unittest import mock

import torch
from sglang.srt.model_executor.graph_guard.stream_order import (
    keep_expert_inputs,
    order_after_break,
    order_after_reads,
    order_dropped_join,
    separate_flashinfer_workspaces,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")


class BreakTest(unittest.TestCase):
    def setUp(self):
        self.log = []
        log = self.log

        class Graph:
            def __init__(self):
                self._break_fns = []

            def replay(self):
                log.append("replay")

        self.graph = Graph()
        self.stream = mock.Mock()
        self.stream.wait_stream = lambda s: self.log.append(f"wait {s}")

    def order(self, side):
        order_after_break(self.graph, side, current_stream=lambda: self.stream)

    def test_the_wait_follows_the_last_break_once(self):
        self.graph._break_fns = [lambda: self.log.append("b0"), lambda: self.log.append("b1") or "out"]
        self.order("side")
        self.order("side")
        self.graph._break_fns[0]()
        self.assertEqual(self.graph._break_fns[1](), "out")
        self.assertEqual(self.log, ["b0", "b1", "wait side"])

    def test_before_the_first_segment_the_replay_waits(self):
        self.order("side")
        self.graph.replay()
        self.assertEqual(self.log, ["wait side", "replay"])

    def test_off_switch(self):
        capture = types.SimpleNamespace(cuda_graph=self.graph)
        with mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD="0"):
            order_dropped_join(capture, "side")
            order_after_reads(self.stream, "main")
        self.assertNotIn("_graph_guard_ordered", vars(self.graph))
        self.assertEqual(self.log, [])
        order_after_reads(self.stream, "main")
        self.assertEqual(self.log, ["wait main"])
        order_dropped_join(None, "side")  # a wait outside any breakable capture


class ExpertInputTest(unittest.TestCase):
    def model(self, alt_stream):
        layer = torch.nn.Module()
        layer.experts = torch.nn.Module()
        layer.experts.moe_runner_config = types.SimpleNamespace(inplace=True)
        layer.alt_stream = alt_stream
        return torch.nn.Sequential(layer, torch.nn.Linear(1, 1))

    def test_only_where_a_second_stream_may_read(self):
        for alt_stream, changed in ((None, 0), ("alt", 1)):
            model = self.model(alt_stream)
            config = model[0].experts.moe_runner_config
            with self.assertRaises(ZeroDivisionError), keep_expert_inputs(model) as layers:
                self.assertEqual(layers, changed)
                self.assertEqual(config.inplace, not changed)
                raise ZeroDivisionError
            self.assertTrue(config.inplace)
        with keep_expert_inputs(None) as layers:
            self.assertEqual(layers, 0)


class FlashInferTest(unittest.TestCase):
    def test_each_stream_has_its_own_scratch(self):
        buffers = {}

        def _get_cache_buf(name, nbytes, device):
            return buffers.setdefault((name, device), torch.empty(nbytes, dtype=torch.uint8))

        utils, gemm = types.ModuleType("flashinfer.utils"), types.ModuleType("flashinfer.gemm")
        utils._get_cache_buf = gemm._get_cache_buf = _get_cache_buf
        modules = {
            "flashinfer": types.ModuleType("flashinfer"),
            "flashinfer.utils": utils,
            "flashinfer.gemm": gemm,
        }
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(torch.cuda, "current_stream") as current,
        ):
            self.assertTrue(separate_flashinfer_workspaces())
            self.assertTrue(separate_flashinfer_workspaces())  # calling it again changes nothing
            current.return_value = types.SimpleNamespace(cuda_stream=1)
            on_main = gemm._get_cache_buf("mm_fp4", 16, "cuda:0")
            self.assertIs(utils._get_cache_buf("mm_fp4", 16, "cuda:0"), on_main)
            current.return_value = types.SimpleNamespace(cuda_stream=2)
            self.assertIsNot(gemm._get_cache_buf("mm_fp4", 16, "cuda:0"), on_main)
        self.assertEqual(len(buffers), 2)

    def test_without_flashinfer(self):
        with mock.patch.dict(sys.modules, {"flashinfer.utils": None}):
            self.assertFalse(separate_flashinfer_workspaces())


if __name__ == "__main__":
    unittest.main()
