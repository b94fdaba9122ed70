"""The verify input of DDTREE."""

from dataclasses import dataclass

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A DFLASH verify input whose rows form a tree.

    Attributes:
        ancestors: [bs * N, words] int64; bit j of a row: node j of its request is an ancestor of the row or the row.
    """

    ancestors: torch.Tensor | None = None
