"""The attention of DDTREE's verify pass, as a wrapper around the server's own attention backend.

A wrapper runs TARGET_VERIFY with the tree ops of sgl_kernel.ddtree. Prefill, decode, graph buffers and upstream's
checks by type are unchanged. If prefill runs on another backend, the wrapper is the decoding half of upstream's
HybridAttnBackend, which gets the verify. If the target has recurrent layers, upstream's HybridLinearAttnBackend holds
this wrapper and one of ddtree_linear_backend. ddtree_wrap makes the wrappers.

    native     the tree ops
    triton     the base backend, with a full mask written from the ancestor words
    validate   both. The base backend's result is served. The largest difference of each layer and request is
               accumulated on the device, also inside a captured graph, and the host reads it after replays
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from sgl_kernel.ddtree import (
    ancestor_mask,
    pack_ancestors,
    verify_gqa,
    verify_mla,
    verify_workspace,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.ddtree.coverage import (
    MLA_SHAPE,
    applies_scales,
    has_window,
    is_causal,
    layer_shape,
    verify_layers,
    widest_window,
)
from sglang.srt.speculative.ddtree.kv_pool import VerifySlots, in_window_pool, recent_slots, window_slots

if TYPE_CHECKING:
    from sgl_kernel.ddtree import VerifyWorkspace
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

TOKENS_PER_COPY_BLOCK = (
    2048  # slots of a prefix per thread block of a copy; upstream gives a request one block
)


def block_ancestors(num_nodes: int, causal: bool, device: torch.device | str) -> torch.Tensor:
    """Make the ancestor words of a draft block.

    Args:
        num_nodes: positions of the block.
        causal: whether a position sees only itself and those before it. Otherwise it sees all positions.
        device: where the result goes.

    Returns:
        [num_nodes, words] int64.
    """
    seen = torch.ones(num_nodes, num_nodes, dtype=torch.bool)
    return pack_ancestors(seen.tril() if causal else seen).to(device)


class TreeVerifyMixin(AttentionBackend):
    """Runs TARGET_VERIFY with the tree ops. The backend that it is mixed into does everything else."""

    tree_shares_buffers = False  # whether the buffers are those of a backend for wider trees
    _verify_mask: Any  # the base backend's
    use_sliding_window_kv_pool: bool  # the base backend's: the window layers have a pool of their own

    def _init_tree(
        self,
        *,
        runner: ModelRunner,
        mode: str,
        num_nodes: int,
        graph_ancestors: torch.Tensor | None = None,
        draft_window: int | None = None,
    ) -> None:
        self.tree_mode = mode
        self.tree_draft_window = draft_window
        self.num_nodes = num_nodes
        self.tree_runner = runner
        self.tree_graph_ancestors = graph_ancestors
        # [T, words] int64 of the forward that runs or is captured; None: a draft block
        self.tree_ancestors: torch.Tensor | None = None
        self.tree_static: dict[str, torch.Tensor] = {}
        self.tree_window = widest_window(runner.model)
        # Of the forward that runs or is captured: for layers whose KV is in a pool for windows, and for all layers of
        # a drafter that sees only the end of the prefix.
        self.tree_window_slots: VerifySlots | None = None
        self.tree_recent_slots: VerifySlots | None = None
        self.tree_blocks: dict[bool, torch.Tensor] = {}  # ancestor words of draft blocks, by causality
        self.tree_workspaces: dict[tuple[int, int, int, int], VerifyWorkspace] = {}
        max_requests = runner.req_to_token_pool.req_to_token.shape[0]
        if mode != "triton":
            self.tree_workspaces = self._plan_workspaces()
        self.tree_difference: torch.Tensor | None = None
        if mode == "validate":
            layers = runner.model_config.num_hidden_layers
            self.tree_difference = torch.zeros(
                layers, max_requests, dtype=torch.float32, device=runner.device
            )

    def _plan_workspaces(self) -> dict[tuple[int, int, int, int], VerifyWorkspace]:
        """Plan the split-KV launches of each shape of layers for trees of num_nodes nodes."""
        max_requests = self.tree_runner.req_to_token_pool.req_to_token.shape[0]
        device = torch.device(self.tree_runner.device)
        return {
            (h_q, h_kv, d_qk, d_v): verify_workspace(
                max_bs=max_requests,
                num_nodes=self.num_nodes,
                h_q=h_q,
                h_kv=h_kv,
                d_qk=d_qk,
                d_v=d_v,
                device=device,
            )
            for h_q, h_kv, d_qk, d_v in {
                layer_shape(layer) for layer in verify_layers(self.tree_runner.model)
            }
        }

    def narrowed(self, num_nodes: int, graph_ancestors: torch.Tensor) -> Self:
        """Make a copy for the graphs of narrower trees. The copy uses this backend's buffers.

        Args:
            num_nodes: nodes per request in these graphs, fewer than this backend's.
            graph_ancestors: [max_bs, num_nodes, words] int64, where the graphs find the ancestor words.

        Returns:
            A backend that has a graph state already: this backend's.
        """
        narrow = copy.copy(self)
        narrow.num_nodes = num_nodes
        narrow.tree_graph_ancestors = graph_ancestors
        narrow.tree_shares_buffers = True
        narrow.tree_blocks = {}
        narrow.tree_workspaces = {}
        for shape, plan in narrow._plan_workspaces().items():
            # Graphs of different widths never run at the same time.
            widest = max(plan.buffer, self.tree_workspaces[shape].buffer, key=torch.Tensor.numel)
            narrow.tree_workspaces[shape] = dataclasses.replace(plan, buffer=widest)
        return narrow

    def _prefix_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (kv_indptr, kv_indices) of the requests' prefixes."""
        raise NotImplementedError

    def _find_window_slots(self, forward_batch: ForwardBatch) -> None:
        """Find the slots of layers that do not see the whole prefix, if there are such. A graph can capture it."""
        if self.tree_draft_window is not None:
            self.tree_recent_slots = recent_slots(
                self.tree_runner.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.out_cache_loc,
                self.tree_draft_window,
            )
        if not self.use_sliding_window_kv_pool:
            return
        assert self.tree_window is not None  # refuse_layers() has seen to it
        self.tree_window_slots = window_slots(
            self.token_to_kv_pool,
            self.tree_runner.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.out_cache_loc,
            self.tree_window,
        )

    # ---- metadata ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.tree_runner.device
        qo_indptr = torch.arange(max_bs + 1, dtype=torch.int32, device=device) * self.num_nodes
        if self.tree_shares_buffers:
            self.tree_static = self.tree_static | dict(qo_indptr=qo_indptr)
            return
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        prefix_lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
        self.tree_static = dict(prefix_lens=prefix_lens, qo_indptr=qo_indptr)
        if self.tree_mode != "native":
            self._verify_mask = msgspec.structs.replace(self._verify_mask, buffer=self._empty_mask(max_bs))

    def _empty_mask(self, bs: int) -> torch.Tensor:
        """Allocate a full mask that is large enough for any prefixes.

        Under overlap scheduling a prefix can end past the context, because the host does not know yet that
        the request has ended. But prefix and tree always fit in the request's row of the slot table.
        """
        table_width = self.tree_runner.req_to_token_pool.req_to_token.shape[1]
        return torch.ones(
            bs * self.num_nodes * table_width, dtype=torch.uint8, device=self.tree_runner.device
        )

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        native = self.tree_mode == "native"
        if native and not in_capture:
            return  # at a replay the graph reads lengths and slots itself: init_forward_metadata_in_graph()
        bs = forward_batch.req_pool_indices.shape[0]
        ancestors = self.tree_graph_ancestors
        self.tree_ancestors = None if ancestors is None else ancestors[:bs].flatten(0, 1)
        self.tree_qo_indptr = self.tree_static["qo_indptr"][: bs + 1]
        self.tree_prefix_lens = self.tree_static["prefix_lens"][:bs]
        if not native:
            # An empty mask makes the base backend choose its masked kernel, and writes nothing.
            forward_batch.spec_info.custom_mask = self._verify_mask.buffer[:0]
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            self.tree_prefix_lens.copy_(forward_batch.seq_lens[:bs])
            self._write_full_mask(self._verify_mask.buffer, bs)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
            return
        spec_info = forward_batch.spec_info
        bs, num_nodes = forward_batch.batch_size, spec_info.draft_token_num
        self.tree_ancestors = getattr(spec_info, "ancestors", None)
        self.tree_prefix_lens = forward_batch.seq_lens.to(torch.int32)
        self.tree_qo_indptr = torch.arange(
            0, (bs + 1) * num_nodes, num_nodes, dtype=torch.int32, device=self.tree_runner.device
        )
        if self.tree_mode != "native":
            spec_info.custom_mask = self._empty_mask(bs)
        super().init_forward_metadata(forward_batch)
        self._find_window_slots(forward_batch)
        if self.tree_mode != "native":
            self._write_full_mask(spec_info.custom_mask, bs)

    def _write_full_mask(self, mask: torch.Tensor, bs: int) -> None:
        """Write the tree part of the base backend's mask. Its kernels do not read the prefix part.

        Args:
            mask: flat. Each request has N rows of prefix + N cells.
            bs: requests.
        """
        num_nodes = self.num_nodes
        prefix = self.tree_prefix_lens.long()
        width = prefix + num_nodes
        start = torch.cumsum(num_nodes * width, 0) - num_nodes * width
        node = torch.arange(num_nodes, device=mask.device)
        cell = (start + prefix)[:, None, None] + node[:, None] * width[:, None, None] + node
        seen = ancestor_mask(self.ancestors_of(bs * num_nodes), num_nodes)
        mask.scatter_(0, cell.flatten(), seen.flatten().to(mask.dtype))

    # ---- one layer ----

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if forward_batch.forward_mode.is_target_verify() and self.tree_mode == "native":
            if save_kv_cache and k is not None:
                self._write_kv(k, v, layer, forward_batch)
            return self._tree_attention(q, layer, forward_batch, **kwargs)
        base = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        if forward_batch.forward_mode.is_target_verify() and self.tree_mode == "validate":
            native = self._tree_attention(q, layer, forward_batch, **kwargs)
            self.accumulate_difference(native, base, layer.layer_id, forward_batch)
        return base

    def _write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> None:
        window = self.tree_window_slots
        location = KVWriteLoc(
            forward_batch.out_cache_loc, None if window is None else window.tree_slots, physical=True
        )
        scaled = applies_scales(layer, self.token_to_kv_pool.dtype)
        scales = (layer.k_scale, layer.v_scale) if scaled else ()
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, *scales)

    def _tree_attention(
        self,
        q: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each node to its prefix, its ancestors and itself.

        Args:
            q: [T, h_q * d_qk].
            layer: a layer of the target.
            forward_batch: a TARGET_VERIFY batch.
            sinks: [h_q], of gpt-oss.

        Returns:
            [T, h_q * d_v] of q's dtype.
        """
        shape = layer_shape(layer)
        q = q.view(-1, shape[0], shape[2])
        ancestors = self.ancestors_of(q.shape[0], causal=is_causal(layer))
        window = layer.sliding_window_size
        common = dict(
            **self._slots_of(layer, forward_batch)._asdict(),
            qo_indptr=self.tree_qo_indptr,
            ancestors=ancestors,
            workspace=self.tree_workspaces[shape],
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sliding_window=-1 if window is None else window,
        )
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if shape[1:] == MLA_SHAPE:
            o = verify_mla(q, keys, **common)
        else:
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            sinks = None if sinks is None else sinks.float()  # gpt-oss keeps them in bfloat16
            scaled = applies_scales(layer, keys.dtype)
            scales = dict(k_scale=layer.k_scale, v_scale=layer.v_scale) if scaled else {}
            o = verify_gqa(q, keys, values, sinks=sinks, **scales, **common)
        return o.view(q.shape[0], -1)

    def _slots_of(self, layer: RadixAttention, forward_batch: ForwardBatch) -> VerifySlots:
        """Return the slots that a layer reads."""
        if in_window_pool(self.token_to_kv_pool, layer):
            assert self.tree_window_slots is not None
            return self.tree_window_slots
        if self.tree_recent_slots is not None:
            return self.tree_recent_slots
        kv_indptr, kv_indices = self._prefix_slots()
        return VerifySlots(
            kv_indptr,
            kv_indices,
            self.tree_prefix_lens,
            forward_batch.out_cache_loc,
            self.tree_runner.page_size,
        )

    def ancestors_of(self, tokens: int, *, causal: bool = True) -> torch.Tensor:
        """Return the ancestor words of the trees or, if the verify has none, of a draft block per request.

        Those of draft blocks are made for all requests at once, so that a graph that was captured for few still
        finds them.

        Args:
            tokens: the number of tokens in the batch.
            causal: whether a draft block is causal.

        Returns:
            [tokens, words] int64.
        """
        if self.tree_ancestors is not None:
            return self.tree_ancestors
        if causal not in self.tree_blocks:
            block = block_ancestors(self.num_nodes, causal, self.tree_runner.device)
            max_requests = self.tree_runner.req_to_token_pool.req_to_token.shape[0]
            self.tree_blocks[causal] = block.repeat(max_requests, 1)
        return self.tree_blocks[causal][:tokens]

    def accumulate_difference(
        self, native: torch.Tensor, base: torch.Tensor, layer_id: int, forward_batch: ForwardBatch
    ) -> None:
        """Raise tree_difference[layer, request] to the largest |native - base| of the request's nodes.

        A graph can capture it.

        Args:
            native, base: [T, width].
            layer_id: the index of the layer in the model.
            forward_batch: a TARGET_VERIFY batch.
        """
        num_nodes = forward_batch.spec_info.draft_token_num
        worst = (native.float() - base.float()).abs().view(-1, num_nodes * native.shape[1]).amax(1)
        worst = torch.nan_to_num(worst, nan=float("inf"))
        assert self.tree_difference is not None  # mode is "validate"
        self.tree_difference[layer_id].scatter_reduce_(
            0, forward_batch.req_pool_indices.long(), worst, reduce="amax"
        )


class PerRequestGraphBuffersMixin(AttentionBackend):
    """Sizes the graph buffers of upstream's Triton backend by requests instead of tokens.

    Upstream (0.5.23) allocates a context's slots, and the partial results of split decoding, for every token:
    6.4 GB at 48 requests of 64 nodes and a context of 262,144. The graphs that DDTREE captures, the tree's
    verify and the drafter's block, read the slots once per request and the partial results not at all.
    """

    graph_prefix: int  # the most prefix slots of a request: its row of the slot table
    graph_has_mask = True
    num_draft_tokens: int | None  # the base backend's: N
    use_sliding_window_kv_pool: bool  # the base backend's

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        slots = torch.zeros(max_bs * self.graph_prefix, dtype=torch.int64, device=self.device)
        num_draft_tokens = self.num_draft_tokens
        if not self.graph_has_mask:
            self.num_draft_tokens = None  # upstream then makes no mask: bs * N * (context + N) bytes
        try:
            super().init_cuda_graph_state(max_bs, max_bs, kv_indices_buf=slots)
        finally:
            self.num_draft_tokens = num_draft_tokens
        if self.use_sliding_window_kv_pool:
            # The one buffer of upstream's that a graph reads per token: where the window layers write.
            self.cuda_graph_swa_out_cache_loc = torch.zeros(
                max_num_tokens, dtype=torch.int64, device=self.device
            )


class TritonDraftBackend(PerRequestGraphBuffersMixin, TritonAttnBackend):
    """Upstream's Triton backend, as the drafter uses it."""


class WindowMask:
    """The mask of layers with a sliding window, for upstream's extend kernel (SGLang 0.5.23).

    Upstream counts the window back from a node's index. But a node's position is its depth, which may be smaller.

    Args:
        window: tokens that a node sees before itself.
        held: the most prefix tokens that the base backend gives such a layer.
        bs: the most requests.
        num_nodes: N.
        device: where the mask is.
    """

    def __init__(self, window: int, held: int, bs: int, num_nodes: int, device: torch.device | str) -> None:
        self.window, self.held, self.num_nodes = window, held, num_nodes
        # Each request has N rows of prefix + N cells. The cell at the end takes what no request has.
        self.cells = torch.zeros(bs * num_nodes * (held + num_nodes) + 1, dtype=torch.uint8, device=device)
        self.indptr = torch.zeros(bs + 1, dtype=torch.int64, device=device)

    def write(self, seen: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """Write the cells of a batch.

        Args:
            seen: [bs, N, N] bool, whether a node (dim 1) sees another (dim 2), itself included.
            prefix_lens: [bs] integers.
        """
        bs, num_nodes = seen.shape[:2]
        held = prefix_lens.long().clamp(max=self.held)[:, None, None]
        width = held + num_nodes
        depths = seen.sum(-1) - 1
        prefix = torch.arange(self.held, device=seen.device)
        sees_prefix = depths[:, :, None] + held - prefix <= self.window
        sees_nodes = seen & (depths[:, :, None] - depths[:, None, :] <= self.window)
        torch.cumsum(num_nodes * width.flatten(), 0, out=self.indptr[1 : bs + 1])
        node = torch.arange(num_nodes, device=seen.device)
        row = self.indptr[:bs, None, None] + node[:, None] * width
        nowhere = self.cells.numel() - 1
        at = torch.cat([torch.where(prefix < held, row + prefix, nowhere), row + held + node], 2)
        visible = torch.cat([sees_prefix, sees_nodes], 2)
        self.cells.scatter_(0, at.flatten(), visible.flatten().to(self.cells.dtype))


class TritonTreeVerify(TreeVerifyMixin, PerRequestGraphBuffersMixin, TritonAttnBackend):
    """Tree verify on upstream's Triton backend, whose buffers take the prefix slots.

    In native mode a captured graph fills them itself, and the host does nothing between two replays.
    """

    tree_prefix_slots: tuple[torch.Tensor, torch.Tensor]  # kv_indptr and kv_indices
    sliding_window_size: int | None  # the base backend's

    def _init_tree(self, *, runner: ModelRunner, mode: str, **arguments: Any) -> None:
        super()._init_tree(runner=runner, mode=mode, **arguments)
        self.graph_prefix = runner.req_to_token_pool.req_to_token.shape[1]
        self.graph_has_mask = mode != "native"
        layers = [] if mode == "native" else verify_layers(runner.model)
        self.tree_windows = {layer.sliding_window_size for layer in layers if has_window(layer)}
        # By window, of the forward that runs or is captured, and those that graphs read.
        self.tree_window_masks: dict[int, WindowMask] = {}
        self.tree_static_window_masks: dict[int, WindowMask] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.tree_static_window_masks = self._make_window_masks(max_bs)

    def _make_window_masks(self, bs: int) -> dict[int, WindowMask]:
        device = self.tree_runner.device
        return {
            window: WindowMask(window, self.sliding_window_size or 0, bs, self.num_nodes, device)
            for window in self.tree_windows
        }

    def _write_full_mask(self, mask: torch.Tensor, bs: int) -> None:
        super()._write_full_mask(mask, bs)
        if self.tree_window_masks:
            seen = ancestor_mask(self.ancestors_of(bs * self.num_nodes), self.num_nodes).view(
                bs, self.num_nodes, -1
            )
            for window_mask in self.tree_window_masks.values():
                window_mask.write(seen, self.tree_prefix_lens)

    def _forward_extend_kernel(
        self, layer: RadixAttention, *arguments: Any, sliding_window_size: int = -1, **options: Any
    ) -> Any:
        """Run upstream's kernel. In a verify, a layer with a sliding window gets a mask of its own."""
        if sliding_window_size > -1 and self.forward_metadata.custom_mask is not None:
            mask = self.tree_window_masks[sliding_window_size]
            arguments = (*arguments[:9], mask.cells, arguments[10], mask.indptr, *arguments[12:])
            options |= dict(window_kv_offsets=None, skip_prefix_custom_mask=False)
            sliding_window_size = -1
        return super()._forward_extend_kernel(
            layer, *arguments, sliding_window_size=sliding_window_size, **options
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_target_verify():
            self.tree_window_masks = self._make_window_masks(forward_batch.batch_size)
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self.tree_prefix_slots = self.forward_metadata.kv_indptr, self.forward_metadata.kv_indices

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.tree_window_masks = self.tree_static_window_masks
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if in_capture and forward_batch.forward_mode.is_target_verify():
            bs = forward_batch.req_pool_indices.shape[0]
            self.tree_prefix_slots = self.kv_indptr[: bs + 1], self.cuda_graph_kv_indices

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_in_graph(forward_batch)
            return
        if self.tree_mode != "triton":
            # Before upstream's mark in the graph: after it, the scheduler may change what the slots are read from.
            self._find_window_slots(forward_batch)
        if self.tree_mode != "native":
            super().init_forward_metadata_in_graph(forward_batch)
            return
        if self.tree_draft_window is not None:
            return  # no layer reads the slots of the whole prefix
        kv_indptr, kv_indices = self.tree_prefix_slots
        self.tree_prefix_lens.copy_(forward_batch.seq_lens)
        torch.cumsum(self.tree_prefix_lens, 0, dtype=torch.int32, out=kv_indptr[1:])
        self.kv_index_translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            indptr=kv_indptr,
            out=kv_indices,
            num_token_blocks=-(-self.graph_prefix // TOKENS_PER_COPY_BLOCK),
        )

    def _prefix_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tree_prefix_slots


class TorchNativeTreeVerify(TreeVerifyMixin, TorchNativeAttnBackend):
    """Tree verify on upstream's torch backend, on a CPU. It runs the draft block too.

    Upstream's torch backend has no TARGET_VERIFY. It also reads a window layer's KV (0.5.23) from the slots that the
    slot table names, although it writes it to the slots of the window layers' pool.
    """

    req_to_token_pool: Any  # the base backend's

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if self.use_sliding_window_kv_pool:
            width = int(forward_batch.seq_lens.max()) if forward_batch.seq_lens.numel() else 0
            table = self.tree_runner.req_to_token_pool.req_to_token[:, :width]
            slots = self.token_to_kv_pool.full_to_swa_index_mapping[table]
            self.tree_window_table = SimpleNamespace(req_to_token=slots)
        if forward_batch.forward_mode.is_target_verify():
            seq_lens = forward_batch.seq_lens
            table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
            own = torch.arange(table.shape[1]) < seq_lens[:, None]
            self.tree_kv_indices = table[own]
            self.tree_kv_indptr = torch.zeros(seq_lens.numel() + 1, dtype=torch.int32)
            self.tree_kv_indptr[1:] = torch.cumsum(seq_lens, 0)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        table = self.req_to_token_pool
        if in_window_pool(self.token_to_kv_pool, layer):
            self.req_to_token_pool = self.tree_window_table
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        finally:
            self.req_to_token_pool = table

    def _prefix_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tree_kv_indptr, self.tree_kv_indices
