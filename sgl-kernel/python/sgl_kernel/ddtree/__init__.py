"""Draft-tree ops for tree-structured speculative decoding, under torch.ops.sgl_kernel."""

from . import _library  # noqa: F401  registers the ops that the modules below name
from .tree import ancestor_depth
from .verify import VerifyWorkspace, verify_gqa, verify_mla, verify_workspace

__all__ = [
    "VerifyWorkspace",
    "ancestor_depth",
    "verify_gqa",
    "verify_mla",
    "verify_workspace",
]
