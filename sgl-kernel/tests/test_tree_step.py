"""The draft-tree ops in sequence as a decode step runs them: eagerly, and as one captured CUDA graph."""

import math
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import assert_equal, candidates_of, log_probs_of, tensors_of
from sgl_kernel.ddtree import Accepted, DraftTrees, KVBuffers, accept_path, build_trees, commit_path

register_cpu_ci(est_time=10, suite="kernel")
register_cuda_ci(est_time=20, suite="gpu")

ON_CUDA = torch.cuda.is_available()
BS, D, K, N, LAYERS, SLOTS, WIDTH = 4, 7, 6, 33, 3, 400, 48
F = D + 1


class Step:
    """The fixed tensors of a step on one device. set() changes the inputs in place."""

    def __init__(self, device: str):
        def new(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.candidates = new(BS, D, K)
        self.logits = new(BS, D, K, dtype=torch.float32)
        self.log_sum = new(BS, D, dtype=torch.float32)
        self.bonus = new(BS)
        self.slots = new(BS, N)
        self.hidden = new(BS * N, 40, dtype=torch.float32)
        self.picks = new(BS, N)  # rank of the candidate that the target chooses at each node
        self.pool = [new(SLOTS, WIDTH, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
        self.trees = DraftTrees.allocate(BS, N, device)
        self.accepted = Accepted.allocate(BS, F, device)
        self.hidden_out = new(BS, F, 40, dtype=torch.float32)
        self.kv = KVBuffers.of(self.pool)

    def set(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        log_sum = torch.randn(BS, D, generator=generator)
        self.candidates.copy_(candidates_of(BS, D, K, generator))
        self.logits.copy_(log_probs_of(BS, D, K, 0.5 * seed, generator) + log_sum[..., None])
        self.log_sum.copy_(log_sum)
        self.bonus.copy_(torch.randint(50_000, (BS,), generator=generator))
        self.logits[2, seed:] = -math.inf  # trees of depth `seed`: another size at each replay
        self.slots.copy_(torch.randperm(SLOTS, generator=generator)[: BS * N].view(BS, N))
        self.hidden.copy_(torch.randn(BS * N, 40, generator=generator))
        self.picks.copy_(torch.randint(0, 2, (BS, N), generator=generator))
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
        )
        # A stand-in for the target: each node emits its pick among the candidates of the next depth.
        depth = trees.depths.long().clamp(max=D - 1)
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
    """The batches below accept paths that leave the top-1 path, so commit has something to move."""
    paths = [expected_step(seed).accepted.path for seed in range(4)]
    assert any((path[:, 1:] > torch.arange(1, F)).any() for path in paths)


@pytest.mark.parametrize("how", ["cpu", *(["cuda", "graph"] if ON_CUDA else [])])
def test_steps(how):
    """Every replay reads the current candidates, slots and tokens, equals the CPU bit for bit, and never waits for the
    device."""
    step = Step("cpu" if how == "cpu" else "cuda")
    step.set(0)
    run = step.run
    if how == "graph":
        run()  # loads the kernels, which a capture cannot do
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
    """Build, accept and commit allocate nothing. Only the stand-in for the target does."""
    step = Step(device)
    step.set(1)
    target = torch.zeros(BS, N, dtype=torch.int64, device=device)

    def ops():
        build_trees(step.candidates, step.logits, step.bonus, step.trees)
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
