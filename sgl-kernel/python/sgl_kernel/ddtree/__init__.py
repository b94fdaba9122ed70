"""Draft-tree ops for tree-structured speculative decoding, under torch.ops.sgl_kernel."""

from . import _library  # noqa: F401  registers the ops that the modules below name
from .tree import Accepted, DraftTrees, KVBuffers, accept_path, ancestor_depth, build_trees, commit_path
from .verify import VerifyWorkspace, verify_gqa, verify_mla, verify_workspace

__all__ = [
    "Accepted",
    "DraftTrees",
    "KVBuffers",
    "VerifyWorkspace",
    "accept_path",
    "ancestor_depth",
    "build_trees",
    "commit_path",
    "verify_gqa",
    "verify_mla",
    "verify_workspace",
]
