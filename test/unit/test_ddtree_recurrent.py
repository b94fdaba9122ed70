"""The recurrent side of DDTREE: what it covers, what it keeps, and which states a commit writes."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sgl_kernel.ddtree import Accepted, GatedDelta, pack_ancestors
from sglang.srt.layers.attention.ddtree_linear_backend import (
    WRAPPERS,
    GDNTreeVerify,
    KDATreeVerify,
    with_recurrent_verify,
)
from sglang.srt.layers.attention.ddtree_wrap import narrowed
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ddtree import algorithm, recurrent_state
from sglang.srt.speculative.ddtree.recurrent_state import RecurrentStates, recurrent_gaps, tracked_positions
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")

LAYERS, SLOTS, NODES, WIDTH = 2, 7, 6, 4
H_K, H_V, D = 2, 4, 16
CHANNELS = (2 * H_K + H_V) * D
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def gdn_model(layers=LAYERS, d=D):
    return torch.nn.ModuleList(RadixLinearAttention(i, H_K, H_K, H_V, d, d, d) for i in range(layers))


def runner(model, *, device="cpu", dtype=FP32, conv=FP32, temporal=FP32, layers=LAYERS):
    """A target's runner, whose configuration says that `layers` layers are recurrent."""
    cache = SimpleNamespace(
        temporal=torch.randn(LAYERS, SLOTS, H_V, D, D), conv=[torch.randn(LAYERS, SLOTS, CHANNELS, WIDTH - 1)]
    )
    pool = SimpleNamespace(
        mamba_pool=SimpleNamespace(mamba_cache=cache),
        mamba2_layer_index=lambda layer_id: layer_id,
        get_mamba_indices=lambda rows: (rows + 10).int(),  # the request in row i has state i + 10
        translate_mamba_indices=lambda slots: slots - 10,
    )
    params = SimpleNamespace(layers=list(range(layers)), dtype=SimpleNamespace(conv=conv, temporal=temporal))
    return SimpleNamespace(
        model=model, model_config=SimpleNamespace(mamba2_cache_params=params), device=device, dtype=dtype,
        req_to_token_pool=pool, page_size=1,
    )  # fmt: skip


class ConfiguredCase(CustomTestCase):
    """Configurations say what `kind` says: "gdn", "kda", "mamba2", "other" or None for attention only."""

    kind = "gdn"
    keeps_tracked_states = False  # the radix cache

    def setUp(self):
        for name, kind in (
            ("hybrid_gdn_config", "gdn"),
            ("hybrid_kda_config", "kda"),
            ("mamba2_config", "mamba2"),
        ):
            self.enter(name, lambda config, kind=kind: config if self.kind == kind else None)
        self.enter("mambaish_config", lambda config: config if self.kind else None)
        mamba = SimpleNamespace(enable_mamba_extra_buffer=self.keeps_tracked_states)
        self.enter("get_exec", lambda: SimpleNamespace(mamba=mamba))

    def enter(self, name, function):
        patcher = patch.object(recurrent_state, name, function)
        patcher.start()
        self.addCleanup(patcher.stop)


class TestCoverage(ConfiguredCase):
    def test_attention_only(self):
        self.kind = None
        self.assertEqual(recurrent_gaps(SimpleNamespace(model_config=None), 32), [])
        self.assertIsNone(RecurrentStates.of(SimpleNamespace(model_config=None), 32))

    def test_covered(self):
        for self.kind in ("gdn", "kda", "mamba2"):
            self.assertEqual(recurrent_gaps(runner(gdn_model()), 256), [])

    def test_gaps(self):
        bf16 = dict(device="cuda", dtype=BF16, conv=BF16)
        for target, num_nodes, phrase in (
            (runner(gdn_model(), layers=5), 32, "3 recurrent layers that run their own kernels"),
            (
                runner(gdn_model(), conv=BF16),
                32,
                "windows in torch.bfloat16 and activations in torch.float32",
            ),
            (runner(gdn_model(d=64), device="cuda"), 32, "recurrent layers in torch.float32"),
            (runner(gdn_model(d=64), **bf16, temporal=FP16), 32, "recurrent states in torch.float16"),
            (runner(gdn_model(d=32), **bf16), 32, r"\(d_k, d_v\) = \(32, 32\)"),
            (runner(gdn_model(d=64), **bf16), 65, "trees of 65 nodes, more than 64"),
        ):
            with self.subTest(phrase):
                (gap,) = recurrent_gaps(target, num_nodes)
                self.assertRegex(gap, phrase)
        self.assertEqual(recurrent_gaps(runner(gdn_model(d=64), **bf16), 64), [])

    def test_other_recurrent_layers(self):
        self.kind = "other"
        (gap,) = recurrent_gaps(runner(gdn_model()), 32)
        self.assertRegex(gap, "recurrent layers of SimpleNamespace, which have no tree kernel")

    def test_layers_of_different_shapes(self):
        (gap,) = recurrent_gaps(runner(torch.nn.ModuleList([*gdn_model(1), *gdn_model(1, d=32)])), 32)
        self.assertRegex(gap, "different shapes")

    def test_subclasses_of_a_backend_are_refused(self):
        """A wrapper would lose what they override."""

        class Other(GDNAttnBackend):
            pass

        self.assertIn(GDNAttnBackend, WRAPPERS)
        with self.assertRaisesRegex(
            ValueError, r"^DDTREE: target model: expected recurrent layers .* got Other: "
        ):
            with_recurrent_verify(object.__new__(Other), None, None)

    def test_only_ddtree_keeps_no_state_per_node(self):
        for name, mode, expected in (
            ("DDTREE", "native", True), ("DDTREE", "triton", True), ("DDTREE", "validate", False),
            ("DFLASH", "native", False), (None, "native", False),
        ):  # fmt: skip
            spec = SimpleNamespace(speculative_algorithm=name, speculative_ddtree_verify=mode)
            with patch.object(algorithm, "get_spec", lambda spec=spec: spec):
                self.assertEqual(algorithm.keeps_no_state_per_node(), expected)


class TestNarrowerTrees(CustomTestCase):
    def test_a_copy_for_graphs_of_narrower_trees(self):
        """Its recurrent layers ask its own attention for ancestors, and it has the graph state of the original."""

        class Attention:
            tree_mode = "native"

            def __init__(self, num_nodes):
                self.num_nodes = num_nodes

            def narrowed(self, num_nodes, graph_ancestors):
                return Attention(num_nodes)

        wide = object.__new__(HybridLinearAttnBackend)
        wide.full_attn_backend, wide.linear_attn_backend = Attention(32), object.__new__(GDNTreeVerify)
        wide.linear_attn_backend.init_recurrent_verify(None, wide.full_attn_backend)
        wide.linear_attn_backend.state_indices_list = [torch.zeros(1)]
        narrow = narrowed(wide, 8, None)
        self.assertEqual([wide.full_attn_backend.num_nodes, narrow.full_attn_backend.num_nodes], [32, 8])
        for backend in (wide, narrow):
            self.assertIs(backend.linear_attn_backend.tree_attention, backend.full_attn_backend)
        self.assertEqual(narrow.attn_backend_list, [narrow.full_attn_backend, narrow.linear_attn_backend])
        narrow.linear_attn_backend.init_cuda_graph_state(4, 4 * 8)
        self.assertEqual(len(wide.linear_attn_backend.state_indices_list), 1)


class TestTrackedPositions(CustomTestCase):
    def test_against_a_loop(self):
        interval = 8
        cases = [(prefix, length) for prefix in range(20) for length in range(1, 12)]
        expected = []
        for prefix, length in cases:
            at = [i for i in range(length) if (prefix + i + 1) % interval == 0]
            expected.append(at[-1] if at else -1)
        prefix, lengths = torch.tensor(cases).T
        self.assertEqual(tracked_positions(prefix, lengths.int(), interval).tolist(), expected)


class TestCommit(ConfiguredCase):
    """Two requests in slots 1 and 2. The paths are 0-1-3-5 and 0-2."""

    parents = (-1, 0, 0, 1, 2, 3)
    bs = 2
    keeps_tracked_states = True

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.runner = runner(gdn_model())
        self.states = RecurrentStates(self.runner, num_nodes=NODES, max_bs=3)
        seen = torch.eye(NODES, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        self.states.find_slots(torch.arange(1, self.bs + 1))
        nodes = dict(slots=self.states.slots[: self.bs], ancestors=pack_ancestors(seen).repeat(self.bs, 1))
        for layer in range(LAYERS):
            x = torch.randn(self.bs * NODES, CHANNELS)
            out = self.states.convolve(
                x, layer, weight=torch.randn(CHANNELS, WIDTH), bias=None, activation="silu", **nodes
            )
            q, k, v = out.split([H_K * D, H_K * D, H_V * D], dim=-1)
            rows = torch.randn(2, self.bs * NODES, H_V)
            gate = GatedDelta(a=rows[0], b=rows[1], a_log=torch.zeros(H_V), dt_bias=torch.zeros(H_V))
            q, k = (m.unflatten(-1, (H_K, D)) for m in (q, k))
            self.states.verify(q, k, v.unflatten(-1, (H_V, D)), gate, layer, normalize=True, **nodes)

    def commit(self, lengths, track=(-1, -1), interval=4, prefix=(2, 9)):
        """Commit from the stored states, return the states and windows afterwards, and restore them."""
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        before = cache.temporal.clone(), cache.conv[0].clone()
        accepted = Accepted.allocate(self.bs, 5, torch.device("cpu"))
        accepted.path.copy_(torch.tensor([[0, 1, 3, 5, 0], [0, 2, 0, 0, 0]]))
        accepted.lengths.copy_(torch.tensor(lengths))
        batch = SimpleNamespace(mamba_track_indices=torch.tensor(track) + 10)
        self.states.stage_tracking(batch)
        with patch.object(recurrent_state, "mamba_track_grid", lambda page_size: interval):
            self.states.commit(torch.tensor(prefix), accepted, NODES)
        after = cache.temporal.clone(), cache.conv[0].clone()
        cache.temporal.copy_(before[0])
        cache.conv[0].copy_(before[1])
        return before, after

    def test_only_the_requests_states_change(self):
        before, after = self.commit([4, 2])
        for old, new in zip(before, after):
            changed = (old != new).flatten(2).any(2).any(0)
            self.assertEqual(changed.nonzero().flatten().tolist(), [1, 2])

    def test_a_tracked_state_is_that_of_a_shorter_path(self):
        """Request 0 goes from 2 to 6 tokens and passes 4, its second node. Request 1 goes from 9 to 11."""
        before, after = self.commit([4, 2], track=[5, 6])
        _, shorter = self.commit([2, 2])
        _, untracked = self.commit([4, 2])
        for old, new, short, plain in zip(before, after, shorter, untracked):
            torch.testing.assert_close(new[:, 5], short[:, 1], atol=0, rtol=0)
            torch.testing.assert_close(new[:, 6], old[:, 6], atol=0, rtol=0)
            torch.testing.assert_close(new[:, 1:3], plain[:, 1:3], atol=0, rtol=0)

    def test_no_slot_to_track(self):
        """extra_buffer_lazy: a negative slot takes no state."""
        before, after = self.commit([4, 2], track=[-1, -1])
        for old, new in zip(before, after):
            torch.testing.assert_close(new[:, 3:], old[:, 3:], atol=0, rtol=0)

    def test_padding_has_no_slot(self):
        self.states.find_slots(torch.tensor([3, 0, 0]))
        self.assertEqual(self.states.slots.tolist(), [3, -1, -1])

    def test_memory(self):
        with self.assertLogs(recurrent_state.logger, "INFO") as logs:
            self.states.log_memory()
        self.assertRegex(logs.output[0], "of 3 requests with 6 nodes. A state per node would take")


class TestKDA(ConfiguredCase):
    """A KDA layer as upstream calls it, against the recurrence along each path in float64.

    No CPU runs upstream's KDA kernels, so no engine does this.
    """

    kind = "kda"
    parents = (-1, 0, 0, 1, 2, 3)

    def setUp(self):
        super().setUp()
        torch.manual_seed(1)
        heads = 2
        channels = 3 * heads * D
        self.layer = RadixLinearAttention(
            1, heads, heads, heads, D, D, D, conv_weights=torch.randn(channels, WIDTH),
            A_log=torch.randn(1, 1, heads, 1), dt_bias=torch.randn(heads * D),
        )  # fmt: skip
        other = RadixLinearAttention(0, heads, heads, heads, D, D, D)
        self.runner = runner(torch.nn.ModuleList([other, self.layer]))
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        cache.temporal = torch.randn(LAYERS, SLOTS, heads, D, D)
        cache.conv = [torch.randn(LAYERS, SLOTS, WIDTH - 1, channels)]  # KDA's order
        self.cache = cache
        self.inputs = torch.randn(NODES, channels)
        self.a, self.b = torch.randn(NODES, heads * D), torch.randn(1, NODES, heads)
        self.states = RecurrentStates(self.runner, num_nodes=NODES, max_bs=1)

    def expected(self, node):
        """The output of a node: convolve and recur along its path."""
        path = [node]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        slot, heads = 3, 2
        window = torch.cat([self.cache.conv[0][1, slot], self.inputs[path]]).double()
        state = self.cache.temporal[1, slot].double()
        rate = self.layer.A_log.double().exp().view(heads, 1)
        bias = self.layer.dt_bias.double().view(heads, D)
        for i, at in enumerate(path):
            x = (window[i : i + WIDTH].T * self.layer.conv_weights.double()).sum(1)
            q, k, v = torch.nn.functional.silu(x).view(3, heads, D)
            q, k = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (q, k))
            decay = (-rate * torch.nn.functional.softplus(self.a[at].double().view(heads, D) + bias)).exp()
            state = state * decay[:, None]
            error = v - (state * k[:, None]).sum(-1)
            state = state + (self.b[0, at].double().sigmoid()[:, None] * error)[..., None] * k[:, None]
            out = (state * q[:, None]).sum(-1) * D**-0.5
        return out

    def test_against_the_recurrence(self):
        seen = torch.eye(NODES, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        ancestors = pack_ancestors(seen)
        backend = object.__new__(KDATreeVerify)
        attention = SimpleNamespace(tree_mode="native", ancestors_of=lambda tokens: ancestors)
        backend.init_recurrent_verify(self.states, attention)
        self.states.find_slots(torch.tensor([3]))
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, spec_info=SimpleNamespace(draft_token_num=NODES)
        )
        out = backend.forward_extend(self.layer, batch, self.inputs, self.a, self.b)
        self.assertEqual(out.shape, (1, NODES, 2, D))
        for node in range(NODES):
            torch.testing.assert_close(out[0, node].double(), self.expected(node), atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    unittest.main()
