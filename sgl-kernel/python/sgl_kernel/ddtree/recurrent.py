"""Draft trees over recurrent layers: verify without a state per node, and commit of the accepted path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ops = torch.ops.sgl_kernel

MAX_RECURRENT_NODES = 64  # N of the CUDA kernels: csrc/tree_recurrent/params.h


@dataclass(frozen=True)
class GatedDelta:
    """GDN: g = -exp(a_log) softplus(a + dt_bias), u = sigmoid(b) (v - S^T k) with S the decayed state."""

    a: torch.Tensor  # [bs * N, h_v]; this and b may be slices of a wider projection
    b: torch.Tensor  # [bs * N, h_v]
    a_log: torch.Tensor  # [h_v]
    dt_bias: torch.Tensor  # [h_v]

    def arguments(self) -> tuple:
        return 0, self.a, self.b, self.a_log, self.dt_bias, None, 0.0


@dataclass(frozen=True)
class ChannelDelta:
    """KDA: like GDN, with a decay per key channel. With a lower bound, g = lower_bound sigmoid(exp(a_log) x)."""

    a: torch.Tensor  # [bs * N, h_v, d_k]
    b: torch.Tensor  # [bs * N, h_v]
    a_log: torch.Tensor  # [h_v]
    dt_bias: torch.Tensor  # [h_v, d_k]
    lower_bound: float | None = None  # negative

    def arguments(self) -> tuple:
        return 1, self.a, self.b, self.a_log, self.dt_bias, None, self.lower_bound or 0.0


@dataclass(frozen=True)
class StateSpace:
    """Mamba2: dt = softplus(dt + dt_bias), g = a dt, u = dt x, o = S^T C + d x. Here q is C, k is B, v is x."""

    dt: torch.Tensor  # [bs * N, h_v]
    a: torch.Tensor  # [h_v], negative
    dt_bias: torch.Tensor | None = None  # [h_v]
    d: torch.Tensor | None = None  # [h_v]

    def arguments(self) -> tuple:
        return 2, self.dt, None, self.a, self.dt_bias, self.d, 0.0


@dataclass(frozen=True)
class FixedDecay:
    """Linear (lightning) attention: g = -rate, u = v."""

    rate: torch.Tensor  # [h_v], positive

    def arguments(self) -> tuple:
        return 3, None, None, self.rate, None, None, 0.0


Gate = GatedDelta | ChannelDelta | StateSpace | FixedDecay


@dataclass(frozen=True)
class RecurrentWorkspace:
    """What verify leaves for commit, for all recurrent layers of one shape. Contents need no initialization."""

    k: torch.Tensor  # [layers, bs * N, h_k, d_k] of k's dtype
    u: torch.Tensor  # [layers, bs * N, h_v, d_v] float32, divided by the norm of k
    g: torch.Tensor  # [layers, bs * N, h_v] float32; KDA: [layers, bs * N, h_v, d_k]

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        rows: int,
        h_k: int,
        h_v: int,
        d_k: int,
        d_v: int,
        dtype: torch.dtype,
        device: torch.device,
        per_channel: bool = False,
    ) -> RecurrentWorkspace:
        """Allocate for `rows` nodes, bs * N of the largest batch. `per_channel` is for KDA."""
        g_shape = (layers, rows, h_v, d_k) if per_channel else (layers, rows, h_v)
        return cls(
            k=torch.empty(layers, rows, h_k, d_k, dtype=dtype, device=device),
            u=torch.empty(layers, rows, h_v, d_v, dtype=torch.float32, device=device),
            g=torch.empty(g_shape, dtype=torch.float32, device=device),
        )

    def first(self, rows: int) -> RecurrentWorkspace:
        """Views of the first `rows` nodes."""
        return RecurrentWorkspace(self.k[:, :rows], self.u[:, :rows], self.g[:, :rows])


def tree_recurrent_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: Gate,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    ancestors: torch.Tensor,
    workspace: RecurrentWorkspace,
    layer: int,
    *,
    scale: float | None = None,
    normalize: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of one recurrent layer for all nodes of a batch of draft trees.

    Every node continues its parent's state and the root continues the request's stored state. Each stored state is read
    once and none is written. A NaN in a node reaches only its descendants. Value head h reads q and k of head
    h // (h_v / h_k). A request without a slot gets zeros and leaves its part of the workspace as it is.

    Args:
        q, k: [bs * N, h_k, d_k]. The last dimension is contiguous; other strides are free, as in slices of mixed_qkv.
            CUDA: bfloat16, d_k of 64 or 128, 16-byte aligned heads. CPU: also float16 and float32, any size.
        v: [bs * N, h_v, d_v] of q's dtype. CUDA: d_v a multiple of 16.
        gate: the kind of layer, with its decay inputs.
        states: [slots, h_v, d_v, d_k] float32 or bfloat16 (CPU: also float16). Where d_v is the contiguous dimension
            (linear attention), pass pool.transpose(-1, -2).
        state_indices: [bs] int32 or int64, the requests' slots; negative: none.
        ancestors: [bs * N, words] int64, bit j: node j of the request is an ancestor of the node or the node itself. A
            padding node has only its own bit. N is at most 64 on CUDA.
        workspace: takes what tree_recurrent_commit() needs. Its first bs * N rows are written.
        layer: the index of the layer in the workspace.
        scale: factor of q; None: d_k ** -0.5.
        normalize: divide q and k by sqrt(sum of squares + 1e-6) first.
        out: [bs * N, h_v, d_v] of q's dtype to write into (for graph capture), or None to allocate.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.

    Source: gated delta rule (arXiv 2412.06464) and its chunked form, with the chain's mask replaced by the tree's.
    """
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    kind, gate_input, beta, decay, bias, skip, lower_bound = gate.arguments()
    rows = q.shape[0]
    _ops.ddtree_recurrent_verify(
        q,
        k,
        v,
        states,
        state_indices,
        ancestors,
        kind,
        gate_input,
        beta,
        decay,
        bias,
        skip,
        q.shape[-1] ** -0.5 if scale is None else scale,
        normalize,
        lower_bound,
        out,
        workspace.k[layer, :rows],
        workspace.u[layer, :rows],
        workspace.g[layer, :rows],
    )
    return out


def tree_recurrent_commit(
    states: torch.Tensor,
    state_indices: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    workspace: RecurrentWorkspace,
    *,
    num_nodes: int,
    track_indices: torch.Tensor | None = None,
    track_positions: torch.Tensor | None = None,
) -> None:
    """Apply the accepted path of each request to its states, in place, in all layers, in one launch.

    Requests without a slot, and paths of length 0, change nothing. The state is rounded once, when it is stored.

    Args:
        states: [layers, slots, h_v, d_v, d_k], layouts as in tree_recurrent_verify().
        state_indices: [bs] int32 or int64; no slot occurs twice.
        path: [bs, F] int64, nodes from the root down (Accepted.path).
        lengths: [bs] int32, nodes to apply (Accepted.lengths).
        workspace: as the layers' verify left it.
        num_nodes: N of that verify.
        track_indices: [bs] int32 or int64, slots that take a second state, such as the one that the radix cache keeps
            at a multiple of its interval; negative: none. No slot of state_indices.
        track_positions: [bs] int32 or int64, the path position after which that state is taken; negative, or not below
            the length: none.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.
    """
    kept = workspace.first(path.shape[0] * num_nodes)
    _ops.ddtree_recurrent_commit(
        states, state_indices, path, lengths, kept.k, kept.u, kept.g, track_indices, track_positions
    )


def tree_conv_verify(
    x: torch.Tensor,
    window: torch.Tensor,
    state_indices: torch.Tensor,
    ancestors: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    workspace: torch.Tensor,
    layer: int,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal depthwise convolution of all nodes of a batch of draft trees, each over its own path.

    A node reads its own input, those of its nearest ancestors and, past the root, the stored window. A request without
    a slot gets zeros and leaves its part of the workspace as it is.

    Args:
        x: [bs * N, dim], a contiguous last dimension. CUDA: bfloat16 or float32.
        window: [slots, dim, width - 1] of x's dtype, latest input last; any strides (KDA keeps [slots, width - 1, dim]:
            pass its transpose).
        state_indices: [bs] int32 or int64, the requests' slots; negative: none.
        ancestors: [bs * N, words] int64, as in tree_recurrent_verify().
        weight: [dim, width] with a width of 2 to 5.
        bias: [dim] or None.
        workspace: [layers, rows, dim] of x's dtype, rows >= bs * N: takes the inputs for tree_conv_commit().
        layer: the index of the layer in the workspace.
        activation: "silu" (or "swish"), or None.
        out: [bs * N, dim] of x's dtype to write into, not x itself; None: allocate.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout, or the activation is unknown. The message
            names it.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation: expected 'silu', 'swish' or None, got {activation!r}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _ops.ddtree_conv_verify(
        x,
        window,
        state_indices,
        ancestors,
        weight,
        bias,
        activation is not None,
        out,
        workspace[layer, : x.shape[0]],
    )
    return out


def tree_conv_commit(
    window: torch.Tensor,
    state_indices: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    workspace: torch.Tensor,
    *,
    num_nodes: int,
    track_indices: torch.Tensor | None = None,
    track_positions: torch.Tensor | None = None,
) -> None:
    """Move each request's window to the end of its accepted path, in place, in all layers, in one launch.

    Args:
        window: [layers, slots, dim, width - 1], as in tree_conv_verify().
        workspace: [layers, rows, dim], as the layers' verify left it.
        state_indices, path, lengths, num_nodes, track_indices, track_positions: as in tree_recurrent_commit().

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.
    """
    kept = workspace[:, : path.shape[0] * num_nodes]
    _ops.ddtree_conv_commit(window, state_indices, path, lengths, kept, track_indices, track_positions)


# Ops write into their arguments, so under a fake or meta tensor there is nothing to compute.
@torch.library.register_fake("sgl_kernel::ddtree_recurrent_verify")
@torch.library.register_fake("sgl_kernel::ddtree_recurrent_commit")
@torch.library.register_fake("sgl_kernel::ddtree_conv_verify")
@torch.library.register_fake("sgl_kernel::ddtree_conv_commit")
def _(*args):
    return None
