"""Draft trees over recurrent layers, for the tests: inputs, and the recurrence in float64, node by node.

Every bound here is a sum over a path. A step S' = (I - b k k^T) a S + b k v^T does not enlarge an error of S, since a <= 1
and b |k|^2 <= 1; it adds its own, epsilon times the magnitudes it works with. So the error of a column of S_t is at most
    E_t = E_p + epsilon (|S_p| + |u_t| |k_t|),   and that of o_t   |q_t| (E_t + epsilon |S_t|)   plus o's rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sgl_kernel.ddtree import ChannelDelta, FixedDecay, GatedDelta, RecurrentWorkspace, StateSpace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}  # half a last place, relative
KINDS = ("gated", "channel", "space", "fixed")


def step_epsilon(device: str) -> float:
    """Relative error of one step's products.

    The CPU op is in double; what it keeps is float32. The CUDA op splits float32 operands into two bfloat16 (each
    product misses 3 * 2^-18 at most) and adds up to 256 products in float32 (2^-16 at most).
    """
    return 2.0**-23 if device == "cpu" else 2.0**-15


def parents_of(shape: str, nodes: int, rng: random.Random) -> list[int]:
    """A tree's parents; -1: the root, or a padding node."""
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "star":
        return [-1] + [0] * (nodes - 1)
    if shape == "bush":
        return [-1] + [rng.randrange(max(0, t - 4), t) for t in range(1, nodes)]
    if shape == "random":
        return [-1] + [rng.randrange(t) for t in range(1, nodes)]
    assert shape == "padded"  # the last third belongs to no tree
    real = nodes - nodes // 3
    return [-1] + [rng.randrange(t) for t in range(1, real)] + [-1] * (nodes - real)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def ancestor_words(parents: list[list[int]], words: int) -> torch.Tensor:
    """[bs * N, words] int64."""
    rows = []
    for tree in parents:
        for node in range(len(tree)):
            mask = sum(1 << ancestor for ancestor in path_to(tree, node))
            parts = [mask >> 64 * w & (1 << 64) - 1 for w in range(words)]
            rows.append([part - (1 << 64) if part >> 63 else part for part in parts])
    return torch.tensor(rows, dtype=torch.int64)


@dataclass
class Case:
    """One batch. Its tensors are on `device`, and so is the recurrence in float64."""

    kind: str = "gated"
    device: str = "cpu"
    dtype: torch.dtype = BF16
    state_dtype: torch.dtype = FP32
    shapes: tuple[str, ...] = ("random",)  # a tree each; "none": a request without a slot
    nodes: int = 16
    h_k: int = 2
    h_v: int = 4
    d_k: int = 64
    d_v: int = 32
    layers: int = 1
    words: int | None = None
    normalize: bool = True
    lower_bound: float | None = None
    seed: int = 0
    strided: bool = False  # q, k, v as slices of one tensor, a and b of another
    transposed: bool = False  # states stored [.., d_k, d_v]
    parents: list[list[int]] = field(init=False)

    def __post_init__(self):
        rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape, scale=1.0, dtype=self.dtype):
            return (torch.randn(shape, generator=generator) * scale).to(dtype).to(self.device)

        bs, N = len(self.shapes), self.nodes
        self.parents = [parents_of("star" if s == "none" else s, N, rng) for s in self.shapes]
        rows = bs * N
        self.ancestors = ancestor_words(self.parents, self.words or -(-N // 64)).to(self.device)
        sizes = (self.h_k * self.d_k, self.h_k * self.d_k, self.h_v * self.d_v)
        mixed = normal(self.layers, rows, sum(sizes) + 8, scale=0.5 if self.normalize else self.d_k**-0.5)
        parts = mixed[..., : sum(sizes)].split(sizes, dim=-1)
        q, k, v = (
            part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, (self.h_k, self.h_k, self.h_v))
        )
        self.q, self.k, self.v = (
            (q, k, v) if self.strided else (q.contiguous(), k.contiguous(), v.contiguous())
        )
        width = self.h_v * (self.d_k if self.kind == "channel" else 1)
        both = normal(self.layers, rows, width + self.h_v)
        self.a, self.b = both[..., :width], both[..., width:]
        if self.kind == "channel":
            self.a = self.a.unflatten(-1, (self.h_v, self.d_k))
        if not self.strided:
            self.a, self.b = self.a.contiguous(), self.b.contiguous()
        self.decay = normal(self.layers, self.h_v, dtype=FP32)
        self.bias = normal(
            self.layers, self.h_v, *([self.d_k] if self.kind == "channel" else []), dtype=self.dtype
        )
        self.skip = normal(self.layers, self.h_v, dtype=FP32)

        slots = 2 * bs + 3
        shape = (self.d_k, self.d_v) if self.transposed else (self.d_v, self.d_k)
        pool = normal(self.layers, slots, self.h_v, *shape, scale=0.3, dtype=self.state_dtype)
        self.states = pool.transpose(-1, -2) if self.transposed else pool
        free = list(range(slots))
        rng.shuffle(free)
        self.slots = [-1 if s == "none" else free.pop() for s in self.shapes]
        self.track_slots = [free.pop() for _ in self.shapes]
        self.state_indices = torch.tensor(self.slots, dtype=torch.int32, device=self.device)
        self.workspace = RecurrentWorkspace.allocate(
            layers=self.layers,
            rows=rows + 3,
            h_k=self.h_k,
            h_v=self.h_v,
            d_k=self.d_k,
            d_v=self.d_v,
            dtype=self.dtype,
            device=self.device,
            per_channel=self.kind == "channel",
        )
        for tensor in (self.workspace.k, self.workspace.u, self.workspace.g):
            tensor.fill_(-777)

    @property
    def scale(self) -> float:
        return self.d_k**-0.5

    def gate(self, layer: int = 0):
        a, b, decay, bias, skip = (t[layer] for t in (self.a, self.b, self.decay, self.bias, self.skip))
        if self.kind == "gated":
            return GatedDelta(a, b, decay, bias)
        if self.kind == "channel":
            return ChannelDelta(a, b, decay, bias, self.lower_bound)
        if self.kind == "space":
            return StateSpace(a, -decay.exp(), bias, skip)
        return FixedDecay(decay.exp())

    def step(self, layer: int, rows: int | slice) -> tuple[torch.Tensor, ...]:
        """Of nodes, float64: q, k [.., h_v, d_k], v [.., h_v, d_v], g [.., h_v, 1 or d_k], beta [.., h_v], skip [h_v]."""

        def wide(tensor):
            return tensor.detach().double()

        q, k = (wide(t[layer, rows]).repeat_interleave(self.h_v // self.h_k, -2) for t in (self.q, self.k))
        if self.normalize:
            q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        v, decay = wide(self.v[layer, rows]), wide(self.decay[layer])
        skip = torch.zeros_like(decay)
        x = wide(self.a[layer, rows]) + wide(self.bias[layer])
        softplus = torch.where(x > 20, x, torch.log1p(torch.exp(x)))
        beta = torch.sigmoid(wide(self.b[layer, rows]))
        if self.kind == "gated":
            g = (-decay.exp() * softplus)[..., None]
        elif self.kind == "channel":
            rate = decay.exp()[:, None]
            g = -rate * softplus if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * x)
        elif self.kind == "space":
            g, beta = (wide(-self.decay[layer].exp()) * softplus)[..., None], softplus
            skip = wide(self.skip[layer])
        else:
            beta = torch.ones_like(v[..., 0])
            g = -wide(self.decay[layer].exp())[:, None].expand(*beta.shape, 1)
        return q * self.scale, k, v, g, beta, skip


class Expected(NamedTuple):
    """Of all requests of a layer, float64: outputs and states per node, and the bounds of their errors."""

    o: torch.Tensor  # [bs, N, h_v, d_v]
    o_bound: torch.Tensor
    states: torch.Tensor  # [bs, N, h_v, d_v, d_k]
    bounds: torch.Tensor  # [bs, N, h_v, d_v], of a column's norm


def apply_step(state, bound, step, delta: bool, epsilon: float):
    """(state, bound) after one token."""
    _, k, v, g, beta, _ = step
    decayed = state * g.exp()[..., None, :]
    u = beta[..., None] * (v - (decayed * k[..., None, :]).sum(-1) if delta else v)
    after = decayed + u[..., None] * k[..., None, :]
    magnitude = decayed.norm(dim=-1) + (u.abs() + beta[..., None] * v.abs()) * k.norm(dim=-1)[..., None]
    return after, bound + epsilon * magnitude


def expected(case: Case, layer: int = 0, states: torch.Tensor | None = None) -> Expected:
    """From `states` instead of the case's, if given. What it says about requests without a slot means nothing."""
    bs, epsilon = len(case.slots), step_epsilon(case.device)
    requests, slots = torch.arange(bs, device=case.device), case.state_indices.long().clamp(min=0)
    stored = (case.states if states is None else states)[layer, slots].double()
    *steps, skip = case.step(layer, slice(None))
    q, k, v, g, beta = (part.unflatten(0, (bs, case.nodes)) for part in steps)
    # Place 0 is the stored state, the root's parent; node t has place t + 1.
    places = torch.tensor(case.parents, device=case.device) + 1
    after = stored.new_empty(bs, case.nodes + 1, *stored.shape[1:])
    bounds = stored.new_zeros(after.shape[:-1])
    after[:, 0] = stored
    for node in range(case.nodes):
        at, place = (slice(None), node), places[:, node]
        after[:, node + 1], bounds[:, node + 1] = apply_step(
            after[requests, place],
            bounds[requests, place],
            (q[at], k[at], v[at], g[at], beta[at], skip),
            case.kind in ("gated", "channel"),
            epsilon,
        )
    after, bounds = after[:, 1:], bounds[:, 1:]
    skipped = skip[:, None] * v
    o = torch.einsum("bnhvk,bnhk->bnhv", after, q) + skipped
    error = q.norm(dim=-1)[..., None] * (bounds + epsilon * after.norm(dim=-1)) + epsilon * skipped.abs()
    return Expected(o, error + UNIT[case.dtype] * (o.abs() + error), after, bounds)
