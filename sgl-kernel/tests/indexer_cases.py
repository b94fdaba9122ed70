"""What the tests of the indexer's ops share."""

from __future__ import annotations

import torch


def place(values: torch.Tensor, *, strided: bool, dim: int, device: str) -> torch.Tensor:
    """Return values on a device, as they are or as a slice of a wider tensor.

    Args:
        values: [rows, ...].
        strided: leave gaps, which hold NaN or, for integers, -1: an op that reads a gap gives a wrong result.
        dim: 0 puts a gap after every row, 1 puts eight columns before and after.
        device: the device of the result.

    Returns:
        A tensor of the same values. If strided, it is not contiguous.
    """
    values = values.to(device)
    if not strided:
        return values
    gap = torch.nan if values.is_floating_point() else -1
    if dim == 0:
        wide = values.new_full((2 * len(values), *values.shape[1:]), gap)
        wide[::2] = values
        return wide[::2]
    pad = values.new_full((len(values), 8, *values.shape[2:]), gap)
    return torch.cat([pad, values, pad], 1)[:, 8:-8]
