"""Types and help texts of DDTREE's own arguments, for upstream's table of ServerArgs fields."""

from typing import Literal

from sglang.srt.arg_groups.arg_utils import A

VerifyMode = A[
    Literal["native", "triton", "validate"],
    "DDTREE only. Attention of the verify pass: 'native' uses the tree kernels of sgl_kernel.ddtree, 'triton' the base "
    "backend with a full mask, 'validate' runs both, serves the base backend's result and reports the largest difference.",
]
SpinePolicy = A[
    Literal["auto", "keep"],
    "DDTREE only. 'auto' verifies the most probable prefixes; 'keep' always includes the drafter's first choice at "
    "every depth, and fills the rest with the most probable prefixes.",
]
