"""Types and help texts of the graph guard's arguments, for upstream's table of ServerArgs fields."""

from sglang.srt.arg_groups.arg_utils import A

RaceReportPath = A[
    str | None,
    "Check every CUDA graph for operations on different streams that use the same memory without an order, and write "
    "what is found to this JSON file. Only capture is slower; the graphs are the same.",
]
DiffPattern = A[
    str | None,
    "After each replay, run again eagerly the modules (by qualified name) and ops (as namespace::name) that this "
    "regular expression matches, and report the layers whose captured output or input differs. Slow; adds copies to "
    "the graphs.",
]
CanaryInterval = A[
    int | None,
    "Look for writes outside the pages that a step stores to, in the index-K and compressed pools that the KV canary "
    "leaves out: each step checks one page in this many. 1 checks every page.",
]
