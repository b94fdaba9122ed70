"""How DDTREE wraps upstream's attention backends: which wrapper each gets, and what a wrapped one says of itself."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.ddtree_backend import (
    TorchNativeTreeVerify,
    TreeVerifyMixin,
    TritonDraftBackend,
    TritonTreeVerify,
)
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    ShortConvHybridAttnBackend,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.ddtree.coverage import (
    block_gaps,
    draft_window_fault,
    not_covered,
    not_prefilled_by_torch,
    torch_prefill_fault,
    verify_layers,
)

if TYPE_CHECKING:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ddtree.recurrent_state import RecurrentStates

logger = logging.getLogger(__name__)

Wrapper = TypeVar("Wrapper", bound=AttentionBackend)


def wrap(wrapper: type[Wrapper], backend: AttentionBackend) -> Wrapper:
    """Make an object of class `wrapper`, a subclass of the backend's class, that shares the backend's state.

    Why not an object that holds the backend and forwards to it:
    - Upstream checks the type: unless it is a TritonAttnBackend, Gemma 3 and 4 give images causal attention.
    - AttentionBackend has defaults for more than forty attributes and methods. A forwarding object would have
      to name each of them, and would answer with the default of each that a later release adds.
    - Models and graph runners read and write plain attributes of the backend, such as forward_metadata.
    Why not a new backend with a state of its own: upstream's runner builds the backend and may hand it out
    before it is wrapped.
    """
    wrapped = object.__new__(wrapper)
    wrapped.__dict__ = backend.__dict__
    return wrapped


def with_block_attention(
    backend: AttentionBackend, runner: ModelRunner, *, block_size: int, draft_window: int | None = None
) -> AttentionBackend:
    """Wrap the drafter's backend if it is upstream's Triton backend, so that its block runs on the tree ops.

    To the tree ops, a draft block is a tree in which every node sees all others, or a chain if the drafter is causal.
    Attention that they do not cover stays on Triton.

    Args:
        backend: the attention backend of `runner`, after its construction and before graph capture.
        runner: the drafter's.
        block_size: F, positions of a block.
        draft_window: tokens of the prefix that the drafter sees; None: all.

    Returns:
        The backend to use instead.

    Raises:
        ValueError: there is a draft window, and the tree ops do not cover the drafter.
    """
    if type(backend) is not TritonAttnBackend:
        return backend
    gaps = not_covered(runner) + block_gaps(verify_layers(runner.model))
    if not gaps:
        return with_tree_verify(
            backend, runner, mode="native", num_nodes=block_size, draft_window=draft_window
        )
    if draft_window is not None:
        raise ValueError(draft_window_fault(gaps))
    logger.warning("DDTREE drafts on Triton, because the tree ops do not cover %s.", "; ".join(gaps))
    wrapped = wrap(TritonDraftBackend, backend)
    wrapped.graph_prefix = runner.req_to_token_pool.req_to_token.shape[1]
    return wrapped


def with_tree_verify(
    backend: AttentionBackend,
    runner: ModelRunner,
    *,
    mode: str,
    num_nodes: int,
    graph_ancestors: torch.Tensor | None = None,
    recurrent: RecurrentStates | None = None,
    draft_window: int | None = None,
) -> AttentionBackend:
    """Wrap a backend so that it runs TARGET_VERIFY on trees, and everything else as before.

    Args:
        backend: upstream's attention backend of `runner`, after its construction and before graph capture.
        runner: the ModelRunner it belongs to.
        mode: "native", "triton" or "validate".
        num_nodes: N, nodes per request in a verify.
        graph_ancestors: [max_bs, N, words] int64, where a captured graph finds the ancestor words of its trees.
            None: the nodes are a draft block.
        recurrent: the states of a target with recurrent layers; None without such layers.
        draft_window: tokens of the prefix that a drafter sees; None: all.

    Returns:
        The backend to use instead.

    Raises:
        ValueError: tree verify cannot wrap the backend, or nothing covers the model's attention.
    """
    if runner.prefill_attention_backend_str == "torch_native" and (wanted := not_prefilled_by_torch(runner)):
        raise ValueError(torch_prefill_fault(wanted))
    wrap_inner = partial(
        with_tree_verify, runner=runner, mode=mode, num_nodes=num_nodes, graph_ancestors=graph_ancestors
    )
    if type(backend) in (HybridLinearAttnBackend, ShortConvHybridAttnBackend) and recurrent is not None:
        from sglang.srt.layers.attention.ddtree_linear_backend import with_recurrent_verify

        full = wrap_inner(backend.full_attn_backend)
        linear = with_recurrent_verify(backend.linear_attn_backend, recurrent, _verifying(full))
        return _with_parts(backend, full, linear)
    if isinstance(backend, HybridAttnBackend):
        backend.decode_backend = wrap_inner(backend.decode_backend)
        return backend
    gaps = "; ".join(not_covered(runner))
    wrapper: type[TreeVerifyMixin]
    if type(backend) is TorchNativeAttnBackend:  # a subclass would lose its overrides
        wrapper = TorchNativeTreeVerify
        if gaps:
            raise ValueError(
                f"DDTREE: target model: expected attention that the tree ops cover, got {gaps}. On CUDA, "
                "Triton would verify it."
            )
    elif type(backend) is TritonAttnBackend:
        wrapper = TritonTreeVerify
        if gaps and mode != "triton":
            logger.warning("DDTREE verifies on Triton, because the tree ops do not cover %s.", gaps)
            mode = "triton"
    else:
        raise ValueError(
            "DDTREE: target model: expected a model that the Triton or torch backend runs alone, got one for "
            f"which SGLang uses {type(backend).__name__}: serve it without DDTREE."
        )
    wrapped = wrap(wrapper, backend)
    wrapped._init_tree(
        runner=runner,
        mode=mode,
        num_nodes=num_nodes,
        graph_ancestors=graph_ancestors,
        draft_window=draft_window,
    )
    return wrapped


def narrowed(backend: AttentionBackend, num_nodes: int, graph_ancestors: torch.Tensor) -> AttentionBackend:
    """Make a backend for the verify graphs of narrower trees.

    Args:
        backend: the backend that with_tree_verify() returned, after the capture of its graphs. It verifies in mode
            "native".
        num_nodes, graph_ancestors: as for TreeVerifyMixin.narrowed().

    Returns:
        A copy of the backend. It shares the backend's buffers.
    """
    if isinstance(backend, HybridAttnBackend):
        narrow = copy.copy(backend)
        narrow.decode_backend = narrowed(backend.decode_backend, num_nodes, graph_ancestors)
        return narrow
    if isinstance(backend, HybridLinearAttnBackend):
        full = narrowed(backend.full_attn_backend, num_nodes, graph_ancestors)
        linear = backend.linear_attn_backend.narrowed(_verifying(full))
        return _with_parts(copy.copy(backend), full, linear)
    return backend.narrowed(num_nodes, graph_ancestors)


def _with_parts(
    backend: HybridLinearAttnBackend, full: AttentionBackend, linear: MambaAttnBackendBase
) -> HybridLinearAttnBackend:
    """Make a backend run its attention layers on `full` and its recurrent layers on `linear`; return it."""
    backend.full_attn_backend, backend.linear_attn_backend = full, linear
    if isinstance(backend, ShortConvHybridAttnBackend):
        backend.short_conv_backend = linear
    backend.attn_backend_list = [full, linear]  # in this order: `full` knows the trees first
    return backend


def difference_table(backend: AttentionBackend) -> torch.Tensor | None:
    """Return what a validating verify accumulates.

    Args:
        backend: what with_tree_verify() returned.

    Returns:
        [layers, request pool] float32, or None in the other modes.
    """
    return _verifying(backend).tree_difference


def prepares_in_graph(backend: AttentionBackend) -> bool:
    """Return whether a captured verify or draft block needs nothing from the host before a replay.

    The base backend's kernels do: upstream fills their slots, and their mask is written, outside of the graph.

    Args:
        backend: the backend that with_tree_verify() or with_block_attention() returned.
    """
    verifying = _verifying(backend)
    return isinstance(verifying, TritonTreeVerify) and verifying.tree_mode == "native"


def _verifying(backend: AttentionBackend) -> Any:
    """Return the part of a backend that runs the attention of TARGET_VERIFY."""
    if isinstance(backend, HybridLinearAttnBackend):
        backend = backend.full_attn_backend
    return backend.decode_backend if isinstance(backend, HybridAttnBackend) else backend


def create_draft_backend(runner: ModelRunner) -> AttentionBackend:
    """Make the drafter's attention backend on a CPU: torch's, with tree verify for the draft block.

    Args:
        runner: the drafter's.

    Returns:
        The wrapped backend.
    """
    return with_tree_verify(
        TorchNativeAttnBackend(runner),
        runner,
        mode="native",
        num_nodes=runner.decode_num_tokens_per_req(),
        draft_window=get_spec().speculative_draft_window_size,
    )
