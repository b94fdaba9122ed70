"""The draft-tree ops one after another as a decode step runs them: eagerly, and as one captured CUDA graph."""

import random
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import assert_equal, candidates_of, log_probs_of, tensors_of
from sgl_kernel.ddtree import Accepted, DraftTrees, KVBuffers, accept_path, build_trees, commit_path

register_cpu_ci(est_time=10, suite="kernel")
register_cuda_ci(est_time=20, suite="gpu")

ON_CUDA = torch.cuda.is_available()
B, L, K, N, LAYERS, SLOTS, WIDTH = 4, 7, 6, 33, 3, 400, 48


class Step:
    """A step's fixed tensors on a device; set() changes the inputs in place."""

    def __init__(self, device: str):
        def new(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.candidates = new(B, L, K)
        self.logits = new(B, L, K, dtype=torch.float32)
        self.log_sum = new(B, L, dtype=torch.float32)
        self.bonus = new(B)
        self.budget = new(B, dtype=torch.int32)
        self.prefix_lens = new(B)
        self.slots = new(B, N)
        self.hidden = new(B * N, 40, dtype=torch.float32)
        self.picks = new(B, N)  # which of the root's candidates, and so on, the target says at each row
        self.pool = [new(SLOTS, WIDTH, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
        self.trees = DraftTrees.allocate(B, N, device, positions=True)
        self.accepted = Accepted.allocate(B, L + 1, device)
        self.hidden_out = new(B, L + 1, 40, dtype=torch.float32)
        self.kv = KVBuffers.of(self.pool)

    def set(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        log_sum = torch.randn(B, L, generator=generator)
        self.candidates.copy_(candidates_of(B, L, K, generator))
        self.logits.copy_(log_probs_of(B, L, K, 0.5 * seed, generator) + log_sum[..., None])
        self.log_sum.copy_(log_sum)
        self.bonus.copy_(torch.randint(50_000, (B,), generator=generator))
        self.budget.copy_(torch.tensor([N - 1, 8, rng.randint(0, N), seed], dtype=torch.int32))
        self.prefix_lens.copy_(torch.randint(9000, (B,), generator=generator))
        self.slots.copy_(torch.randperm(SLOTS, generator=generator)[: B * N].view(B, N))
        self.hidden.copy_(torch.randn(B * N, 40, generator=generator))
        self.picks.copy_(torch.randint(0, 2, (B, N), generator=generator))
        for buffer in self.pool:
            buffer.copy_(torch.randn(SLOTS, WIDTH, generator=generator))

    def run(self) -> None:
        trees = self.trees
        build_trees(
            self.candidates,
            self.logits,
            self.bonus,
            trees,
            log_sum=self.log_sum,
            keep_top1_path=True,
            budget=self.budget,
            prefix_lens=self.prefix_lens,
        )
        # A stand-in for the target: each row says its pick among the candidates of the position after it.
        depth = trees.depths.long().clamp(max=L - 1)
        after = self.candidates.gather(1, depth[..., None].expand(-1, -1, K))
        target = after.gather(2, self.picks[..., None])[..., 0]
        accept_path(trees, target, self.accepted)
        commit_path(
            self.accepted.path, self.accepted.lengths, self.slots, self.kv, self.hidden, self.hidden_out
        )

    def assert_equal(self, want: "Step") -> None:
        assert_equal(self.trees, want.trees)
        assert_equal(self.accepted, want.accepted)
        assert torch.equal(self.hidden_out.cpu(), want.hidden_out)
        for buffer, expected in zip(self.pool, want.pool, strict=True):
            assert torch.equal(buffer.cpu(), expected)


def expected_step(seed: int) -> Step:
    step = Step("cpu")
    step.set(seed)
    step.run()
    return step


def test_a_step_moves_something():
    """The batches below accept paths that leave the spine, so there is something to move."""
    paths = [expected_step(seed).accepted.path for seed in range(4)]
    assert any((path[:, 1:] > torch.arange(1, L + 1)).any() for path in paths)


@pytest.mark.parametrize("how", ["cpu", *(["cuda", "graph"] if ON_CUDA else [])])
def test_steps(how):
    """Every replay reads lengths, budgets, slots and tokens as they are then, and equals the CPU bit for bit;
    nothing waits for the device."""
    step = Step("cpu" if how == "cpu" else "cuda")
    step.set(0)
    run = step.run
    if how == "graph":
        run()  # loads the kernels: loading is no part of a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
        run = graph.replay
    for seed in (0, 1, 2, 3, 1):
        step.set(seed)
        for record in (step.trees, step.accepted):
            for tensor in tensors_of(record).values():
                tensor.fill_(-7777)
        if how != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            if how != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        step.assert_equal(expected_step(seed))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if ON_CUDA else [])])
def test_ops_allocate_nothing(device):
    """Only the stand-in for the target allocates: build, accept and commit alone leave the allocator's count."""
    step = Step(device)
    step.set(1)
    target = torch.zeros(B, N, dtype=torch.int64, device=device)

    def ops():
        build_trees(step.candidates, step.logits, step.bonus, step.trees, prefix_lens=step.prefix_lens)
        accept_path(step.trees, target, step.accepted)
        commit_path(
            step.accepted.path, step.accepted.lengths, step.slots, step.kv, step.hidden, step.hidden_out
        )

    ops()
    with torch.profiler.profile(profile_memory=True) as profile:
        ops()
    assert not [event.key for event in profile.key_averages() if event.self_cpu_memory_usage > 0]
    if device == "cuda":
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        ops()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
