"""Other projects' attention kernels, called as SGLang calls them for a draft chain: FlashAttention 3 (sgl_kernel),
FlashMLA and FlashInfer.

They know no trees. Every request attends causally, as the last N tokens of its sequence, over pages in random order.
FlashAttention 3 and FlashInfer read MLA latents in bf16 only. With fp8 KV, FlashAttention 3 and FlashMLA take Q in fp8
as well. The conversion of Q is not part of their time. FlashInfer takes Q in bf16 and converts KV. It compiles a module
for each head size and type when it is first used, unless FLASHINFER_DISABLE_JIT=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Peer:
    name: str
    page_size: int
    build: Callable[[Chain], Callable[[], torch.Tensor]]
    kinds: tuple[str, ...]
    fp8_kinds: tuple[str, ...] = ()

    def covers(self, kind: str, fp8: bool) -> bool:
        return kind in (self.fp8_kinds if fp8 else self.kinds)


class Chain:
    """The tensors of one launch.

    Args:
        shape: bench_tree_verify.Shape.
        page_size: tokens per page.
        fp8: whether Q and the caches are float8_e4m3 (otherwise bfloat16).
    """

    def __init__(self, shape: Any, page_size: int, fp8: bool) -> None:
        s = self.shape = shape
        self.page_size, self.fp8 = page_size, fp8
        generator = torch.Generator("cuda").manual_seed(0)
        dtype = FP8 if fp8 else torch.bfloat16

        def random(*size: int) -> torch.Tensor:
            values = torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(
                0, 0.3, generator=generator
            )
            return values.to(dtype)

        self.tokens = s.prefix + s.num_nodes
        pages = -(-self.tokens // page_size)
        order = torch.randperm(s.bs * pages, device="cuda", generator=generator)
        self.page_table = order.to(torch.int32).view(s.bs, pages)
        self.q = random(s.bs, s.num_nodes, s.h_q, s.d_qk)
        self.k = random(s.bs * pages, page_size, s.h_kv, s.d_qk)
        self.v = self.k[..., : s.d_v] if s.kind == "mla" else random(s.bs * pages, page_size, s.h_kv, s.d_v)
        self.seq_lens = self.int32([self.tokens] * s.bs)
        self.cu_seqlens_q = self.cumulative(s.num_nodes)
        self.cu_seqlens_k = self.cumulative(self.tokens)
        self.sm_scale = s.d_qk**-0.5

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    def cumulative(self, each: int) -> torch.Tensor:
        return self.int32([i * each for i in range(self.shape.bs + 1)])

    def slots(self) -> torch.Tensor:
        """[bs, tokens] int64 slot of each token, if the pages are one pool."""
        inside = torch.arange(self.page_size, device="cuda")
        slots = self.page_table.long()[..., None] * self.page_size + inside
        return slots.view(self.shape.bs, -1)[:, : self.tokens]


def flash_attention_3(chain: Chain) -> Callable[[], torch.Tensor]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    s = chain.shape
    q, qv, k, v = chain.q.view(-1, s.h_q, s.d_qk), None, chain.k, chain.v
    if s.kind == "mla":
        q, qv = q[..., s.d_v :].contiguous(), q[..., : s.d_v].contiguous()
        k = k[..., s.d_v :]
    ones = torch.ones(s.bs, s.h_kv, device="cuda") if chain.fp8 else None
    return lambda: flash_attn_with_kvcache(
        q=q,
        qv=qv,
        k_cache=k,
        v_cache=v,
        page_table=chain.page_table,
        cache_seqlens=chain.seq_lens,
        cu_seqlens_q=chain.cu_seqlens_q,
        cu_seqlens_k_new=chain.cu_seqlens_k,
        max_seqlen_q=s.num_nodes,
        softmax_scale=chain.sm_scale,
        causal=True,
        k_descale=ones,
        v_descale=ones,
    )


def flash_mla(chain: Chain) -> Callable[[], torch.Tensor]:
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    s = chain.shape
    metadata, num_splits = get_mla_metadata(chain.seq_lens, s.num_nodes * s.h_q, 1, is_fp8_kvcache=chain.fp8)
    one = torch.ones(1, device="cuda") if chain.fp8 else None
    return lambda: flash_mla_with_kvcache(
        q=chain.q,
        k_cache=chain.k,
        block_table=chain.page_table,
        cache_seqlens=chain.seq_lens,
        head_dim_v=s.d_v,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        softmax_scale=chain.sm_scale,
        causal=True,
        descale_q=one,
        descale_k=one,
    )[0]


def flashinfer(chain: Chain) -> Callable[[], torch.Tensor]:
    import flashinfer

    s = chain.shape
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    pages = chain.page_table.shape[1]
    indptr, indices = chain.cumulative(pages), chain.page_table.view(-1)
    q = chain.q.to(torch.bfloat16).view(-1, s.h_q, s.d_qk)
    if s.kind == "mla":
        mla = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        mla.plan(
            chain.cu_seqlens_q,
            indptr,
            indices,
            chain.seq_lens,
            s.h_q,
            s.d_v,
            s.d_qk - s.d_v,
            chain.page_size,
            True,
            chain.sm_scale,
            q.dtype,
            chain.k.dtype,
        )
        k = chain.k.squeeze(2)
        parts = q[..., : s.d_v].contiguous(), q[..., s.d_v :].contiguous(), k[..., : s.d_v], k[..., s.d_v :]
        return lambda: mla.run(*parts)
    gqa = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    last = chain.int32([chain.tokens - (pages - 1) * chain.page_size] * s.bs)
    gqa.plan(
        chain.cu_seqlens_q,
        indptr,
        indices,
        last,
        s.h_q,
        s.h_kv,
        s.d_qk,
        chain.page_size,
        causal=True,
        sm_scale=chain.sm_scale,
        q_data_type=q.dtype,
        kv_data_type=chain.k.dtype,
    )
    return lambda: gqa.run(q, (chain.k, chain.v))


PEERS = (
    Peer("FA3 page 1", 1, flash_attention_3, ("gqa", "mla"), ("gqa",)),
    Peer("FA3 page 128", 128, flash_attention_3, ("gqa", "mla"), ("gqa",)),
    Peer("FlashMLA page 64", 64, flash_mla, ("mla",), ("mla",)),
    Peer("FlashInfer page 1", 1, flashinfer, ("gqa", "mla"), ("gqa",)),
)


def peers_of(kind: str, fp8: bool, wanted: str) -> Iterator[Peer]:
    """The peers that cover `kind` ("gqa" or "mla") and KV type, and whose name contains one of the words of `wanted`
    (separated by commas, case ignored)."""
    words = [word.strip().lower() for word in wanted.split(",") if word.strip()]
    for peer in PEERS:
        if peer.covers(kind, fp8) and any(word in peer.name.lower() for word in words):
            yield peer
