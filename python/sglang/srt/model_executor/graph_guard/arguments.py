"""Types and help texts of the graph guard's server arguments, for upstream's table of ServerArgs fields."""

from sglang.srt.arg_groups.arg_utils import A

RaceReportPath = A[
    str | None,
    "Check every CUDA graph for operations that use the same memory on different streams with no ordering between "
    "them, and write the races to this JSON file. Only the capture becomes slower. The graphs do not change.",
]
DiffPattern = A[
    str | None,
    "After each replay, rerun eagerly the modules (by qualified name) and ops (as namespace::name) that match this "
    "regular expression, and report the layers whose captured outputs or inputs differ. Slow, and adds copies to the "
    "graphs.",
]
CanaryInterval = A[
    int | None,
    "Detect writes to pages that a step does not store to, in the index-K and compressed pools that --kv-canary does "
    "not cover. Each step checks one page out of this many. 1 checks every page in every step.",
]
