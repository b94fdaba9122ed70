"""Ops on the draft tree itself: building it, walking it, and moving what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

_ops = torch.ops.sgl_kernel

MAX_NODES = 256  # N, rows of one tree, the root included: csrc/tree/params.h
MAX_DEPTH = 32  # L, draft positions
MAX_CANDIDATES = 32  # K, of a position


class _FixedTensors:
    """Tensors with the batch first, so that a captured graph can write into them."""

    def first(self, b: int):
        """Views of the first `b` requests."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{name: None if t is None else t[:b] for name, t in tensors.items()})


@dataclass
class DraftTrees(_FixedTensors):
    """One draft tree a request, N rows each: row 0 is the root, the bonus token of the step before; rows 1 to
    sizes - 1 are nodes, parents before children; the rest is padding, which no row is linked to.
    """

    tokens: torch.Tensor  # [b, N] int64; padding: the root's token
    parents: torch.Tensor  # [b, N] int32, row of the parent; root and padding: -1
    depths: torch.Tensor  # [b, N] int32; root and padding: 0
    ancestors: torch.Tensor  # [b, N, words] int64, bit j: row j is an ancestor of the row or the row itself
    first_child: torch.Tensor  # [b, N] int32, row, or -1; siblings are linked best first
    next_sibling: torch.Tensor  # [b, N] int32, row, or -1
    sizes: torch.Tensor  # [b] int32, root and nodes: 1 to N
    positions: torch.Tensor | None = None  # [b, N] int64, prefix length + depth, where wanted

    @classmethod
    def allocate(cls, b: int, rows: int, device: torch.device, positions: bool = False) -> DraftTrees:
        """Trees for `b` requests of `rows` rows; contents undefined."""

        def new(*shape, dtype=torch.int32):
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tokens=new(b, rows, dtype=torch.int64),
            parents=new(b, rows),
            depths=new(b, rows),
            ancestors=new(b, rows, -(-rows // 64), dtype=torch.int64),
            first_child=new(b, rows),
            next_sibling=new(b, rows),
            sizes=new(b),
            positions=new(b, rows, dtype=torch.int64) if positions else None,
        )


@dataclass
class Accepted(_FixedTensors):
    """What one step commits for each request."""

    path: (
        torch.Tensor
    )  # [b, D] int64, rows of the tree: the root, then the accepted nodes; past the length: 0
    tokens: (
        torch.Tensor
    )  # [b, D] int64, emitted: the accepted nodes' and then the bonus token; past the length: 0
    lengths: (
        torch.Tensor
    )  # [b] int32, accepted nodes + 1: rows to commit, tokens emitted. Upstream's accept_lens
    bonus: torch.Tensor  # [b] int64, the last token emitted: the root of the next tree

    @classmethod
    def allocate(cls, b: int, depth: int, device: torch.device) -> Accepted:
        """For `b` requests and paths of at most `depth` rows, the root included; contents undefined."""

        def new(*shape, dtype=torch.int64):
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(new(b, depth), new(b, depth), new(b, dtype=torch.int32), new(b))


@dataclass(frozen=True)
class KVBuffers:
    """Addresses of the buffers of a KV pool, on its device. Made once, outside a capture, with of()."""

    table: torch.Tensor  # [buffers, 3] int64: address, bytes of a slot's row, bytes from a slot to the next
    max_row_bytes: int
    tensors: tuple[torch.Tensor, ...]  # keeps the addresses valid

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> KVBuffers:
        """Describes buffers whose first dimension is the slot.

        Args:
            buffers: [slots, ...] each, of any dtype and shape, a slot's row contiguous: K and V of every layer
                (MHA: pool.k_buffer + pool.v_buffer), the latent rows of every layer (MLA: pool.kv_buffer), and
                scales a slot where a pool has them. All on one device.

        Raises:
            ValueError: no buffer, two devices, or a row that is not contiguous.
        """
        buffers = tuple(buffers)
        devices = {buffer.device for buffer in buffers}
        if len(devices) != 1:
            raise ValueError(f"buffers: expected tensors of one device, got {sorted(map(str, devices))}")
        rows = []
        for i, buffer in enumerate(buffers):
            if buffer.dim() < 1 or not buffer[:1].is_contiguous():
                raise ValueError(
                    f"buffers[{i}]: expected [slots, ...] with contiguous rows, got shape "
                    f"{list(buffer.shape)} with strides {list(buffer.stride())}"
                )
            size = buffer.element_size()
            rows.append((buffer.data_ptr(), buffer[:1].numel() * size, buffer.stride(0) * size))
        table = torch.tensor(rows, dtype=torch.int64, device=devices.pop())
        return cls(table, max(row_bytes for _, row_bytes, _ in rows), buffers)


def build_trees(
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    bonus: torch.Tensor,
    out: DraftTrees,
    *,
    log_sum: torch.Tensor | None = None,
    keep_top1_path: bool = False,
    budget: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
) -> DraftTrees:
    """Builds the tree of the most probable prefixes for each request.

    A node at depth d has the score log q_1 + ... + log q_d of its path's tokens (float32, summed from the root
    down). The tree is the `budget` prefixes that come first when ordered by score, highest first; at equal scores
    by depth, lowest first; then by the parent's row; then by rank. Rows are numbered in that order. No tree of
    the same size has a larger sum of prefix probabilities. Candidates of probability 0 (-inf, NaN) are never
    nodes: a tree can have fewer nodes than the budget, as it has when there are fewer prefixes.

    The same on the CPU and on CUDA, bit for bit. Can be captured: shapes and keep_top1_path are fixed then, all else is
    read on the device.

    Args:
        candidates: [b, L, K] int64, tokens of each draft position, distinct and best first; L and K up to 32.
        log_probs: [b, L, K] float32, their log-probabilities, or their logits with log_sum; non-increasing.
        bonus: [b] int64, the roots' tokens.
        out: of b requests and N rows, N up to 256, to write into.
        log_sum: [b, L] float32, logsumexp of each position's logits.
        keep_top1_path: makes the first candidates of all depths nodes, as many as the budget has, in rows 1, 2, ...;
            the other nodes are the best of the rest, in the same order. A path accepted along this spine is in
            its final slots already.
        budget: [b] int32, most nodes of each tree (clamped to 0 to N - 1); None: N - 1.
        prefix_lens: [b] int64, positions of the roots: required where out has positions.

    Returns:
        out.

    Raises:
        ValueError: a wrong dtype, shape, device or layout, by argument name.

    Source: DDTree (arXiv 2604.12989), best-first tree construction.
    """
    _ops.ddtree_build(
        candidates,
        log_probs,
        log_sum,
        bonus,
        budget,
        prefix_lens,
        keep_top1_path,
        out.tokens,
        out.parents,
        out.depths,
        out.ancestors,
        out.first_child,
        out.next_sibling,
        out.sizes,
        out.positions,
    )
    return out


def accept_path(trees: DraftTrees, target: torch.Tensor, out: Accepted) -> Accepted:
    """Walks each tree from the root along the target's tokens.

    At each row the target's token there is emitted. While a child of the row holds that token, the child is accepted
    and the walk goes on from it; the last token emitted is the bonus token. If the target's tokens are argmaxes or
    samples, one a row, what is emitted is distributed as plain decoding.

    Args:
        trees: of b requests.
        target: [b, N] int64, the target's token at each row.
        out: of b requests, to write into. Its D bounds the walk; a tree of depth L needs D = L + 1.

    Returns:
        out.

    Raises:
        ValueError: a wrong dtype, shape, device or layout, by argument name.
    """
    _ops.ddtree_accept(trees.tokens, trees.parents, target, out.path, out.tokens, out.lengths, out.bonus)
    return out


def commit_path(
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    kv: KVBuffers,
    hidden: torch.Tensor | None = None,
    hidden_out: torch.Tensor | None = None,
) -> None:
    """Moves the KV of the accepted rows to the front of their request's slots, in all layers, in one launch.

    Slot slots[r, i] takes the rows of slot slots[r, path[r, i]] for i < lengths[r]; rows in place already are
    skipped. Pages need no care: slots are explicit.

    Args:
        path: [b, D] int64, rows of the tree, increasing up to the length (Accepted.path).
        lengths: [b] int32, rows to commit, up to D (Accepted.lengths).
        slots: [b, N] int64, slot of each tree row; no slot twice.
        kv: the pool's buffers; on the device of path.
        hidden: [b * N, width] of any dtype, the target's hidden states of all rows.
        hidden_out: [b, D, width] of hidden's dtype: takes those of the path, all D of them (past the length
            that is row 0, by Accepted.path).

    Raises:
        ValueError: a wrong dtype, shape, device or layout, by argument name.
    """
    _ops.ddtree_commit(path, lengths, slots, kv.table, kv.max_row_bytes, hidden, hidden_out)


def ancestor_depth(ancestors: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Depth of each tree row: how many tokens of the tree stand before it on its own path.

    Args:
        ancestors: [T, words] int64, contiguous. Bit j of a row's words: node j is an ancestor of the row or
            the row itself. A row's position is its request's prefix length plus its depth.
        out: [T] int32 to write into (for graph capture), or None to allocate.

    Returns:
        [T] int32. The root has depth 0; a row with no bit set has depth -1.

    Raises:
        ValueError: a wrong dtype, shape, device or layout, by argument name.
    """
    if out is None:
        out = torch.empty(ancestors.shape[:1], dtype=torch.int32, device=ancestors.device)
    _ops.ddtree_ancestor_depth(ancestors, out)
    return out


# Ops write into their arguments, so under a fake or meta tensor there is nothing to compute.
@torch.library.register_fake("sgl_kernel::ddtree_build")
@torch.library.register_fake("sgl_kernel::ddtree_accept")
@torch.library.register_fake("sgl_kernel::ddtree_commit")
@torch.library.register_fake("sgl_kernel::ddtree_ancestor_depth")
def _(*args):
    return None
