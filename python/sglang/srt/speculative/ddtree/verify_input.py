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
        retrieve_next_token: [bs, N] int32, each node's first child or -1. Only a validating verify of recurrent
            layers reads this and the next one, which have upstream's names.
        retrieve_next_sibling: [bs, N] int32, each node's next sibling or -1.
    """

    ancestors: torch.Tensor | None = None
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None
