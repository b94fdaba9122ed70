"""The limits of the ops, read from the library. csrc/common/draft_tree.h and csrc/tree_verify/params.h define them."""

import torch

MAX_NODES: int  # N: nodes of a draft tree, root included
MAX_DEPTH: int  # D: depth of a node; the root has depth 0
MAX_CANDIDATES: int  # K: candidates per draft position
MAX_PATHS: int  # W: paths per draft position after which candidates are scored
MLA_HEAD_SIZES: tuple[int, int]  # (d_qk, d_v) of verify_mla()
GQA_HEAD_SIZES: tuple[int, ...]  # the head sizes that verify_gqa() has kernels for

MAX_NODES, MAX_DEPTH, MAX_CANDIDATES, MAX_PATHS, *_sizes = torch.ops.sgl_kernel.ddtree_limits()
MLA_HEAD_SIZES = (_sizes[0], _sizes[1])
GQA_HEAD_SIZES = tuple(_sizes[2:])
