"""Draft-tree ops for tree-structured speculative decoding, registered under torch.ops.sgl_kernel."""

from sgl_kernel.ddtree import _library  # noqa: F401  registers the ops that the other modules call
from sgl_kernel.ddtree.ancestors import ancestor_mask, ancestor_words, pack_ancestors
from sgl_kernel.ddtree.indexer import index_logits, store_index_keys
from sgl_kernel.ddtree.limits import (
    GQA_HEAD_SIZES,
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_NODES,
    MAX_PATHS,
    MLA_HEAD_SIZES,
)
from sgl_kernel.ddtree.recurrent import (
    MAX_RECURRENT_NODES,
    ChannelDelta,
    FixedDecay,
    GatedDelta,
    RecurrentWorkspace,
    StateSpace,
    tree_conv_commit,
    tree_conv_verify,
    tree_recurrent_commit,
    tree_recurrent_verify,
)
from sgl_kernel.ddtree.tree import Accepted, DraftTrees, KVBuffers, accept_path, build_trees, commit_path
from sgl_kernel.ddtree.verify import VerifyWorkspace, verify_gqa, verify_mla, verify_workspace

__all__ = [
    "Accepted",
    "ChannelDelta",
    "DraftTrees",
    "FixedDecay",
    "GQA_HEAD_SIZES",
    "GatedDelta",
    "KVBuffers",
    "MAX_CANDIDATES",
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_PATHS",
    "MAX_RECURRENT_NODES",
    "MLA_HEAD_SIZES",
    "RecurrentWorkspace",
    "StateSpace",
    "VerifyWorkspace",
    "accept_path",
    "ancestor_mask",
    "ancestor_words",
    "build_trees",
    "commit_path",
    "index_logits",
    "pack_ancestors",
    "store_index_keys",
    "tree_conv_commit",
    "tree_conv_verify",
    "tree_recurrent_commit",
    "tree_recurrent_verify",
    "verify_gqa",
    "verify_mla",
    "verify_workspace",
]
