"""Types and help texts of DDTREE's own arguments, for upstream's table of ServerArgs fields."""

from typing import Literal

from sglang.srt.arg_groups.arg_utils import A, Arg

VerifyMode = A[
    Literal["native", "triton", "validate"],
    "DDTREE only. Attention of the verify pass. 'native' runs the tree kernels of sgl_kernel.ddtree. "
    "'triton' runs the Triton backend with a full mask. 'validate' runs both, serves Triton's result and "
    "reports the largest difference.",
]
Top1Path = A[
    Literal["auto", "keep"],
    Arg(
        help="DDTREE only. 'auto' verifies the most probable nodes. 'keep' always includes the drafter's "
        "first choice at every depth and fills the rest of the tree with the most probable nodes. "
        "--speculative-ddtree-spine is the old name of this argument.",
        aliases=["--speculative-ddtree-spine"],
    ),
]
Budget = A[
    str | None,
    "DDTREE only. 'auto' chooses the nodes of each step's verify tree: the number that emits the most tokens per second, "
    "at most --speculative-num-draft-tokens (default with 'auto': 64). A number is another way to give "
    "--speculative-num-draft-tokens. Default: every step verifies --speculative-num-draft-tokens nodes.",
]
TraceFile = A[
    str | None,
    "DDTREE only. File that records each step: its draft trees, what the target accepted of them, and how the width was "
    "chosen. python -m sglang.srt.speculative.ddtree.draw draws a tree of it. Recording slows the server down.",
]
