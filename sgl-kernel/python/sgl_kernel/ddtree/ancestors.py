"""Ancestor words: bit j % 64 of word j // 64 is set if node j is an ancestor of the node, or the node itself.

The C++ counterpart is csrc/common/draft_tree.h.
"""

import torch

_WORD_BITS = 64  # of an int64 element


def ancestor_words(num_nodes: int) -> int:
    """Return the number of int64 words that hold one bit for each of `num_nodes` nodes."""
    return -(-num_nodes // _WORD_BITS)


def ancestor_mask(words: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Unpack ancestor words.

    Args:
        words: [..., W] int64 with W of ancestor_words(num_nodes) or more.
        num_nodes: nodes to unpack.

    Returns:
        [..., num_nodes] bool; element j says whether bit j is set.
    """
    node = torch.arange(num_nodes, device=words.device)
    return (words[..., node // _WORD_BITS] >> (node % _WORD_BITS) & 1).bool()


def pack_ancestors(mask: torch.Tensor) -> torch.Tensor:
    """Pack an ancestor mask: the inverse of ancestor_mask().

    Args:
        mask: [..., num_nodes] bool.

    Returns:
        [..., ancestor_words(num_nodes)] int64.
    """
    num_nodes = mask.shape[-1]
    padding = ancestor_words(num_nodes) * _WORD_BITS - num_nodes
    bits = torch.nn.functional.pad(mask, (0, padding)).unflatten(-1, (-1, _WORD_BITS)).long()
    # Bit 63 is the sign: shifting into it and summing wrap as two's complement does.
    return (bits << torch.arange(_WORD_BITS, device=mask.device)).sum(-1)
