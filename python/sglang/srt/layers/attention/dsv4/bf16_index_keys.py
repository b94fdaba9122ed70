"""Index keys of DeepSeek-V4's C4 layers in bfloat16: how the attention backend stores them and selects by them.

The pool is upstream's, with bigger pages. Neither keys nor queries are rotated by the Hadamard transform that upstream
applies before it quantizes: it leaves their products as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import index_logits, store_index_keys
from sglang.kernels.ops.attention.dsv4 import compress_forward, fused_rope_inplace
from sglang.srt.layers.attention.dsv4.index_key_dtype import C4
from sglang.srt.layers.attention.dsv4.indexer import (
    topk_transform_paged_from_metadata,
    topk_transform_pytorch_vectorized,
)
from sglang.srt.layers.attention.dsv4.metadata import iter_row_chunks
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

if TYPE_CHECKING:
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
    from sglang.srt.layers.attention.dsv4.indexer import C4Indexer
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor


MAX_SHARING = 4  # rows that index_logits() scores per read of a key


def with_bf16_index_keys(backend: DeepseekV4AttnBackend) -> DeepseekV4AttnBackend:
    """Let a backend of DeepSeek-V4 keep its index keys in bfloat16.

    Args:
        backend: upstream's backend, of any of its classes. Its pool must be sized by index_key_bytes().

    Returns:
        The same object. Two of its methods are now those of a Bf16IndexKeys.
    """
    keys = Bf16IndexKeys(backend)
    backend._forward_compress_all_in_one = keys.compress
    backend.forward_c4_indexer = keys.select
    return backend


def key_pages(buffer: Tensor, page_size: int, head_dim: int) -> Tensor:
    """View a layer's pool buffer as keys.

    Args:
        buffer: [pages, page_size * head_dim * 2] uint8.

    Returns:
        [pages, page_size, head_dim] bfloat16, the same memory.
    """
    return buffer.view(torch.bfloat16).view(-1, page_size, head_dim)


def score(
    q: Tensor, keys: Tensor, weights: Tensor, seq_lens: Tensor, page_table: Tensor, out: Tensor, sharing: int
) -> None:
    """Call index_logits() for rows that have one line of the page table each.

    Args:
        q, keys, weights, seq_lens, out: see index_logits(), with one row per request.
        page_table: [rows, pages_per_request] int32.
        sharing: how many successive rows have the same pages, and can share each read of a key. Rows that are left
            over at the end are scored one by one.
    """
    shared = len(q) // sharing * sharing
    for rows, step in ((slice(0, shared), sharing), (slice(shared, len(q)), 1)):
        if rows.start < rows.stop:
            index_logits(q[rows], keys, weights[rows], seq_lens[rows], page_table[rows][::step], out[rows])


class Bf16Query:
    """A C4Indexer whose queries stay in bfloat16. Everything else is the wrapped indexer's.

    Upstream's backend computes weights and queries through its indexer, on streams that the backend chooses. Because
    only the indexer is wrapped, the streams and their waits stay upstream's.
    """

    def __init__(self, indexer: C4Indexer) -> None:
        self._indexer = indexer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indexer, name)

    def compute_q(
        self, q_lora: Tensor, positions: Tensor, weight: Tensor, q_lora_quant: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the queries and the weights of their heads.

        Args:
            q_lora: [rows, q_lora_rank].
            positions: [rows].
            weight: [rows, heads], unscaled.
            q_lora_quant: q_lora, already quantized for the projection, or None.

        Returns:
            [rows, heads, head_dim] bfloat16, and [rows, heads, 1] float32.
        """
        indexer = self._indexer
        q, _ = indexer.wq_b(q_lora if q_lora_quant is None else q_lora_quant)
        q = q.view(-1, indexer.n_local_heads, indexer.head_dim)
        fused_rope_inplace(q[..., -indexer.rope_head_dim :], None, indexer.freqs_cis, positions)
        return q, (weight.float() * indexer.weight_scale).unsqueeze(-1)


class Bf16IndexKeys:
    """What a backend of DeepSeek-V4 does differently when index keys are bfloat16.

    Args:
        backend: upstream's backend.
    """

    def __init__(self, backend: DeepseekV4AttnBackend) -> None:
        self._backend = backend
        self._compress_others = backend._forward_compress_all_in_one

    def compress(self, **call: Any) -> None:
        """Compress tokens and store the results. Only an indexer's results are stored differently from upstream's.

        Args:
            call: the arguments of upstream's _forward_compress_all_in_one().
        """
        if not call["is_indexer"]:
            self._compress_others(**call)
            return
        head_dim, norm, plan = call["head_dim"], call["norm"], self._backend._get_paged_compress_metadata(C4)
        keys = compress_forward(
            # A state holds KV and score of two overlapping groups.
            kv_score_buffer=call["kv_score_buffer"].view(-1, C4, 4 * head_dim),
            kv_score_input=call["kv_score_input"],
            ape=call["ape"].view(-1, head_dim),
            plan=plan,
            compress_ratio=C4,
            head_dim=head_dim,
        )
        store_index_keys(
            keys,
            plan[1],
            norm.weight,
            norm.variance_epsilon,
            torch.view_as_real(call["freqs_cis_cache"]).flatten(-2),
            call["out_loc"],
            key_pages(call["kv_cache"], call["page_size"], head_dim),
            decode=plan.is_decode,
        )

    def select(
        self,
        x: Tensor,
        q_lora: Tensor,
        c4_indexer: C4Indexer,
        forward_batch: ForwardBatch,
        alt_streams: list[torch.cuda.Stream] | None = None,
        enable_multi_stream: bool = False,
        q_lora_ready: torch.cuda.Event | None = None,
        skip_compressor: bool = False,
        q_lora_quant: Any = None,
    ) -> None:
        """Store the index keys of this step's tokens, and select the compressed tokens that each row attends to.

        Args:
            x: [rows, hidden].
            q_lora: [rows, q_lora_rank].
            c4_indexer: the layer's indexer.
            forward_batch: the batch.
            alt_streams, enable_multi_stream, q_lora_ready: where queries and weights are computed.
            skip_compressor: the keys are already stored.
            q_lora_quant: see Bf16Query.compute_q().
        """
        if forward_batch.forward_mode.is_idle():
            return
        backend = self._backend
        core, metadata = backend.forward_metadata.core_metadata, backend.forward_metadata.indexer_metadata
        rows = min(x.shape[0], q_lora.shape[0], core.positions.shape[0])
        if q_lora.shape[0] != rows:
            q_lora_quant = None
        inputs = dict(
            x=x[:rows],
            q_lora=q_lora[:rows],
            c4_indexer=Bf16Query(c4_indexer),
            positions=core.positions[:rows],
            forward_batch=forward_batch,
        )
        if enable_multi_stream:
            q, weights = backend._forward_prepare_multi_stream(
                **inputs, alt_streams=alt_streams, q_lora_ready=q_lora_ready
            )
        else:
            q, weights = backend._forward_prepare_normal(
                **inputs, skip_compressor=skip_compressor, q_lora_quant=q_lora_quant
            )
        if not backend.debug_use_external_c4_sparse_indices:
            # The rows of one prompt share its pages. In other steps each row has pages of its own, or may have.
            one_prompt = (
                forward_batch.forward_mode.is_extend_without_speculative() and forward_batch.batch_size == 1
            )
            self._select(q, weights.squeeze(-1), c4_indexer, core, metadata, MAX_SHARING if one_prompt else 1)

    def _select(
        self,
        q: Tensor,
        weights: Tensor,
        indexer: C4Indexer,
        core: Any,
        metadata: PagedIndexerMetadata,
        sharing: int,
    ) -> None:
        pool = self._backend.token_to_kv_pool
        keys = key_pages(
            pool.get_index_k_with_scale_buffer(indexer.layer_id),
            metadata.compressed_page_size,
            indexer.head_dim,
        )
        capturer = get_global_indexer_capturer()
        raw = core.c4_sparse_raw_indices
        if raw is None and capturer is not None:
            raw = torch.empty_like(core.c4_sparse_page_indices)
        rows = min(q.shape[0], metadata.page_table.shape[0])
        plans = metadata.topk_metadata_chunks
        for index, chunk in enumerate(iter_row_chunks(num_rows=rows, rows_per_chunk=metadata.rows_per_chunk)):
            logits = torch.empty(
                (chunk.stop - chunk.start, metadata.max_compressed_seq_len),
                dtype=torch.float32,
                device=q.device,
            )
            score(
                q[chunk],
                keys,
                weights[chunk],
                metadata.compressed_seq_lens[chunk],
                metadata.page_table[chunk],
                logits,
                sharing,
            )
            self._select_rows(
                chunk, logits, core.c4_sparse_page_indices, raw, metadata, plans and plans[index]
            )
        if capturer is not None:
            capturer.capture(pool.layer_mapping[indexer.layer_id].compress_layer_id, raw)

    def _select_rows(
        self,
        rows: slice,
        logits: Tensor,
        page_indices: Tensor,
        raw_indices: Tensor | None,
        metadata: PagedIndexerMetadata,
        plan: Tensor | None,
    ) -> None:
        backend = self._backend
        if backend.dsa_topk_backend.is_sgl_kernel():
            topk_transform_paged_from_metadata(
                logits, metadata, page_indices, raw_indices, rows=rows, topk_metadata=plan
            )
            return
        transform = (
            topk_transform_pytorch_vectorized
            if backend.dsa_topk_backend.is_torch()
            else backend.flashinfer_topk_transform
        )
        transform(
            logits,
            metadata.compressed_seq_lens[rows],
            metadata.page_table[rows],
            page_indices[rows],
            metadata.compressed_page_size,
            None if raw_indices is None else raw_indices[rows],
        )
