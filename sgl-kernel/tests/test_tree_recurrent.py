"""tree_recurrent_verify and _commit, tree_conv_verify and _commit, against the recurrence in float64."""

import random
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import DEVICES
from sgl_kernel.ddtree import (
    tree_conv_commit,
    tree_conv_verify,
    tree_recurrent_commit,
    tree_recurrent_verify,
)
from tree_recurrent_cases import (
    BF16,
    FP16,
    FP32,
    KINDS,
    UNIT,
    Case,
    ancestor_words,
    apply_step,
    expected,
    parents_of,
    path_to,
    step_epsilon,
)

register_cpu_ci(est_time=60, suite="kernel")
register_cuda_ci(est_time=60, suite="gpu")

on_each_device = pytest.mark.parametrize("device", DEVICES)
on_each_kind = pytest.mark.parametrize("kind", KINDS)
SHAPES = ("chain", "star", "none", "random", "padded", "bush")


def verify(case: Case, layer: int = 0, out=None) -> torch.Tensor:
    return tree_recurrent_verify(
        case.q[layer],
        case.k[layer],
        case.v[layer],
        case.gate(layer),
        case.states[layer],
        case.state_indices,
        case.ancestors,
        case.workspace,
        layer,
        normalize=case.normalize,
        out=out,
    )


def check_verify(case: Case) -> None:
    states = case.states.clone()
    for layer in range(case.layers):
        got = verify(case, layer).double().unflatten(0, (len(case.slots), case.nodes))
        want = expected(case, layer)
        has_slot = case.state_indices >= 0
        assert not got[~has_slot].any()
        error = (got - want.o).abs()
        wrong = ~(error <= want.o_bound) & has_slot[:, None, None, None]
        for request, node, *at in wrong.nonzero()[:1].tolist():
            at = (request, node, *at)
            raise AssertionError(
                f"layer {layer} request {request} node {node}: error {error[at]}, "
                f"{error[at] / want.o_bound[at]} of the bound, in {wrong.sum()} places"
            )
    assert torch.equal(case.states, states), "verify wrote a state"
    kept = case.workspace
    for tensor in (kept.k, kept.u, kept.g):
        assert (tensor[:, len(case.slots) * case.nodes :] == -777).all(), "rows of no request"
        for request, slot in enumerate(case.slots):
            rows = tensor[:, request * case.nodes :][:, : case.nodes]
            assert slot < 0 or (rows != -777).all()
            assert slot >= 0 or (rows == -777).all(), "rows of a request without a slot"


def check_commit(case: Case, seed: int = 0, track: bool = True) -> None:
    """After check_verify(): commits a random path of each request, one of them empty."""
    rng = random.Random(seed)
    before = case.states.clone()
    depth = max(len(path_to(tree, node)) for tree in case.parents for node in range(case.nodes))
    paths, positions = [], []
    for request, tree in enumerate(case.parents):
        path = path_to(tree, rng.randrange(case.nodes)) if request != 1 else []
        paths.append(path)
        positions.append(rng.choice([-1, 0, len(path) - 1, rng.randrange(max(1, len(path))), len(path)]))
    path = torch.tensor([p + [0] * (depth + 1 - len(p)) for p in paths], device=case.device)
    lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32, device=case.device)
    targets = [slot if rng.random() < 0.8 else -1 for slot in case.track_slots]
    options = dict(
        track_indices=torch.tensor(targets, dtype=torch.int32, device=case.device),
        track_positions=torch.tensor(positions, device=case.device),
    )
    wants = [expected(case, layer, before) for layer in range(case.layers)]
    tree_recurrent_commit(
        case.states,
        case.state_indices,
        path,
        lengths,
        case.workspace,
        num_nodes=case.nodes,
        **(options if track else {}),
    )
    for layer in range(case.layers):
        written = {}
        for request, slot in enumerate(case.slots):
            if slot < 0 or not paths[request]:
                continue
            written[slot] = (request, paths[request][-1])
            position = positions[request]
            if track and targets[request] >= 0 and 0 <= position < len(paths[request]):
                written[targets[request]] = (request, paths[request][position])
        for slot in range(case.states.shape[1]):
            if slot not in written:
                assert torch.equal(case.states[layer, slot], before[layer, slot]), f"slot {slot} is no one's"
                continue
            state, bound = wants[layer].states[written[slot]], wants[layer].bounds[written[slot]]
            error = (case.states[layer, slot].double() - state).abs()
            bound = bound[..., None] + UNIT[case.state_dtype] * state.abs()
            assert (error <= bound * 1.01 + 1e-30).all(), (
                f"layer {layer} slot {slot}: error {error.max()}, {(error / bound).max()} of the bound"
            )


@on_each_device
@on_each_kind
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("nodes", [1, 5, 16, 23, 32])
def test_trees(kind, state_dtype, nodes, device):
    case = Case(kind, device, state_dtype=state_dtype, shapes=SHAPES, nodes=nodes, seed=nodes)
    check_verify(case)
    check_commit(case, nodes)


@on_each_device
@on_each_kind
@pytest.mark.parametrize("shape", ["chain", "star", "random", "bush"])
def test_64_nodes(kind, shape, device):
    case = Case(kind, device, shapes=(shape,), nodes=64, h_k=1, h_v=2, d_k=128, d_v=64)
    check_verify(case)
    check_commit(case)


@on_each_device
@on_each_kind
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("nodes, bs, h_v", [(17, 1, 2), (64, 10, 4), (32, 35, 4), (48, 35, 4), (64, 35, 4)])
def test_heads_of_128(kind, state_dtype, nodes, bs, h_v, device):
    """On an H200, 2, 4, 8, 8 and 8 warps of a block have columns of the state: the batch decides."""
    if device == "cpu" and bs > 1:
        pytest.skip("the CPU op does not divide its work by the batch")
    shapes = ("bush", "random", "chain", "padded", "star") * (bs // 5) if bs > 1 else ("bush",)
    case = Case(
        kind, device, state_dtype=state_dtype, shapes=shapes, nodes=nodes, h_k=2, h_v=h_v, d_k=128, d_v=128
    )
    check_verify(case)
    check_commit(case)


@on_each_device
@pytest.mark.parametrize("h_k, h_v", [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("d_k, d_v", [(64, 64), (128, 128), (128, 16), (64, 80)])
def test_heads(h_k, h_v, d_k, d_v, device):
    for kind in ("gated", "space"):
        case = Case(kind, device, shapes=("random", "bush"), nodes=17, h_k=h_k, h_v=h_v, d_k=d_k, d_v=d_v)
        check_verify(case)
        check_commit(case)


@on_each_device
@on_each_kind
def test_slices_and_layers(kind, device):
    """Inputs as slices of wider tensors, three layers, an extra ancestor word, states with v contiguous."""
    case = Case(
        kind, device, shapes=SHAPES, nodes=20, layers=3, words=2, strided=True, transposed=kind == "fixed"
    )
    check_verify(case)
    check_commit(case)


@on_each_kind
@pytest.mark.parametrize("dtype, state_dtype", [(FP32, FP32), (FP16, FP16), (FP16, FP32)])
def test_cpu_dtypes(kind, dtype, state_dtype):
    case = Case(kind, dtype=dtype, state_dtype=state_dtype, shapes=SHAPES, nodes=12, d_k=24, d_v=20)
    check_verify(case)
    check_commit(case)


def test_cpu_many_nodes():
    """More nodes than a word of ancestors has bits."""
    case = Case(shapes=("random", "bush"), nodes=100, h_k=1, h_v=1, d_k=16, d_v=8)
    check_verify(case)
    check_commit(case)


@on_each_device
@pytest.mark.parametrize("kind, bound", [("channel", -5.0), ("gated", None), ("space", None)])
def test_unnormalized_and_bounded(kind, bound, device):
    case = Case(kind, device, shapes=SHAPES, nodes=16, normalize=False, lower_bound=bound)
    check_verify(case)
    check_commit(case)


@on_each_device
@pytest.mark.parametrize("kind", ["gated", "channel", "space"])
@pytest.mark.parametrize("rate", [-8.0, 4.0, 6.0])
def test_decays(kind, rate, device):
    """No decay to speak of; and sums of logs in the thousands, where a difference of two sums must not cancel."""
    case = Case(kind, device, shapes=("chain", "bush"), nodes=32)
    case.decay.fill_(rate)
    case.a[:, ::3] = 3
    case.a[:, 1::3] = -9
    check_verify(case)
    check_commit(case)


@on_each_device
@on_each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("sizes", [{}, dict(h_k=1, h_v=2, d_k=128, d_v=128)])
def test_poison(kind, value, where, sizes, device):
    """What is not finite in a node reaches its descendants, bit for bit nothing else."""
    nodes = 40

    def run(poison):
        case = Case(kind, device, shapes=("bush", "random"), nodes=nodes, seed=3, **sizes)
        if poison is not None:
            getattr(case, where)[0, poison].view(-1)[0] = value
        return case, verify(case)

    clean_case, clean = run(None)
    for poison in (0, 7, 23, nodes - 1):
        case, got = run(poison)
        for row in range(2 * nodes):
            inside = row < nodes and poison in path_to(case.parents[0], row)
            if not inside:
                assert torch.equal(got[row], clean[row]), f"row {row} is no descendant of {poison}"
                assert torch.equal(case.workspace.u[0, row], clean_case.workspace.u[0, row])
        reads = (
            where in ("q", "k", "v")
            or (where == "a" and kind != "fixed")
            or (where == "b" and kind in KINDS[:2])
        )
        if reads and not (value > 0 and where in ("a", "b")):  # a gate of infinity is a number
            assert got[poison].isnan().any() or got[poison].isinf().any()


@on_each_device
def test_poisoned_state(device):
    """Of another request's slot, and of a slot that no request has."""
    case = Case("gated", device, shapes=("random", "bush"), nodes=16)
    clean = verify(case)
    case.states[:, case.slots[1]] = float("nan")
    got = verify(case)
    assert torch.equal(got[:16], clean[:16])
    assert got[16:].isnan().all()


@on_each_device
@on_each_kind
def test_many_steps(kind, device):
    """Two hundred steps of verify and commit with random acceptance stay on the sequential state."""
    epsilon = step_epsilon(device)
    rng = random.Random(0)
    case = Case(kind, device, shapes=("bush",), nodes=8, h_k=1, h_v=1, d_k=64, d_v=16)
    slot = case.slots[0]
    state = case.states[0, slot].double()
    bound = torch.zeros(state.shape[:2], dtype=torch.float64, device=device)
    for step in range(200):
        new = Case(kind, device, shapes=("bush",), nodes=8, h_k=1, h_v=1, d_k=64, d_v=16, seed=step)
        new.states, new.slots, new.state_indices = case.states, case.slots, case.state_indices
        verify(new)
        path = path_to(new.parents[0], rng.randrange(8))
        for node in path:
            state, bound = apply_step(state, bound, new.step(0, node), kind in ("gated", "channel"), epsilon)
        bound = bound + UNIT[FP32] * state.norm(dim=-1)
        tree_recurrent_commit(
            new.states,
            new.state_indices,
            torch.tensor([path], device=device),
            torch.tensor([len(path)], dtype=torch.int32, device=device),
            new.workspace,
            num_nodes=8,
        )
    error = (case.states[0, slot].double() - state).norm(dim=-1)
    assert (error <= bound).all(), (error / bound).max()
    assert (error <= 1e-3 * state.norm(dim=-1) + 1e-3).all()  # the bound itself means something


# Convolution.


class ConvCase:
    def __init__(
        self, device, dtype, shapes, nodes, dim, width, *, layers=1, bias=True, channels_last=False, seed=0
    ):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        self.device, self.dtype, self.nodes, self.width, self.layers = device, dtype, nodes, width, layers
        self.parents = [parents_of("star" if s == "none" else s, nodes, rng) for s in shapes]
        self.ancestors = ancestor_words(self.parents, -(-nodes // 64)).to(device)
        rows = len(shapes) * nodes
        self.x = normal(layers, rows, dim + 8)[..., :dim]
        self.weight, self.bias = normal(layers, dim, width), normal(layers, dim) if bias else None
        slots = list(range(2 * len(shapes) + 2))
        shape = (width - 1, dim) if channels_last else (dim, width - 1)
        pool = normal(layers, len(slots), *shape)
        self.window = pool.transpose(-1, -2) if channels_last else pool
        rng.shuffle(slots)
        self.slots = [-1 if s == "none" else slots.pop() for s in shapes]
        self.track_slots = [slots.pop() for _ in shapes]
        self.state_indices = torch.tensor(self.slots, device=device)
        self.workspace = torch.full((layers, rows + 2, dim), -777.0, dtype=dtype, device=device)

    def verify(self, layer=0, activation="silu"):
        return tree_conv_verify(
            self.x[layer],
            self.window[layer],
            self.state_indices,
            self.ancestors,
            self.weight[layer],
            None if self.bias is None else self.bias[layer],
            self.workspace,
            layer,
            activation=activation,
        )

    def history(self, window, layer, request, node):
        """[dim, any] float64: the stored window and then the path's inputs."""
        rows = [request * self.nodes + n for n in path_to(self.parents[request], node)]
        stored = window[layer, self.slots[request]]
        return torch.cat([stored, self.x[layer, rows].T], dim=1).cpu().double()


CONV_CASES = dict(
    plain=dict(dtype=BF16, nodes=16, dim=64, width=4),
    no_bias=dict(dtype=BF16, nodes=33, dim=24, width=4, bias=False),
    short=dict(dtype=BF16, nodes=8, dim=40, width=2),
    three=dict(dtype=FP32, nodes=8, dim=136, width=3),
    five=dict(dtype=BF16, nodes=20, dim=48, width=5),
    kda=dict(dtype=BF16, nodes=16, dim=96, width=4, channels_last=True),
    wide=dict(dtype=BF16, nodes=64, dim=520, width=4, layers=2),
    one=dict(dtype=BF16, nodes=1, dim=64, width=4),
)


@on_each_device
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("name", CONV_CASES)
def test_convolution(name, activation, device):
    case = ConvCase(device, shapes=SHAPES, **CONV_CASES[name])
    before = case.window.clone()
    unit = UNIT[case.dtype]
    for layer in range(case.layers):
        got = case.verify(layer, activation).cpu().double()
        weight = case.weight[layer].cpu().double()
        bias = 0 if case.bias is None else case.bias[layer].cpu().double()
        for request, slot in enumerate(case.slots):
            for node in range(case.nodes):
                row = request * case.nodes + node
                if slot < 0:
                    assert not got[row].any()
                    assert (case.workspace[layer, row] == -777).all()
                    continue
                terms = case.history(before, layer, request, node)[:, -case.width :] * weight
                want = terms.sum(1) + bias
                slack = 1e-6 * (terms.abs().sum(1) + abs(bias))
                if activation:
                    want = want * torch.sigmoid(want)  # the derivative of silu is below 1.1
                assert ((got[row] - want).abs() <= unit * want.abs() + 1.2 * slack).all()
                assert torch.equal(case.workspace[layer, row], case.x[layer, row])
    assert torch.equal(case.window, before)

    rng = random.Random(1)
    paths = [
        path_to(tree, rng.randrange(case.nodes)) if i != 1 else [] for i, tree in enumerate(case.parents)
    ]
    positions = [rng.choice([-1, 0, len(p) - 1, rng.randrange(len(p) + 1)]) for p in paths]
    longest = max(map(len, paths)) + 1
    tree_conv_commit(
        case.window,
        case.state_indices,
        torch.tensor([p + [0] * (longest - len(p)) for p in paths], device=device),
        torch.tensor([len(p) for p in paths], dtype=torch.int32, device=device),
        case.workspace,
        num_nodes=case.nodes,
        track_indices=torch.tensor(case.track_slots, dtype=torch.int32, device=device),
        track_positions=torch.tensor(positions, dtype=torch.int32, device=device),
    )
    want = before.clone()
    for layer in range(case.layers):
        for request, (slot, path, position) in enumerate(zip(case.slots, paths, positions, strict=True)):
            if slot < 0 or not path:
                continue
            want[layer, slot] = case.history(before, layer, request, path[-1])[:, 1 - case.width :].to(
                case.dtype
            )
            if 0 <= position < len(path):
                tracked = case.history(before, layer, request, path[position])[:, 1 - case.width :]
                want[layer, case.track_slots[request]] = tracked.to(case.dtype)
    assert torch.equal(case.window, want)


@on_each_device
def test_convolution_poison(device):
    clean = ConvCase(device, shapes=("bush",), **CONV_CASES["plain"]).verify()
    for poison in (0, 3, 15):
        case = ConvCase(device, shapes=("bush",), **CONV_CASES["plain"])
        case.x[0, poison] = float("nan")
        got = case.verify()
        for node in range(case.nodes):
            near = poison in path_to(case.parents[0], node)[-case.width :]
            assert got[node].isnan().all() if near else torch.equal(got[node], clean[node])


@on_each_device
def test_opcheck(device):
    """Schema (what is mutated, what aliases), fake tensors and autograd registration as torch wants them."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    case = Case("gated", device, nodes=4)
    kept, gate, rows = case.workspace, case.gate(), 4
    indices, path = case.state_indices, torch.tensor([[0, 1]], device=device)
    lengths = torch.tensor([2], dtype=torch.int32, device=device)
    arguments = [case.q[0], case.k[0], case.v[0], case.states[0], indices, case.ancestors, 0, gate.a, gate.b]
    arguments += [gate.a_log, gate.dt_bias, None, 1.0, True, 0.0, torch.empty_like(case.v[0])]
    arguments += [kept.k[0, :rows], kept.u[0, :rows], kept.g[0, :rows]]
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_recurrent_verify.default, arguments, test_utils=tests)
    arguments = [
        case.states,
        indices,
        path,
        lengths,
        kept.k[:, :rows],
        kept.u[:, :rows],
        kept.g[:, :rows],
        None,
        None,
    ]
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_recurrent_commit.default, arguments, test_utils=tests)
    conv = ConvCase(device, shapes=("random",), **CONV_CASES["plain"])
    arguments = [conv.x[0], conv.window[0], conv.state_indices, conv.ancestors, conv.weight[0], None, True]
    arguments += [torch.empty_like(conv.x[0]), conv.workspace[0, : conv.nodes]]
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_conv_verify.default, arguments, test_utils=tests)
    arguments = [conv.window, conv.state_indices, path, lengths, conv.workspace[:, : conv.nodes], None, None]
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_conv_commit.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda t: t.double(), "q: expected dtype bfloat16 or float16 or float32, got float64"),
        ("k", lambda t: t[:, :1], r"k: expected shape \[1, 16, 2, 64\]|k: expected shape \[16, 2, 64\], got"),
        ("states", lambda t: t[..., ::2], "states: expected shape|states: expected one of the last two"),
        ("ancestors", lambda t: t.int(), "ancestors: expected dtype int64, got int32"),
        ("state_indices", lambda t: t.repeat(3), "q: expected as many rows for each of the 3 requests"),
        ("a", lambda t: t[..., :2], r"gate: expected shape \[16, 4\], got \[16, 2\]"),
        ("bias", lambda t: t[:, :3], r"bias: expected shape \[4\], got \[3\]"),
    ],
)
def test_errors(name, change, message):
    case = Case("gated")
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises((ValueError, RuntimeError), match=message):
        verify(case)


def test_conv_errors():
    case = ConvCase("cpu", shapes=("random",), **CONV_CASES["plain"])
    with pytest.raises(ValueError, match="activation: expected 'silu', 'swish' or None, got 'gelu'"):
        case.verify(activation="gelu")
    case.weight = case.weight[..., :1].contiguous()
    with pytest.raises((ValueError, RuntimeError), match="weight: expected a width of 2 to 5, got 1"):
        case.verify()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
