"""Ops on the draft tree: building it, walking it, and moving what was accepted.

Shapes use N for num_nodes, D for max_depth, F = D + 1 for block_size, K for the candidates per position and W
for the paths per position after which candidates are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from sgl_kernel.ddtree.ancestors import ancestor_words

_ops = torch.ops.sgl_kernel
_Record = TypeVar("_Record", bound="_FixedTensors")


class _FixedTensors:
    """A dataclass of tensors whose first dimension is the batch. A captured graph can write into them."""

    def first(self: _Record, bs: int) -> _Record:
        """Return views of the first `bs` requests."""
        return type(self)(**{field.name: getattr(self, field.name)[:bs] for field in fields(self)})


@dataclass
class DraftTrees(_FixedTensors):
    """One draft tree per request, stored at width N.

    Node 0 is the root, the bonus token of the previous step. Nodes 1 to sizes - 1 follow, parents before children. The
    rest is padding that no node links to.
    """

    tokens: torch.Tensor  # [bs, N] int64; padding: the root's token
    parents: torch.Tensor  # [bs, N] int32, node index of the parent; root and padding: -1
    depths: torch.Tensor  # [bs, N] int32; root and padding: 0
    ancestors: (
        torch.Tensor
    )  # [bs, N, words] int64 ancestor words (see ancestors.py); padding: only its own bit
    first_child: torch.Tensor  # [bs, N] int32, node index or -1; siblings are linked best first
    next_sibling: torch.Tensor  # [bs, N] int32, node index or -1
    sizes: torch.Tensor  # [bs] int32, nodes of each tree: 1 to N

    @classmethod
    def allocate(cls, bs: int, num_nodes: int, device: torch.device | str) -> DraftTrees:
        """Allocate trees for `bs` requests at width `num_nodes`. Their contents are undefined."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tokens=new(bs, num_nodes, dtype=torch.int64),
            parents=new(bs, num_nodes),
            depths=new(bs, num_nodes),
            ancestors=new(bs, num_nodes, ancestor_words(num_nodes), dtype=torch.int64),
            first_child=new(bs, num_nodes),
            next_sibling=new(bs, num_nodes),
            sizes=new(bs),
        )


@dataclass
class Accepted(_FixedTensors):
    """What one step commits for each request."""

    path: torch.Tensor  # [bs, F] int64, node indices: the root, then the accepted nodes; past the length: 0
    tokens: (
        torch.Tensor
    )  # [bs, F] int64, emitted: the accepted nodes', then the bonus token; past the length: 0
    lengths: torch.Tensor  # [bs] int32, accept length: accepted nodes + 1 (upstream's accept_lens)
    bonus: torch.Tensor  # [bs] int64, the last emitted token: the root of the next tree

    @classmethod
    def allocate(cls, bs: int, block_size: int, device: torch.device | str) -> Accepted:
        """Allocate for `bs` requests and paths of at most `block_size` nodes. The contents are undefined."""

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(new(bs, block_size), new(bs, block_size), new(bs, dtype=torch.int32), new(bs))


@dataclass(frozen=True)
class KVBuffers:
    """Addresses of a KV pool's buffers, stored on its device. Create it with of(), outside any capture."""

    table: torch.Tensor  # [buffers, 3] int64: address, bytes of a slot's row, bytes from one slot to the next
    max_row_bytes: int
    tensors: tuple[torch.Tensor, ...]  # keeps the addresses valid

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> KVBuffers:
        """Describe buffers whose first dimension is the slot.

        Args:
            buffers: tensors [slots, ...] of any dtype and shape, all on one device, with contiguous rows. For MHA: K
                and V of every layer (pool.k_buffer + pool.v_buffer). For MLA: the latent rows of every layer
                (pool.kv_buffer). Also the scales per slot, if a pool has them.

        Raises:
            ValueError: there is no buffer, they are on different devices, or a row is not contiguous.
        """
        buffers = tuple(buffers)
        devices = {buffer.device for buffer in buffers}
        if len(devices) != 1:
            raise ValueError(f"buffers: expected tensors on one device, got {sorted(map(str, devices))}")
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
    beam: torch.Tensor | None = None,
    keep_top1_path: bool = False,
    scores: torch.Tensor | None = None,
) -> DraftTrees:
    """Build the tree of the most probable prefixes for each request.

    A node's score is the sum of the log-probabilities of the tokens on its path (float32, summed from the root down).
    Nodes are ordered by score, highest first. Ties are broken by lower depth, then by lower index of the parent, then
    by lower index among the candidates. The tree takes the first N - 1 nodes and numbers them in this order. No tree of
    the same size has a larger sum of prefix probabilities. Candidates of probability 0 (-inf or NaN) never become
    nodes. A tree is smaller than N if there are too few prefixes.

    The shape of log_probs says what a token's probability depends on:

    - [bs, D, K]: on the depth alone (marginals). The candidates are sorted, best first.
    - [bs, D, K, K] without a beam: also on the previous token (pairs). Row w of a position follows candidate w of the
      position above. The order of the candidates does not matter.
    - [bs, D, W, K] with a beam: on the whole path. Row w of a position follows one path, which the beam names. A path
      that the beam does not name has no children.

    The root's candidates are in row 0 of the first position.

    The result is the same on the CPU and on CUDA, bit for bit. A capture fixes shapes and keep_top1_path; everything
    else is read on the device.

    Args:
        candidates: [bs, D, K] int64, tokens of each draft position, distinct; D up to MAX_DEPTH, K up to MAX_CANDIDATES.
        log_probs: float32, their log-probabilities: see above. W is up to MAX_PATHS. Marginals are non-increasing, and
            they are logits if log_sum is given.
        bonus: [bs] int64, the roots' tokens.
        out: trees of bs requests to write into; N up to MAX_NODES.
        log_sum: [bs, D] float32, logsumexp of each position's logits. Marginals only.
        beam: [bs, D, W] int32. Row w of position d (from 0) follows the path that ends in candidate beam % K of
            position d - 1, after that position's row beam // K. -1 stands for no path. Position 0 is not read.
        keep_top1_path: makes the best child at every depth a node, as far as N allows. This top-1 path has the
            indices 1, 2, ...; the remaining nodes are the best of the others, in the order above. Tokens accepted along
            it are already in their final slots.
        scores: [bs, N] float32, takes the nodes' scores. The root's is 0, and padding's is -inf.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.

    Source: DDTree (arXiv 2604.12989), best-first tree construction.
    """
    _ops.ddtree_build(
        candidates,
        log_probs,
        log_sum,
        beam,
        bonus,
        keep_top1_path,
        out.tokens,
        out.parents,
        out.depths,
        out.ancestors,
        out.first_child,
        out.next_sibling,
        out.sizes,
        scores,
    )
    return out


def accept_path(trees: DraftTrees, target: torch.Tensor, out: Accepted) -> Accepted:
    """Walk each tree from the root along the target's tokens.

    Each visited node emits the target's token at that node. If a child holds that token, the walk accepts the child and
    continues there. The last emitted token is the bonus token. If the target's tokens are argmaxes, or one sample per
    node, the emitted tokens are distributed as in plain decoding.

    Args:
        trees: trees of bs requests.
        target: [bs, N] int64, the target's token at each node.
        out: result for bs requests to write into. Its F limits the walk; a tree of depth D needs F = D + 1.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.
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
    """Move the KV of the accepted nodes to the front of their request's slots, for all layers in one launch.

    Slot slots[r, i] takes the row of slot slots[r, path[r, i]] for i < lengths[r]. Rows already in place are skipped.
    The page size does not matter, because slots are explicit.

    Args:
        path: [bs, F] int64, node indices that increase up to the length (Accepted.path).
        lengths: [bs] int32, KV rows to commit, up to F (Accepted.lengths).
        slots: [bs, N] int64, slot of each node; no slot occurs twice.
        kv: the pool's buffers, on the device of path.
        hidden: [bs * N, width] of any dtype, the target's hidden states of all nodes.
        hidden_out: [bs, F, width] of hidden's dtype. Takes the hidden states along all F entries of path; past the
            length they are the root's.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout. The message names it.
    """
    _ops.ddtree_commit(path, lengths, slots, kv.table, kv.max_row_bytes, hidden, hidden_out)


# The ops write into their arguments, so there is nothing to compute for fake or meta tensors.
@torch.library.register_fake("sgl_kernel::ddtree_build")
@torch.library.register_fake("sgl_kernel::ddtree_accept")
@torch.library.register_fake("sgl_kernel::ddtree_commit")
def _(*args: object) -> None:
    return None
