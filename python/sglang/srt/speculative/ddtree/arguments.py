"""Types and help texts of DDTREE's own arguments, for upstream's table of ServerArgs fields."""

from typing import Literal

from sglang.srt.arg_groups.arg_utils import A, Arg

VerifyMode = A[
    Literal["native", "triton", "validate"],
    "DDTREE only. How the attention of the verify pass runs. 'native' runs the tree kernels of sgl_kernel.ddtree. "
    "'triton' runs the Triton backend with a full mask. 'validate' runs both, uses Triton's result and reports the "
    "largest difference.",
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
    "DDTREE only. The number of nodes of each step's verify tree. 'auto' lets the server choose the number that emits the "
    "most tokens per second, up to --speculative-num-draft-tokens (64 by default with 'auto'). A number sets "
    "--speculative-num-draft-tokens. By default, every step verifies --speculative-num-draft-tokens nodes.",
]
TraceFile = A[
    str | None,
    "DDTREE only. Record each step in this file: its draft trees, what the target accepted of them, and how the width was "
    "chosen. To draw a recorded tree, run python -m sglang.srt.speculative.ddtree.draw. Recording slows the server down.",
]
CheckDrafter = A[
    bool,
    "Start no server. Say whether DDTREE serves the target with the drafter and what it would choose, or why it refuses "
    "them, and exit with status 0 or 1. Only their configurations are read.",
]
