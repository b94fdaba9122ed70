"""The tree's real graph backends around a plain function, without a model or a server."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend, full_cuda_graph_backend
from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool

OFF = {"debug_graph_races": None, "debug_graph_diff": None, "debug_graph_canary": None}


class Runner:
    """What the backends ask of their runner."""

    device_module = torch.cuda
    raw_num_tokens = 0

    def __init__(self, model=None):
        self.model_runner = SimpleNamespace(model=model, server_args=None)

    def cuda_graph_output_rows(self, output):
        return None

    def cuda_graph_output_capacity_rows(self, output):
        return None


@contextlib.contextmanager
def backend(kind, guard=True, model=None, stream=None, **flags):
    """A FullCudaGraphBackend or BreakableCudaGraphBackend with a pool of its own; yields ``capture(size, forward)``.

    ``capture`` warms up and captures as the runners do and returns ``replay()``. The backend is ``capture.backend``.
    """
    module = {"full": full_cuda_graph_backend, "breakable": breakable_cuda_graph_backend}[kind]
    parallel = SimpleNamespace(tp_group=SimpleNamespace(barrier=lambda: None))
    exec_flags = SimpleNamespace(graph=SimpleNamespace(**{**OFF, **flags}))
    set_global_graph_memory_pool(None)
    with (
        mock.patch.object(module, "get_parallel", lambda: parallel),
        mock.patch("sglang.srt.runtime_context.get_exec", lambda: exec_flags),
        mock.patch.dict("os.environ", SGLANG_GRAPH_GUARD=str(int(guard))),
    ):
        cls = module.FullCudaGraphBackend if kind == "full" else module.BreakableCudaGraphBackend
        graphs = cls(Runner(model))
        stream = stream or torch.cuda.Stream()

        def capture(size, forward):
            key = SimpleKey(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), graphs.capture_session(stream):
                graphs.capture_one(key, forward)
            batch = SimpleNamespace(batch_size=size)
            return lambda: graphs.replay(key, batch)

        capture.backend = graphs
        try:
            yield capture
        finally:
            torch.cuda.synchronize()
            graphs.cleanup()
            set_global_graph_memory_pool(None)


class SimpleKey:
    """A ShapeKey of one size."""

    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"size={self.size}"


def pool_bytes(graphs):
    """Bytes that the pool of a backend has reserved."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(graphs._pool))


class Overlap:
    """Layers whose side stream still reads, or whose main stream still reads, memory that was dropped.

    ``pattern`` "a": allocated on the main stream, read on the side, dropped before the join, reused by the main stream.
    "b": allocated on the side, read on main, dropped, reused by the side stream, which didn't wait. "safe": the same
    work as "a", the reference kept to the join. Sleeps on the reader's stream make the reuse visible.
    """

    def __init__(self, pattern, layers=24, rows=128, sleep=300_000):
        torch.manual_seed(0)
        self.pattern = pattern
        self.sleep = sleep
        self.x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        self.w = torch.randn(4096, 1536, device="cuda").to(torch.bfloat16)
        self.expected = self.x @ self.w
        self.outs = [torch.zeros_like(self.expected) for _ in range(layers)]
        self.side = torch.cuda.Stream()
        self.reused = 0
        with torch.cuda.stream(self.side):  # cuBLAS has its workspaces before the first capture
            self.x @ self.w
        torch.cuda.synchronize()

    def __call__(self):
        self.reused = 0
        layer = getattr(self, f"layer_{self.pattern}")
        for out in self.outs:
            layer(out)
        return self.expected

    def layer_a(self, out, keep=False):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        q = self.x @ self.w
        ready = main.record_event()
        with torch.cuda.stream(self.side):
            self.side.wait_event(ready)
            if self.sleep:
                torch.cuda._sleep(self.sleep)
            out.copy_(q)
        dropped, kept = q.data_ptr(), q if keep else None
        del q
        y = torch.zeros_like(out)  # the first allocation after the drop holds other values
        self.reused += y.data_ptr() == dropped
        main.wait_stream(self.side)
        del kept

    def layer_safe(self, out):
        self.layer_a(out, keep=True)

    def layer_b(self, out):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            k = self.x @ self.w
        main.wait_stream(self.side)
        self.side.wait_stream(main)
        if self.sleep:
            torch.cuda._sleep(self.sleep)
        out.copy_(k)
        dropped = k.data_ptr()
        del k
        with torch.cuda.stream(self.side):
            n = torch.zeros_like(out)
        self.reused += n.data_ptr() == dropped
        main.wait_stream(self.side)

    def wrong_layers(self, replay, times=1):
        """Layers whose output was wrong in any of ``times`` replays."""
        wrong = torch.zeros(len(self.outs), dtype=torch.bool, device="cuda")
        for _ in range(times):
            for out in self.outs:
                out.zero_()
            replay()
            wrong |= torch.stack([(out != self.expected).any() for out in self.outs])
        return int(wrong.sum())
