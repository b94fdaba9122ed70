"""Tree-verify attention: every node of a draft tree attends to its request's prefix and to its own ancestors."""

import os
from dataclasses import dataclass

import torch
from sgl_kernel.ddtree.limits import MAX_NODES, MLA_HEAD_SIZES

_ops = torch.ops.sgl_kernel

# Checks index values (slots, ancestor bits, lengths) before each launch on CUDA. The check waits for the device, so it
# is off by default and skipped during graph capture. The CPU ops always check.
DEBUG = os.environ.get("SGLANG_DDTREE_DEBUG", "0") == "1"


@dataclass(frozen=True)
class VerifyWorkspace:
    """What a graph capture fixes: the splits per batch size, the width of a tree, and the buffer for partial results.

    The buffer needs no initialization. One workspace serves all layers of a stream in turn. Ops that run at the same
    time on two streams need one each.
    """

    buffer: torch.Tensor  # [bytes] uint8, enough for every batch size up to max_bs
    # [i]: average number of splits per request in a launch of i + 1 requests. A small batch needs many splits to occupy
    # the whole card; a single plan for the largest batch would leave most of it idle.
    num_splits: tuple[int, ...]
    num_nodes: int  # N: most nodes per request, root included, 1 to MAX_NODES

    @property
    def max_bs(self) -> int:
        """Most requests per launch."""
        return len(self.num_splits)


def verify_workspace(
    *,
    max_bs: int,
    num_nodes: int,
    h_q: int,
    h_kv: int,
    d_qk: int,
    d_v: int,
    device: torch.device | str,
) -> VerifyWorkspace:
    """Plan the split-KV launches of a model for every batch size, and allocate their workspace.

    Args:
        max_bs: most requests per launch.
        num_nodes: most nodes per request, root included: 1 to MAX_NODES.
        h_q, h_kv: query and KV heads on this rank. MLA: h_kv is 1.
        d_qk, d_v: head sizes. MLA: MLA_HEAD_SIZES.
        device: device of the launches. The plan depends on its number of multiprocessors, never on lengths.

    Returns:
        VerifyWorkspace for verify_gqa() or verify_mla().

    Raises:
        ValueError: num_nodes or max_bs is out of range, or h_q is not a multiple of h_kv.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes: expected 1 to {MAX_NODES}, got {num_nodes}")
    if max_bs < 1:
        raise ValueError(f"max_bs: expected 1 or more, got {max_bs}")
    if h_kv < 1 or h_q % h_kv:
        raise ValueError(f"h_q: expected a multiple of h_kv = {h_kv}, got {h_q}")
    like = torch.empty(0, device=device)
    plans = [
        _ops.ddtree_verify_plan(like, bs, num_nodes, h_q, h_kv, d_qk, d_v) for bs in range(1, max_bs + 1)
    ]
    buffer = torch.empty(max(size for _, size in plans), dtype=torch.uint8, device=device)
    return VerifyWorkspace(buffer, tuple(num_splits for num_splits, _ in plans), num_nodes)


def verify_gqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    workspace: VerifyWorkspace,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    page_size: int = 1,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    debug: bool | None = None,
) -> torch.Tensor:
    """Tree-verify attention with grouped-query heads (MHA and MQA included) over a paged KV cache.

    Row t of request r attends to the request's prefix and to the nodes of its tree whose bit is set in ancestors[t].
    The last dimension of q, out and the caches must be contiguous; other strides are free. Pointers and strides must be
    multiples of 16 bytes. Every length and index is read on the device, so one captured call serves every replay with
    the same T and bs.

    Args:
        q: [T, h_q, d] bfloat16 or float16 (on the CPU also float32), with d in GQA_HEAD_SIZES. T is the number of nodes
            of all requests, plus padding. The first row of each request is its root.
        k_cache, v_cache: [slots, h_kv, d] of q's dtype, or float8_e4m3fn: SGLang's KV pool buffers of one layer.
        qo_indptr: [bs + 1] int32. Request r owns rows qo_indptr[r] to qo_indptr[r + 1] of q, possibly none. Rows past
            qo_indptr[bs] are padding and are left unwritten.
        kv_indptr: [bs + 1] int32, start of each request's prefix in kv_indices.
        kv_indices: [*] int32 or int64, slots of the prefix tokens.
        prefix_lens: [bs] int32, prefix tokens of each request, at most kv_indptr[r + 1] - kv_indptr[r].
        tree_slots: [T] int32 or int64, slot of each node's own K and V.
        ancestors: [T, words] int64, each node's ancestor words (see ancestors.py); at least ancestor_words(num_nodes)
            words. Bits are relative to the request. Parents come before their children.
        workspace: from verify_workspace(), for at least bs requests.
        sm_scale: softmax scale; None: d ** -0.5.
        logit_cap: if positive, logits become cap * tanh(logit / cap).
        sliding_window: a node at position p (prefix length plus depth) sees positions p - sliding_window and later.
            Negative: all.
        page_size: the prefix tokens i * page_size to (i + 1) * page_size - 1 of a request, for every i, have consecutive
            slots. sm_90's kernels load such tokens together if page_size is a multiple of 64. 1: any slots.
        sinks: [h_q] float32, an extra logit per head that takes weight and has no value.
        k_scale, v_scale: one float32 on the device. A float8 cache stores K / k_scale and V / v_scale.
        out: [T, h_q, d] of q's dtype to write into; None: allocated.
        lse: [T, h_q] float32 to write into, or None. Natural logarithm of the sum of exp(logit), sinks included. A row
            that sees nothing gets -inf, and its out is 0.
        debug: checks index values first, which waits for the device; None: as SGLANG_DDTREE_DEBUG says.

    Returns:
        out.

    Raises:
        ValueError: an argument has a wrong dtype, device, shape or stride, or (debug, CPU) a wrong value. The message
            names the argument, what was expected and what was given.

    Source: tree attention as in SpecInfer (arXiv 2305.09781), split-KV as in Flash-Decoding.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    indices = (qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors)
    num_splits = _check(indices, page_size, workspace, k_cache, debug)
    _ops.ddtree_verify_gqa(
        q,
        k_cache,
        v_cache,
        *indices,
        sinks,
        k_scale,
        v_scale,
        q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        logit_cap,
        sliding_window,
        page_size,
        workspace.num_nodes,
        num_splits,
        workspace.buffer,
        out,
        lse,
    )
    return out


def verify_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    workspace: VerifyWorkspace,
    sm_scale: float,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
    page_size: int = 1,
    kv_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    debug: bool | None = None,
) -> torch.Tensor:
    """Tree-verify attention in MLA's absorbed form: every query head reads the same latent row per token.

    Args:
        q: [T, h_q, 576] bfloat16 or float16 (on the CPU also float32): the absorbed query (512) and its rope part (64).
        kv_cache: [slots, 1, 576] of q's dtype, or float8_e4m3fn: ckv (512) and kpe (64). V is ckv.
        sm_scale: softmax scale. There is no default, because it follows from the model's unabsorbed head size.
        kv_scale: one float32 on the device. A float8 cache stores the latent row / kv_scale.
        out: [T, h_q, 512] of q's dtype to write into; None: allocated.
        qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors, workspace, logit_cap,
        sliding_window, page_size, lse, debug: as in verify_gqa().

    Returns:
        out.

    Raises:
        ValueError: as verify_gqa().

    Source: the absorbed form in DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    if out is None:
        out = q.new_empty((*q.shape[:-1], MLA_HEAD_SIZES[1]))
    indices = (qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors)
    num_splits = _check(indices, page_size, workspace, kv_cache, debug)
    _ops.ddtree_verify_mla(
        q,
        kv_cache,
        *indices,
        kv_scale,
        sm_scale,
        logit_cap,
        sliding_window,
        page_size,
        workspace.num_nodes,
        num_splits,
        workspace.buffer,
        out,
        lse,
    )
    return out


def _check(
    indices: tuple[torch.Tensor, ...],
    page_size: int,
    workspace: VerifyWorkspace,
    cache: torch.Tensor,
    debug: bool | None,
) -> int:
    """Make the checks that the ops themselves do not make. Return the split count of the launch."""
    bs = indices[0].shape[0] - 1
    if bs > workspace.max_bs:
        raise ValueError(
            f"workspace: expected one for at least {bs} requests, got one for {workspace.max_bs}"
        )
    num_splits = workspace.num_splits[bs - 1] if bs > 0 else 1  # without requests the op reports the error
    if not (DEBUG if debug is None else debug) or cache.device.type != "cuda":
        return num_splits
    if torch.cuda.is_current_stream_capturing():
        return num_splits  # a capture forbids waiting for the device
    _ops.ddtree_verify_check(*indices, page_size, workspace.num_nodes, cache.shape[0])
    return num_splits


# The ops check shapes themselves (csrc/tree_verify/api.cc). There is nothing to compute for fake or meta tensors.
@torch.library.register_fake("sgl_kernel::ddtree_verify_gqa")
@torch.library.register_fake("sgl_kernel::ddtree_verify_mla")
@torch.library.register_fake("sgl_kernel::ddtree_verify_check")
def _(*args: object) -> None:
    return None
