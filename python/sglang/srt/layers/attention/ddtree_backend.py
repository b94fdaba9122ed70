"""Attention of DDTREE's verify pass, laid over the attention backend that the server runs anyway.

`with_tree_verify` gives a backend object a front of a subclass of its own class, over the same state: TARGET_VERIFY runs
the tree ops of sgl_kernel.ddtree; prefill and decode, graph buffers and every check by type are untouched. Where prefill
runs on a backend of its own, the front is the decoding half of upstream's HybridAttnBackend, which verify is sent to.

    native     the tree ops
    triton     the base backend, with its full mask written from the ancestor words
    validate   both; the base backend's result is served, and the largest difference of each (layer, request) is
               accumulated on the device, also inside a captured graph, for the host to read after replays
"""

from __future__ import annotations

import logging

import msgspec
import torch
from sgl_kernel.ddtree import verify_gqa, verify_mla, verify_workspace
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

logger = logging.getLogger(__name__)

GQA_HEAD_SIZES = (64, 96, 128, 192, 256)  # of verify_gqa
MLA_SHAPE = (1, 576, 512)  # of verify_mla: KV heads, d_qk, d_v


def words_of(rows: int) -> int:
    """int64 words that hold one ancestor bit a row: bit j of word j // 64 is row j."""
    return (rows + 63) // 64


def layer_shape(layer) -> tuple[int, int, int, int]:
    """(query heads, KV heads, d_qk, d_v) of a RadixAttention layer on this rank."""
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim


def covers(shape: tuple[int, int, int, int]) -> bool:
    """Whether the tree ops have a kernel for a layer_shape()."""
    _, _, d_qk, d_v = shape
    return shape[1:] == MLA_SHAPE or (d_qk == d_v and d_qk in GQA_HEAD_SIZES)


def not_covered(runner) -> list[str]:
    """What of a runner's target the tree ops cannot do; empty: they do it all."""
    layers = verify_layers(runner.model)
    reasons = [
        f"attention of (heads, KV heads, d_qk, d_v) {shape}"
        for shape in sorted({layer_shape(layer) for layer in layers if not covers(layer_shape(layer))})
    ]
    if any(layer.xai_temperature_len > 0 for layer in layers):
        reasons.append("attention temperature by position")
    on_cuda = torch.device(runner.device).type == "cuda"
    if on_cuda and runner.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"queries in {runner.dtype}")
    if runner.kv_cache_dtype not in (runner.dtype, torch.float8_e4m3fn):
        reasons.append(f"a KV cache in {runner.kv_cache_dtype}")
    if any(is_scaled(layer) and not takes_scales(layer, runner.kv_cache_dtype) for layer in layers):
        reasons.append(
            f"scales of K and V other than 1 with this attention and a KV cache in {runner.kv_cache_dtype}"
        )
    return reasons


def torch_lacks(runner) -> list[str]:
    """What of a runner's target SGLang's torch backend (0.5.23) leaves out of a prefill without a word, MLA aside."""
    layers = verify_layers(runner.model)
    lacks = {
        "MLA": runner.use_mla_backend,
        "capped attention logits": any(layer.logit_cap for layer in layers),
        "scales of K and V other than 1": any(
            is_scaled(layer) and takes_scales(layer, runner.kv_cache_dtype) for layer in layers
        ),
    }
    return [what for what, there in lacks.items() if there]


def is_scaled(layer) -> bool:
    """Whether a checkpoint's K and V are to be stored divided by scales other than 1.

    FP8 checkpoints give each layer scales, 1 unless they hold others, whatever the KV cache's dtype is.
    """
    return any(scale not in (None, 1.0) for scale in (layer.k_scale_float, layer.v_scale_float))


def takes_scales(layer, cache_dtype: torch.dtype) -> bool:
    """Whether pool and op store and read a layer's KV by its scales: MHA in float8. Else they are left out."""
    return cache_dtype == torch.float8_e4m3fn and layer_shape(layer)[1:] != MLA_SHAPE


def verify_layers(model) -> list[RadixAttention]:
    """The layers that a verify runs. An MLA layer has a second, unabsorbed one, for prefill only."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    absorbed = [layer for layer in layers if layer_shape(layer)[1:] == MLA_SHAPE]
    return absorbed or layers


def kv_shapes(model) -> list[tuple[int, int, int]]:
    """(KV heads, d_qk, d_v) of a model's layers on this rank, each once."""
    return sorted({layer_shape(layer)[1:] for layer in verify_layers(model)})


def widest_window(model) -> int | None:
    """The largest sliding window of a model's layers, in tokens that a row sees before itself; None: none has one."""
    windows = [layer.sliding_window_size for layer in verify_layers(model)]
    return max((window for window in windows if window not in (None, -1)), default=None)


def chain_ancestors(rows: int, causal: bool, device) -> torch.Tensor:
    """Ancestor words of a block that is no tree.

    Args:
        rows: rows of the block.
        causal: each row sees the rows up to itself; else all see all.
        device: of the result.

    Returns:
        [rows, words] int64.
    """
    seen = torch.ones(rows, words_of(rows) * 64, dtype=torch.bool)
    seen[:, rows:] = False
    if causal:
        seen = seen.tril()
    place = torch.tensor([1 << j if j < 63 else -(1 << 63) for j in range(64)])
    return (seen.view(rows, -1, 64) * place).sum(-1).to(device)


class TreeVerifyMixin:
    """TARGET_VERIFY by the tree ops, in front of an attention backend class. See `with_tree_verify`."""

    def _install(self, *, runner, mode: str, rows: int) -> None:
        self.tree_mode = mode
        self.num_nodes = rows
        self.tree_words = words_of(rows)
        self.tree_runner = runner
        self.tree_ancestors = None  # [T, words] int64; static once init_cuda_graph_state has run
        self.tree_static = None
        self.tree_blocks = {}  # ancestor words of the drafter's block, by causality
        self.tree_workspaces = {}
        if mode != "triton":
            for shape in {layer_shape(layer) for layer in verify_layers(runner.model)}:
                self.tree_workspaces[shape] = verify_workspace(
                    batch=runner.req_to_token_pool.req_to_token.shape[0],
                    num_nodes=rows,
                    h_q=shape[0],
                    h_kv=shape[1],
                    d_qk=shape[2],
                    d_v=shape[3],
                    device=torch.device(runner.device),
                )
        self.tree_difference = (
            torch.zeros(
                runner.model_config.num_hidden_layers,
                runner.req_to_token_pool.req_to_token.shape[0],
                dtype=torch.float32,
                device=runner.device,
            )
            if mode == "validate"
            else None
        )

    # ---- metadata: outside the graph, before each replay ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        device = self.tree_runner.device
        self.tree_static = dict(
            ancestors=torch.ones(max_num_tokens, self.tree_words, dtype=torch.int64, device=device),
            prefix_lens=torch.zeros(max_bs, dtype=torch.int32, device=device),
            qo_indptr=torch.arange(max_bs + 1, dtype=torch.int32, device=device) * self.num_nodes,
        )
        if self.tree_mode != "native":
            self._verify_mask = msgspec.structs.replace(self._verify_mask, buffer=self._empty_mask(max_bs))

    def _empty_mask(self, bs: int) -> torch.Tensor:
        """A full mask for any prefixes.

        Under overlap scheduling a prefix can end past the context, by the last path of a request that the host does not
        know to have finished; but prefix and tree lie in the request's row of slots.
        """
        row_slots = self.tree_runner.req_to_token_pool.req_to_token.shape[1]
        return torch.ones(bs * self.num_nodes * row_slots, dtype=torch.uint8, device=self.tree_runner.device)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        if not forward_batch.forward_mode.is_target_verify():
            return super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        spec_info = forward_batch.spec_info
        masked = self.tree_mode != "native"
        # An empty mask asks the base backend for its masked kernel, and writes nothing.
        spec_info.custom_mask = self._verify_mask.buffer[:0] if masked else None
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        bs = forward_batch.req_pool_indices.shape[0]
        ancestors = self.tree_static["ancestors"][: bs * self.num_nodes]
        words = getattr(spec_info, "ancestors", None)
        if words is not None:  # none at capture
            ancestors[: words.shape[0]].copy_(words)
        self.tree_ancestors = ancestors
        self.tree_qo_indptr = self.tree_static["qo_indptr"][: bs + 1]
        prefix_lens = self.tree_static["prefix_lens"][:bs]
        prefix_lens.copy_(forward_batch.seq_lens[:bs])
        self.tree_prefix_lens = prefix_lens
        if masked:
            self._write_full_mask(self._verify_mask.buffer, bs)

    def init_forward_metadata(self, forward_batch):
        if not forward_batch.forward_mode.is_target_verify():
            return super().init_forward_metadata(forward_batch)
        spec_info = forward_batch.spec_info
        bs = forward_batch.batch_size
        self.tree_ancestors = getattr(spec_info, "ancestors", None)
        self.tree_prefix_lens = forward_batch.seq_lens.to(torch.int32)
        rows = spec_info.draft_token_num
        self.tree_qo_indptr = torch.arange(
            0, (bs + 1) * rows, rows, dtype=torch.int32, device=self.tree_runner.device
        )
        if self.tree_mode != "native":
            spec_info.custom_mask = self._empty_mask(bs)
        super().init_forward_metadata(forward_batch)
        if self.tree_mode != "native":
            self._write_full_mask(spec_info.custom_mask, bs)

    def _write_full_mask(self, mask: torch.Tensor, bs: int) -> None:
        """Writes the tree part of the base backend's mask, whose kernels do not read the prefix part.

        Args:
            mask: flat; request r owns N * (prefix + N) cells, row by row.
            bs: requests.
        """
        rows, device = self.num_nodes, mask.device
        prefix = self.tree_prefix_lens.long()
        width = prefix + rows
        start = torch.cumsum(rows * width, 0) - rows * width
        row = torch.arange(rows, device=device)
        cell = (start + prefix)[:, None, None] + row[:, None] * width[:, None, None] + row
        words = self.tree_ancestors.view(bs, rows, -1)[:, :, row // 64]
        mask.scatter_(0, cell.flatten(), ((words >> (row % 64)) & 1).flatten().to(mask.dtype))

    # ---- one layer ----

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if not forward_batch.forward_mode.is_target_verify() or self.tree_mode == "triton":
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        if self.tree_mode == "native":
            if save_kv_cache and k is not None:
                self._write_kv(k, v, layer, forward_batch)
            return self._tree_attention(q, layer, forward_batch, **kwargs)
        base = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        native = self._tree_attention(q, layer, forward_batch, **kwargs)
        self._accumulate_difference(native, base, layer, forward_batch)
        return base

    def _write_kv(self, k, v, layer, forward_batch) -> None:
        location = KVWriteLoc(forward_batch.out_cache_loc, physical=True)
        scaled = takes_scales(layer, self.token_to_kv_pool.dtype)
        scales = (layer.k_scale, layer.v_scale) if scaled else ()
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, *scales)

    def _tree_attention(self, q, layer, forward_batch, *, sinks=None) -> torch.Tensor:
        """[T, heads * d_v] of q's dtype: attention of each tree row to its prefix, its ancestors and itself."""
        rows = forward_batch.spec_info.draft_token_num
        shape = layer_shape(layer)
        q = q.view(-1, shape[0], shape[2])
        ancestors = self.tree_ancestors
        if ancestors is None:
            ancestors = self._block_ancestors(layer, rows, q.shape[0])
        kv_indptr, kv_indices = self._prefix_slots()
        window = layer.sliding_window_size
        common = dict(
            qo_indptr=self.tree_qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            prefix_lens=self.tree_prefix_lens,
            tree_slots=forward_batch.out_cache_loc,
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
            scaled = takes_scales(layer, keys.dtype)
            scales = dict(k_scale=layer.k_scale, v_scale=layer.v_scale) if scaled else {}
            o = verify_gqa(q, keys, values, sinks=sinks, **scales, **common)
        return o.view(q.shape[0], -1)

    def _block_ancestors(self, layer, rows: int, total: int) -> torch.Tensor:
        causal = layer.attn_type == AttentionType.DECODER
        if causal not in self.tree_blocks:
            self.tree_blocks[causal] = chain_ancestors(rows, causal, self.tree_runner.device)
        return self.tree_blocks[causal].repeat(total // rows, 1)

    def _accumulate_difference(self, native, base, layer, forward_batch) -> None:
        """Raises tree_difference[layer, request] to the largest |native - base| of the request's rows. Capture-safe."""
        rows = forward_batch.spec_info.draft_token_num
        worst = (native.float() - base.float()).abs().view(-1, rows * native.shape[1]).amax(1)
        worst = torch.nan_to_num(worst, nan=float("inf"))
        self.tree_difference[layer.layer_id].scatter_reduce_(
            0, forward_batch.req_pool_indices.long(), worst, reduce="amax"
        )


class PrefixPerRequest:
    """Over upstream's Triton backend: graph buffers for forwards that read one prefix a request, whatever their rows.

    Upstream (0.5.23) makes room for a context's slots, and for the partial results of split decoding, at each row: 6.4 GB
    at 48 requests of 64 rows and a context of 262,144. What DDTREE captures, the tree's verify and the drafter's block,
    reads the first by request and the second not at all.
    """

    graph_prefix: int  # most prefix slots of a request: its row of the slot table
    graph_has_mask = True

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        slots = torch.zeros(max_bs * self.graph_prefix, dtype=torch.int64, device=self.device)
        rows = self.num_draft_tokens
        if not self.graph_has_mask:
            self.num_draft_tokens = None  # then none is made: bs * N * (context + N) bytes
        try:
            super().init_cuda_graph_state(max_bs, max_bs, kv_indices_buf=slots)
        finally:
            self.num_draft_tokens = rows


def with_prefix_per_request(backend, runner):
    """The drafter's backend, with PrefixPerRequest where it is upstream's Triton backend; else as it is.

    Args:
        backend: of `runner`, after its construction and before graph capture.
        runner: the drafter's ModelRunner.
    """
    if type(backend).__name__ != "TritonAttnBackend":
        return backend
    fronted = _front(PrefixPerRequest, backend)
    fronted.graph_prefix = runner.req_to_token_pool.req_to_token.shape[1]
    return fronted


def _front(front: type, backend):
    """An object of front and backend's class, over backend's state: whoever holds the old object sees the same."""
    cls = type(f"DDTree{type(backend).__name__}", (front, type(backend)), {})
    fronted = cls.__new__(cls)
    fronted.__dict__ = backend.__dict__
    return fronted


class TritonTreeVerify(TreeVerifyMixin, PrefixPerRequest):
    """Over upstream's Triton backend, whose metadata holds the prefix slots already."""

    def _install(self, *, runner, mode: str, rows: int) -> None:
        super()._install(runner=runner, mode=mode, rows=rows)
        self.graph_prefix = runner.req_to_token_pool.req_to_token.shape[1]
        self.graph_has_mask = mode != "native"

    def _prefix_slots(self):
        return self.forward_metadata.kv_indptr, self.forward_metadata.kv_indices


class TorchNativeTreeVerify(TreeVerifyMixin):
    """Over upstream's torch backend on a CPU, which has no TARGET_VERIFY of its own. Serves the drafter's block too."""

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            seq_lens = forward_batch.seq_lens
            table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
            own = torch.arange(table.shape[1]) < seq_lens[:, None]
            self.tree_kv_indices = table[own]
            self.tree_kv_indptr = torch.zeros(seq_lens.numel() + 1, dtype=torch.int32)
            self.tree_kv_indptr[1:] = torch.cumsum(seq_lens, 0)

    def _prefix_slots(self):
        return self.tree_kv_indptr, self.tree_kv_indices


def with_tree_verify(backend, runner, *, mode: str, rows: int):
    """A backend over the state of `backend` that runs TARGET_VERIFY as a tree; all else is as it was.

    Args:
        backend: upstream's attention backend of `runner`, after its construction and before graph capture.
        runner: the ModelRunner it belongs to.
        mode: "native", "triton" or "validate".
        rows: rows of one request in a verify.

    Returns:
        The backend to use instead.

    Raises:
        ValueError: the backend is none that tree verify can be laid over, or nothing covers the model's attention.
    """
    if runner.prefill_attention_backend_str == "torch_native" and (lacks := torch_lacks(runner)):
        raise ValueError(
            f"DDTREE: --prefill-attention-backend: expected one that prefills {' and '.join(lacks)}, such as 'triton' on "
            "CUDA, got 'torch_native'."
        )
    if isinstance(backend, HybridAttnBackend):
        backend.decode_backend = with_tree_verify(backend.decode_backend, runner, mode=mode, rows=rows)
        return backend
    reasons = "; ".join(not_covered(runner))
    if isinstance(backend, TorchNativeAttnBackend):
        front = TorchNativeTreeVerify
        if reasons:
            raise ValueError(
                f"DDTREE: target model: expected attention that the tree ops cover, got {reasons}: on CUDA, Triton would "
                "verify it."
            )
    elif type(backend).__name__ == "TritonAttnBackend":  # its module needs Triton
        front = TritonTreeVerify
        if reasons and mode != "triton":
            logger.warning("DDTREE verifies on Triton: the tree ops do not cover %s.", reasons)
            mode = "triton"
    else:
        raise ValueError(
            f"DDTREE: target model: expected attention that Triton's or torch's backend runs alone, got "
            f"{type(backend).__name__}, which SGLang needs for it: serve it without DDTREE."
        )
    fronted = _front(front, backend)
    fronted._install(runner=runner, mode=mode, rows=rows)
    return fronted


def difference_table(backend) -> torch.Tensor | None:
    """Of a backend that with_tree_verify returned: [layers, requests] float32, what a validating verify has accumulated;
    None in the other modes.
    """
    return (backend.decode_backend if isinstance(backend, HybridAttnBackend) else backend).tree_difference


def create_draft_backend(runner):
    """The drafter's attention backend on a CPU: torch's, whose draft block runs as a tree that hides nothing."""
    return with_tree_verify(
        TorchNativeAttnBackend(runner), runner, mode="native", rows=runner.decode_num_tokens_per_req()
    )
