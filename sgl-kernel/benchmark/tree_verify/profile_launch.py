"""Launches tree verify once, for a profiler. The arguments name a shape of bench_tree_verify.py and the KV type.

    ncu --clock-control none -k regex:partial_kernel -c 1 --set full \\
        python profile_launch.py "GQA 128 h 32/8, bs 8, N 64, prefix 8192" fp8
"""

import sys

import torch
from bench_tree_verify import BASELINE, MEMORY_BOUND, WIDE, Inputs


def main() -> None:
    name, kv = sys.argv[1:]
    shape = next(s for s in BASELINE + MEMORY_BOUND + WIDE if str(s) == name)
    Inputs(shape).ours(kv == "fp8")()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
