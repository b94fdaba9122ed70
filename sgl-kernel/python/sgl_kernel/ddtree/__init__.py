"""Draft-tree ops for tree-structured speculative decoding, registered under torch.ops.sgl_kernel."""

from sgl_kernel.ddtree import _library  # noqa: F401  registers the ops that the other modules call
from sgl_kernel.ddtree.ancestors import ancestor_mask, ancestor_words, pack_ancestors
from sgl_kernel.ddtree.limits import GQA_HEAD_SIZES, MAX_CANDIDATES, MAX_DEPTH, MAX_NODES, MLA_HEAD_SIZES
from sgl_kernel.ddtree.tree import Accepted, DraftTrees, KVBuffers, accept_path, build_trees, commit_path
from sgl_kernel.ddtree.verify import VerifyWorkspace, verify_gqa, verify_mla, verify_workspace

__all__ = [
    "Accepted",
    "DraftTrees",
    "GQA_HEAD_SIZES",
    "KVBuffers",
    "MAX_CANDIDATES",
    "MAX_DEPTH",
    "MAX_NODES",
    "MLA_HEAD_SIZES",
    "VerifyWorkspace",
    "accept_path",
    "ancestor_mask",
    "ancestor_words",
    "build_trees",
    "commit_path",
    "pack_ancestors",
    "verify_gqa",
    "verify_mla",
    "verify_workspace",
]
