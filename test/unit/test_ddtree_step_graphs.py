"""What draft and verify graphs write into their own inputs, on a CPU: the graphs here run eagerly."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sgl_kernel.ddtree import DraftTrees
from sglang.srt.layers.attention.ddtree_backend import TritonDraftBackend, TritonTreeVerify
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.speculative.ddtree import step_graphs
from sglang.srt.speculative.ddtree.step_graphs import StepGraphs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

MAX_BS, NUM_NODES, BLOCK_SIZE, MASK, WIDTH = 4, 6, 3, 99, 40
NARROW = 4  # nodes of a narrower verify
SLOTS = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "mrope_positions")


class Graphs(DecodeCudaGraphRunner):
    """A graph runner: its buffers, and a replay that runs the hooks and then `forward`."""

    max_bs, capture_bs, seq_len_fill_value = MAX_BS, [1, 2, 4], 1
    attention_graph_variants, require_gathered_buffer = None, False

    def __init__(self, width, hooks, forward, slots=SLOTS):
        self.hooks, self.forward, self.width = hooks, forward, width
        self.buffers = SimpleNamespace(
            seq_lens=torch.ones(MAX_BS, dtype=torch.int64),
            req_pool_indices=torch.zeros(MAX_BS, dtype=torch.int64),
            input_ids=torch.zeros(MAX_BS * width, dtype=torch.int64),
            positions=torch.zeros(MAX_BS * width, dtype=torch.int64),
            out_cache_loc=torch.zeros(MAX_BS * width, dtype=torch.int64),
            mrope_positions=torch.zeros(3, MAX_BS * width, dtype=torch.int64),
        )
        self.buffer_registry = SimpleNamespace(slot_names=lambda: list(slots))
        self.in_graph_metadata_prep_done = object()
        self.backend = self

    def _pad_to_bucket(self, bs, buckets):
        return min(bucket for bucket in buckets if bucket >= bs)

    def _make_graph_key(self, size):
        return size

    def replay_session(self):
        return torch.no_grad()

    def replay(self, bs, _):
        tokens, per_request = bs * self.width, ("seq_lens", "req_pool_indices")
        self.batch = SimpleNamespace(
            batch_size=bs,
            **{n: t[..., : bs if n in per_request else tokens] for n, t in vars(self.buffers).items()},
        )
        for hook in self.hooks:
            hook(None, self.batch)
        return self.forward(bs)


def made(cls, **attributes):
    """An object of this class that has only these attributes."""
    made = cls.__new__(cls)
    made.__dict__ |= attributes
    return made


def image(delta):
    """An input whose images add this much to the positions of the tokens that follow."""
    return SimpleNamespace(mrope_position_delta=torch.tensor([[delta]]))


class TestStepGraphs(CustomTestCase):
    def setUp(self):
        self.table = torch.arange(5 * WIDTH, dtype=torch.int32).view(5, WIDTH)
        self.table[0] = 0  # the padding's row
        self.trees = DraftTrees.allocate(MAX_BS, NUM_NODES, "cpu")
        self.built = torch.randint(100, (MAX_BS, NUM_NODES)), torch.randint(BLOCK_SIZE, (MAX_BS, NUM_NODES))
        runners = [self.runner(BLOCK_SIZE, self.draft), self.runner(NUM_NODES, self.verify)]
        self.draft_runner, self.target_runner = runners
        self.graphs = StepGraphs(
            draft_runner=runners[0], target_runner=runners[1], trees=self.trees, mask_token_id=MASK,
            block_size=BLOCK_SIZE, commit=None, widths=(1, NARROW, NUM_NODES),
        )  # fmt: skip
        self.graphs._verifiers = {
            NUM_NODES: runners[1].decode_cuda_graph_runner,
            **{width: Graphs(width, runners[1].capture_head_hooks, self.verify) for width in (1, NARROW)},
        }

    def runner(self, width, forward, **attributes):
        hooks = []
        return SimpleNamespace(
            capture_head_hooks=hooks, capture_tail_hooks=[], decode_cuda_graph_runner=Graphs(width, hooks, forward),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            model_config=SimpleNamespace(model_is_mrope=False), device_timer=None, canary_manager=None,
            eplb_manager=None, msprobe_debugger=None, shared_read_done_event=None, lora_manager=None,
            attn_backend=made(TritonTreeVerify, tree_mode="native"),
        )  # fmt: skip

    def draft(self, bs):
        self.trees.tokens[:bs], self.trees.depths[:bs] = (built[:bs] for built in self.built)

    def verify(self, bs):
        return LogitsProcessorOutput(next_token_logits=torch.arange(bs * NUM_NODES * 2).view(-1, 2).float())

    def check(self, bonus, prefix_lens, rows, padded_bs, deltas=None, num_nodes=NUM_NODES):
        bs = len(bonus)
        verifier = self.graphs._verifiers[num_nodes]
        step = self.graphs.begin(
            SimpleNamespace(
                spec_info=SimpleNamespace(bonus_tokens=torch.tensor(bonus)),
                seq_lens=torch.tensor(prefix_lens),
                req_pool_indices=torch.tensor(rows),
                multimodal_inputs=None if deltas is None else [d and image(d) for d in deltas],
            ),
            num_nodes,
        )
        step.draft()
        tokens, depths = (built[:bs, :num_nodes] for built in self.built)
        if num_nodes == 1:
            tokens, depths = torch.tensor(bonus)[:, None], torch.zeros(bs, 1, dtype=torch.int64)
            self.assertFalse(hasattr(self.draft_runner.decode_cuda_graph_runner, "batch"), "it drafted")
        else:
            self.check_draft(bonus, prefix_lens, rows, padded_bs)
        self.assertEqual(step.drafted().tokens.tolist(), tokens.tolist())

        output, positions = step.verify()
        self.assertEqual(step.target_out.numel(), bs * num_nodes)
        batch = verifier.batch
        self.assertEqual((len(output.next_token_logits), batch.batch_size), (bs * num_nodes, padded_bs))
        self.assertEqual(positions.tolist(), (depths + torch.tensor(prefix_lens)[:, None]).flatten().tolist())
        self.assertEqual(batch.positions[: bs * num_nodes].tolist(), positions.tolist())
        self.assertEqual(batch.input_ids[: bs * num_nodes].tolist(), tokens.flatten().tolist())
        for r in range(bs):
            slots = batch.out_cache_loc[r * num_nodes : (r + 1) * num_nodes].tolist()
            first = WIDTH * rows[r] + prefix_lens[r]
            self.assertEqual(slots, list(range(first, first + num_nodes)))
            self.assertEqual(self.graphs.slots[r].tolist(), list(range(first, first + NUM_NODES)))
        self.assertEqual(set(batch.out_cache_loc[bs * num_nodes :].tolist()) | {0}, {0})
        if num_nodes < NUM_NODES:
            seen = self.graphs._ancestors[num_nodes][:bs]
            self.assertEqual(seen.tolist(), step.drafted().ancestors.tolist())
        self.assertIs(self.target_runner.shared_read_done_event, verifier.in_graph_metadata_prep_done)

    def check_draft(self, bonus, prefix_lens, rows, padded_bs):
        bs = len(bonus)
        batch = self.draft_runner.decode_cuda_graph_runner.batch
        self.assertEqual(batch.batch_size, padded_bs)
        for r in range(bs):
            block, window = slice(r * BLOCK_SIZE, (r + 1) * BLOCK_SIZE), range(prefix_lens[r], WIDTH)
            self.assertEqual(batch.input_ids[block].tolist(), [bonus[r], *[MASK] * (BLOCK_SIZE - 1)])
            self.assertEqual(batch.positions[block].tolist(), list(window[:BLOCK_SIZE]))
            self.assertEqual(
                batch.out_cache_loc[block].tolist(), [WIDTH * rows[r] + i for i in window[:BLOCK_SIZE]]
            )
        self.assertEqual(set(batch.out_cache_loc[bs * BLOCK_SIZE :].tolist()) | {0}, {0})

    def test_inputs(self):
        self.check([7], [10], [2], padded_bs=1)
        self.check([7, 8, 9], [10, 0, 33], [4, 1, 3], padded_bs=4)
        self.check([5, 6], [1, 2], [1, 2], padded_bs=2)

    def test_a_narrower_verify(self):
        for lens in ([7, 8, 9], [10, 0, 33], [4, 1, 3]), ([5, 6], [1, 2], [1, 2]):
            self.check(*lens, padded_bs=4 if len(lens[0]) == 3 else 2, num_nodes=NARROW)

    def test_a_lone_root(self):
        self.check([7, 8, 9], [10, 0, 33], [4, 1, 3], padded_bs=4, num_nodes=1)
        self.check([5, 6], [1, 2], [1, 2], padded_bs=2, num_nodes=1)

    def test_positions_after_images(self):
        self.target_runner.model_config.model_is_mrope = True
        for deltas in (None, [None, -5, None], [3, None, -5], [None, None, None]):
            self.check([7, 8, 9], [10, 0, 33], [4, 1, 3], padded_bs=4, deltas=deltas)
            batch = self.target_runner.decode_cuda_graph_runner.batch
            added = (batch.mrope_positions - batch.positions).view(3, 4, NUM_NODES)[:, :3]
            expected = torch.tensor([delta or 0 for delta in deltas or [0] * 3])
            self.assertEqual(added.tolist(), expected[None, :, None].expand_as(added).tolist())

    def test_shared_buffers(self):
        """Upstream gives both runners the same buffers of prefix lengths and rows."""
        draft, target = (
            self.draft_runner.decode_cuda_graph_runner,
            self.target_runner.decode_cuda_graph_runner,
        )
        draft.buffers.seq_lens, draft.buffers.req_pool_indices = (
            target.buffers.seq_lens,
            target.buffers.req_pool_indices,
        )
        self.check([7, 8, 9], [10, 0, 33], [4, 1, 3], padded_bs=4)

    def test_a_step_that_upstreams_path_runs(self):
        """The verify graph, with padding, after a drafter without a graph."""
        self.check([7, 8, 9, 6], [10, 0, 33, 4], [4, 1, 3, 2], padded_bs=4)
        slots = torch.arange(2 * NUM_NODES).view(2, NUM_NODES) + 50
        self.graphs.stage(SimpleNamespace(multimodal_inputs=None), torch.tensor([3, 4]), slots)
        graphs = self.target_runner.decode_cuda_graph_runner
        graphs.replay(4, None)
        self.assertEqual(
            graphs.batch.out_cache_loc.tolist(), [*slots.flatten().tolist(), *[0] * (2 * NUM_NODES)]
        )

    def can_run(self, bs=2, **moe):
        fields = dict(expert_distribution_recorder_mode=None, elastic_ep_backend=None) | moe
        moe = SimpleNamespace(moe=SimpleNamespace(**fields))
        with (
            patch.object(step_graphs, "get_exec", lambda: moe),
            patch.object(self.graphs, "_capture_narrower"),
            patch.object(self.graphs.commits, "capture") as capture,
        ):
            self.graphs._verifiers = {}
            self.graphs.capture()
        can_run = self.graphs.can_run(bs)
        self.assertLessEqual(can_run, capture.called)
        return can_run

    def test_it_runs_what_the_graphs_hold(self):
        self.assertTrue(self.can_run(MAX_BS))
        self.assertFalse(self.can_run(MAX_BS + 1))

    def test_it_leaves_other_inputs_to_upstream(self):
        target = self.target_runner
        target.decode_cuda_graph_runner.buffer_registry.slot_names = lambda: [*SLOTS, "num_token_non_padded"]
        self.assertFalse(self.can_run())
        target.decode_cuda_graph_runner.buffer_registry.slot_names = lambda: [*SLOTS]
        self.assertTrue(self.can_run())
        self.draft_runner.model_config.model_is_mrope = True
        self.assertFalse(self.can_run())

    def test_it_leaves_attention_that_the_host_prepares_to_upstream(self):
        native = made(TritonTreeVerify, tree_mode="native")
        for runner in (self.draft_runner, self.target_runner):
            for backend, expected in (
                (native, True),
                (made(TritonTreeVerify, tree_mode="triton"), False),
                (made(TritonTreeVerify, tree_mode="validate"), False),
                (made(TritonDraftBackend), False),
                (made(HybridAttnBackend, decode_backend=native), True),
                (made(HybridAttnBackend, decode_backend=made(TritonTreeVerify, tree_mode="triton")), False),
            ):
                with self.subTest(backend=backend), patch.object(runner, "attn_backend", backend):
                    self.assertEqual(self.can_run(), expected)

    def test_it_leaves_runners_without_graphs_to_upstream(self):
        for runner in (self.draft_runner, self.target_runner):
            for graphs in (None, made(EagerRunner)):
                with self.subTest(graphs=graphs), patch.object(runner, "decode_cuda_graph_runner", graphs):
                    self.assertFalse(self.can_run())

    def test_it_leaves_what_the_host_takes_part_in_to_upstream(self):
        for name in ("lora_manager", "canary_manager", "eplb_manager", "msprobe_debugger", "device_timer"):
            with self.subTest(name), patch.object(self.target_runner, name, object()):
                self.assertFalse(self.can_run())
        self.assertFalse(self.can_run(expert_distribution_recorder_mode="stat"))
        self.assertFalse(self.can_run(elastic_ep_backend="mooncake"))


if __name__ == "__main__":
    unittest.main()
