"""Tree-verify attention: every row of a draft tree over its request's prefix and its own ancestors."""

import os
from dataclasses import dataclass

import torch

_ops = torch.ops.sgl_kernel

# Checks index values (slots, ancestor bits, lengths) before each launch on CUDA. It waits for the device, so
# it is off by default and skipped during graph capture; the CPU ops always check.
DEBUG = os.environ.get("SGLANG_DDTREE_DEBUG", "0") == "1"


@dataclass(frozen=True)
class VerifyWorkspace:
    """What is fixed when a graph is captured: the split count of each batch size, the bound on tree rows, and
    the buffer for partial O and LSE. Its contents need no initialization. One workspace serves every layer of
    a stream in turn; ops that run at the same time on two streams need one each.
    """

    buffer: torch.Tensor  # [bytes] uint8, enough for every batch size
    # [i]: pieces that a request's KV is cut into, on average, in a launch of i + 1 requests. Few requests need
    # many to occupy the whole card; one plan for the largest batch would leave most of it idle.
    num_splits: tuple[int, ...]
    num_nodes: int  # most tree rows of a request, root included: 1 to 256

    @property
    def batch(self) -> int:
        """Most requests a launch."""
        return len(self.num_splits)


def verify_workspace(
    *,
    batch: int,
    num_nodes: int,
    h_q: int,
    h_kv: int,
    d_qk: int,
    d_v: int,
    device: torch.device,
) -> VerifyWorkspace:
    """Plans the split-KV launches for a model's shape, one a batch size, and allocates their workspace.

    Args:
        batch: most requests a launch.
        num_nodes: most tree rows of a request, the root included: 1 to 256.
        h_q, h_kv: query and KV heads on this rank. MLA: h_kv is 1.
        d_qk, d_v: head sizes. MLA: 576 and 512.
        device: of the tensors to come. The plan depends on its number of multiprocessors, never on lengths.

    Returns:
        VerifyWorkspace for verify_gqa() or verify_mla().

    Raises:
        ValueError: num_nodes or batch out of range, or h_q no multiple of h_kv.
    """
    if not 1 <= num_nodes <= 256:
        raise ValueError(f"num_nodes: expected 1 to 256, got {num_nodes}")
    if batch < 1:
        raise ValueError(f"batch: expected 1 or more, got {batch}")
    if h_kv < 1 or h_q % h_kv:
        raise ValueError(f"h_q: expected a multiple of h_kv = {h_kv}, got {h_q}")
    like = torch.empty(0, device=device)
    plans = [
        _ops.ddtree_verify_plan(like, requests, num_nodes, h_q, h_kv, d_qk, d_v)
        for requests in range(1, batch + 1)
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
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    debug: bool | None = None,
) -> torch.Tensor:
    """Tree-verify attention with grouped-query heads (MHA and MQA included) over a paged KV cache.

    Row t of request r attends to the request's prefix and to those rows of its tree whose bit is set in
    ancestors[t]. Strides of q, out and the caches are free but for the last dimension; pointers and strides
    are multiples of 16 bytes. Every length and index is read on the device: a captured call serves every
    replay with the same T and b.

    Args:
        q: [T, h_q, d] bfloat16 or float16 (float32 too on the CPU); d is 64, 96, 128, 192 or 256. T counts
            the tree rows of all requests; row 0 of each tree is its root, the bonus token.
        k_cache, v_cache: [slots, h_kv, d] of q's dtype, or float8_e4m3fn. SGLang's KV pool buffers of one
            layer.
        qo_indptr: [b + 1] int32. Request r owns rows qo_indptr[r] to qo_indptr[r + 1] of q; it may own none.
            Rows past qo_indptr[b] are left unwritten.
        kv_indptr: [b + 1] int32, where each request's prefix starts in kv_indices.
        kv_indices: [*] int32 or int64, slots of the prefix tokens.
        prefix_lens: [b] int32, prefix tokens of each request; at most kv_indptr[r + 1] - kv_indptr[r].
        tree_slots: [T] int32 or int64, slot of each tree row's own K and V.
        ancestors: [T, words] int64, words of 64 nodes, at least ceil(num_nodes / 64). Bit j: node j of the
            same request is an ancestor of the row, or the row itself. Parents come before their children.
        workspace: from verify_workspace(), for at least this many requests.
        sm_scale: softmax scale; None: d ** -0.5.
        logit_cap: cap * tanh(logit / cap) where positive.
        sliding_window: a row at position p (prefix length plus depth) sees positions p - sliding_window and
            later; negative: all.
        sinks: [h_q] float32, an extra logit a head that takes weight and has no value.
        k_scale, v_scale: one float32 on the device; a float8 cache stores K / k_scale and V / v_scale.
        out: [T, h_q, d] of q's dtype to write into, or None to allocate.
        lse: [T, h_q] float32 to write into, or None. Natural logarithm of the sum of exp(logit), sinks
            included; -inf for a row that sees nothing, whose out is 0.
        debug: check index values first (waits for the device); None: as SGLANG_DDTREE_DEBUG says.

    Returns:
        out.

    Raises:
        ValueError: an argument's type, device, shape, stride or (debug, CPU) value is wrong; the text names
            the argument, what was expected and what came.

    Source: tree attention as in SpecInfer (arXiv 2305.09781), split-KV as in Flash-Decoding.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    indices = (qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors)
    num_splits = _check(indices, workspace, k_cache, debug)
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
    kv_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    debug: bool | None = None,
) -> torch.Tensor:
    """Tree-verify attention in MLA's absorbed form: every query head reads one latent row a token.

    Args:
        q: [T, h_q, 576] bfloat16 or float16 (float32 too on the CPU): the absorbed query (512) and its rope
            part (64).
        kv_cache: [slots, 1, 576] of q's dtype, or float8_e4m3fn: ckv (512) and kpe (64). V is ckv.
        sm_scale: softmax scale. No default: it belongs to the model's unabsorbed head size.
        kv_scale: one float32 on the device; a float8 cache stores the latent row / kv_scale.
        out: [T, h_q, 512] of q's dtype to write into, or None to allocate.
        qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors, workspace, logit_cap,
        sliding_window, lse, debug: as in verify_gqa().

    Returns:
        out.

    Raises:
        ValueError: as verify_gqa().

    Source: the absorbed form in DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    if out is None:
        out = q.new_empty((*q.shape[:-1], 512))
    indices = (qo_indptr, kv_indptr, kv_indices, prefix_lens, tree_slots, ancestors)
    num_splits = _check(indices, workspace, kv_cache, debug)
    _ops.ddtree_verify_mla(
        q,
        kv_cache,
        *indices,
        kv_scale,
        sm_scale,
        logit_cap,
        sliding_window,
        workspace.num_nodes,
        num_splits,
        workspace.buffer,
        out,
        lse,
    )
    return out


def _check(indices, workspace: VerifyWorkspace, cache, debug: bool | None) -> int:
    """The split count of the launch, after the checks that the ops themselves do not make."""
    batch = indices[0].shape[0] - 1
    if batch > workspace.batch:
        raise ValueError(
            f"workspace: expected one for {batch} requests or more, got one for {workspace.batch}"
        )
    num_splits = workspace.num_splits[batch - 1] if batch > 0 else 1  # no request: the op says what is wrong
    if not (DEBUG if debug is None else debug) or cache.device.type != "cuda":
        return num_splits
    if torch.cuda.is_current_stream_capturing():
        return num_splits  # the check waits for the device, which a capture forbids
    _ops.ddtree_verify_check(*indices, workspace.num_nodes, cache.shape[0])
    return num_splits


# Shapes are the ops' own rules (csrc/tree_verify/api.cc); under a fake or meta tensor there is nothing to
# compute.
@torch.library.register_fake("sgl_kernel::ddtree_verify_gqa")
@torch.library.register_fake("sgl_kernel::ddtree_verify_mla")
@torch.library.register_fake("sgl_kernel::ddtree_verify_check")
def _(*args):
    return None
