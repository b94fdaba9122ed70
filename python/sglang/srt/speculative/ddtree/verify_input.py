"""The verify input of DDTREE."""

from dataclasses import dataclass

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A DFLASH verify input whose tokens form a tree.

    Attributes:
        ancestors: [bs * N, words] int64 bit mask. Bit j of a node: node j of the same request is an ancestor
            of the node, or the node itself.
    """

    ancestors: torch.Tensor | None = None
