"""Upstream's graph backends around a plain function, without a model or a server. Needs CUDA."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend, full_cuda_graph_backend
from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool

OFF = {"debug_graph_races": None, "debug_graph_diff": None, "debug_graph_canary": None}


class Runner:
    """The part of a runner that the backends use."""

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
    """A FullCudaGraphBackend or BreakableCudaGraphBackend with its own memory pool.

    Args:
        kind: "full" or "breakable".
        guard: whether the graph guard is on.
        flags: debug arguments that differ from ``OFF``.
    Yields:
        ``capture(size, forward)``, which warms up and captures ``forward`` like a runner and returns ``replay()``. Its
        attribute ``backend`` is the graph backend.
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
    """Stands for a ShapeKey."""

    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"size={self.size}"


def pool_bytes(graphs):
    """The number of bytes that the memory pool of a backend has reserved."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(graphs._pool))


class Overlap:
    """Layers that drop memory while another stream still reads it.

    Args:
        pattern: "a": the main stream allocates, the side stream reads, the reference is dropped before the join, and
            the main stream allocates again.
            "b": the side stream allocates, the main stream reads, the reference is dropped, and the side stream
            allocates again without waiting.
            "safe": like "a", but the reference is kept until the join.
        sleep: cycles by which the reading stream is delayed, so that reuse becomes visible.
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
        with torch.cuda.stream(self.side):  # makes cuBLAS allocate its workspace before the first capture
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
        y = torch.zeros_like(out)  # takes the dropped block and overwrites it
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
        """The number of layers whose output was wrong in at least one of ``times`` replays."""
        wrong = torch.zeros(len(self.outs), dtype=torch.bool, device="cuda")
        for _ in range(times):
            for out in self.outs:
                out.zero_()
            replay()
            wrong |= torch.stack([(out != self.expected).any() for out in self.outs])
        return int(wrong.sum())
