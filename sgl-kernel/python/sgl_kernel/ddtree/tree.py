"""Ops on the draft tree itself: its shape, acceptance and the cache move after it."""

import torch

_ops = torch.ops.sgl_kernel


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


@torch.library.register_fake("sgl_kernel::ddtree_ancestor_depth")
def _(ancestors, depth):
    return None
