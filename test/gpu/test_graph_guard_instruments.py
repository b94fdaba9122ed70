"""The probe and the canary on a device: a broken captured kernel, a broken input, and a stray write to a page."""

import unittest

import torch
from sglang.srt.model_executor.graph_guard.canary import PageCanary, WatchedPool, hash_pages
from sglang.srt.model_executor.graph_guard.differential import CAPTURED_WRONG, INPUT_WRONG
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from sglang.test.ci.ci_register import register_cuda_ci
from support.graph_guard import backend

register_cuda_ci(est_time=25, suite="gpu")


class Layer(torch.nn.Module):
    """A linear layer. If ``broken``, its captured run adds 1 to row 1."""

    def __init__(self, broken=False, side=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda") / 8)
        self.broken = broken
        self.side = side

    def forward(self, x):
        y = x @ self.weight
        if self.broken and torch.cuda.is_current_stream_capturing():
            y[1] += 1
        return y


class Model(torch.nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i == broken) for i in range(3))
        self.side = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        x = self.layers[0](x)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            y = self.layers[1](x)
        main.wait_stream(self.side)
        return self.layers[2](y)


class ProbeTest(unittest.TestCase):
    def run_probe(self, broken, pattern, sizes=(4, 8, 2)):
        torch.manual_seed(0)
        model = Model(broken)
        x = torch.randn(8, 64, device="cuda")
        with torch.no_grad(), backend("full", model=model, debug_graph_diff=pattern) as capture:
            replays = [capture(n, lambda n=n: model(x[:n])) for n in sizes]
            for replay in replays:
                x.normal_()
                replay()
            return capture.backend._graph_diff.findings

    def test_broken_kernel_is_blamed(self):
        found = self.run_probe(1, r"layers\.\d")
        first = [f for f in found if f.site == "layers.1"]
        self.assertEqual(
            [(f.verdict, f.rows, f.step) for f in first], [(CAPTURED_WRONG, (1,), s) for s in (1, 2, 3)]
        )
        self.assertEqual({f.verdict for f in found if f.site == "layers.2"}, {INPUT_WRONG})
        self.assertFalse([f for f in found if f.site == "layers.0"])

    def test_broken_input_is_blamed(self):
        found = self.run_probe(0, r"layers\.2$")
        self.assertEqual({f.verdict for f in found}, {INPUT_WRONG})
        self.assertEqual(len(found), 3)

    def test_a_module_in_an_eager_break_is_skipped(self):
        model = Model(None)
        x = torch.randn(8, 64, device="cuda")
        in_break = eager_on_graph(lambda y: model.layers[1](y))
        with torch.no_grad(), backend("breakable", model=model, debug_graph_diff="layers") as capture:
            replay = capture(8, lambda: model.layers[2](in_break(model.layers[0](x))))
            for _ in range(2):
                x.normal_()
                replay()
            probe = capture.backend._graph_diff
            (sites,) = probe._sites.values()
            self.assertEqual({s.name for s in sites.values() if s.captured}, {"layers.0", "layers.2"})
            self.assertEqual(probe.findings, [])

    def test_a_correct_graph(self):
        self.assertEqual(self.run_probe(None, r"layers|aten::mm"), [])


class CanaryTest(unittest.TestCase):
    def pool(self, words=2113):
        buffers = [
            torch.randint(-(2**31), 2**31 - 1, (40, words), device="cuda").to(torch.int32) for _ in range(3)
        ]
        return WatchedPool("C4 index-K", buffers, 64)

    def test_the_kernel_matches_the_reference(self):
        pool = self.pool()
        (check,) = PageCanary([pool], 1)._checks
        for layer, buffer in enumerate(pool.buffers):
            self.assertTrue(torch.equal(check.hashes[layer], hash_pages(buffer)))

    def test_a_stray_write_is_found(self):
        for every in (1, 4):
            pool = self.pool()
            canary = PageCanary([pool], every)
            stored = torch.tensor([64 * 3 + 5, 64 * 9], device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pool.buffers[0][3, 7] += 1
                pool.buffers[1][9, 0] += 1
            for _ in range(8):
                canary.expect(stored)
                graph.replay()
                canary.check()
            self.assertEqual(canary.poll(wait=True), [])
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                pool.buffers[2][17, 2112] += 1  # the last word of a page that no request stores to
            canary.expect(stored)
            graph.replay()
            for _ in range(every):
                canary.check()
            canary.poll(wait=True)
            (found,) = canary.violations
            self.assertEqual((found.page, found.owner), (17, "C4 index-K layer 2"))
            self.assertTrue(9 <= found.step < 9 + every)


if __name__ == "__main__":
    unittest.main()
