"""Draft-tree ops for tree-structured speculative decoding, under torch.ops.sgl_kernel."""

from . import _library  # noqa: F401  registers the ops that the modules below name
from .tree import Accepted, DraftTrees, KVBuffers, accept, ancestor_depth, build, commit
from .verify import VerifyWorkspace, verify_gqa, verify_mla, verify_workspace

__all__ = [
    "Accepted",
    "DraftTrees",
    "KVBuffers",
    "VerifyWorkspace",
    "accept",
    "ancestor_depth",
    "build",
    "commit",
    "verify_gqa",
    "verify_mla",
    "verify_workspace",
]
