"""Batches for the tree-verify tests: random trees over a poisoned paged KV pool, and a reference in float64."""

from __future__ import annotations

import functools
import math
import operator
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from draft_tree_cases import ancestor_rows
from sgl_kernel.ddtree import VerifyWorkspace, ancestor_words, verify_gqa, verify_mla, verify_workspace

FP8 = torch.float8_e4m3fn
# Parent of each node; the root's is -1. Parents come before children. () is an empty request.
Parents = tuple


def chain(num_nodes: int) -> Parents:
    return tuple(range(-1, num_nodes - 1))


def star(num_nodes: int) -> Parents:
    return (-1,) + (0,) * (num_nodes - 1)


def random_tree(num_nodes: int, rng: random.Random) -> Parents:
    """Anything from a chain to a star: a parent is one of the last few nodes, or any node."""
    reach = rng.choice((1, 3, 16, 256))
    return (-1,) + tuple(rng.randrange(max(0, i - reach), i) for i in range(1, num_nodes))


@dataclass(frozen=True)
class Case:
    """One launch. The defaults describe a small grouped-query batch."""

    trees: tuple = (chain(5),)
    prefix_lens: tuple = (37,)
    h_q: int = 4
    h_kv: int = 2
    d: int = 64
    mla: bool = False
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: q's
    page_size: int = 1
    index_dtype: torch.dtype = torch.int32
    sliding_window: int = -1
    logit_cap: float = 0.0
    sinks: bool = False
    scales: bool = False
    strided: bool = False  # q and out are slices of wider tensors, as after a fused QKV projection
    padding_rows: int = 0  # rows of q that no request owns
    draft_block: bool = False  # every node of a request sees all others, as in a drafter's block
    num_nodes: int | None = None  # None: the largest tree
    num_splits: int | None = None  # None: as planned
    seed: int = 0

    @property
    def d_qk(self) -> int:
        return 576 if self.mla else self.d

    @property
    def d_v(self) -> int:
        return 512 if self.mla else self.d

    def __str__(self) -> str:
        return f"{[len(t) for t in self.trees]} over {list(self.prefix_lens)}, seed {self.seed}"


@dataclass
class Batch:
    """The tensors of a case. `arguments` are the op's keywords except workspace, out and lse."""

    case: Case
    q: torch.Tensor
    caches: tuple
    arguments: dict
    out: torch.Tensor
    lse: torch.Tensor

    def workspace(self) -> VerifyWorkspace:
        case = self.case
        planned = verify_workspace(
            max_bs=len(case.trees),
            num_nodes=case.num_nodes or max(1, *(len(t) for t in case.trees)),
            h_q=case.h_q,
            h_kv=case.h_kv,
            d_qk=case.d_qk,
            d_v=case.d_v,
            device=self.q.device,
        )
        if case.num_splits is not None and self.q.is_cuda:
            floats = planned.num_nodes * case.h_q * (case.d_v + 1)  # partial O and LSE
            size = 4 * planned.max_bs * case.num_splits * floats
            buffer = torch.empty(size, dtype=torch.uint8, device=self.q.device)
            planned = replace(planned, buffer=buffer, num_splits=(case.num_splits,) * planned.max_bs)
        planned.buffer.fill_(255)  # NaN: the contents must not matter
        return planned

    def run(self, workspace: VerifyWorkspace | None = None, **changed):
        """Run the op into `out` and `lse` and return both. `changed` replaces keywords."""
        arguments = dict(
            self.arguments,
            workspace=workspace or self.workspace(),
            out=self.out,
            lse=self.lse,
        )
        arguments.update(changed)
        op = verify_mla if self.case.mla else verify_gqa
        op(arguments.pop("q", self.q), *arguments.pop("caches", self.caches), **arguments)
        return self.out, self.lse


def _rows_seen(case: Case, tree: Parents, words: int) -> list[list[int]]:
    """The ancestor words of a request's nodes."""
    rows = ancestor_rows(tree, words)
    if not case.draft_block:
        return rows
    everything = [functools.reduce(operator.or_, word) for word in zip(*rows, strict=True)]
    return [everything] * len(rows)


def make_batch(case: Case, device="cpu") -> Batch:
    """Random values, the same on every device. Slots that no request names hold NaN, as do the ends of pages."""
    generator = torch.Generator().manual_seed(case.seed)
    rng = random.Random(case.seed)
    trees, h_q, h_kv = case.trees, case.h_q, case.h_kv
    total_rows = sum(len(t) for t in trees) + case.padding_rows
    words = ancestor_words(case.num_nodes or max(1, *(len(t) for t in trees)))

    # The pages of all requests are in random order. As in SGLang, a request's last page holds its tree after its
    # prefix.
    tokens_of = [length + len(tree) for tree, length in zip(trees, case.prefix_lens, strict=True)]
    pages_of = [-(-tokens // case.page_size) for tokens in tokens_of]
    num_pages = sum(pages_of) + 2  # two without an owner
    free = list(range(num_pages))
    rng.shuffle(free)
    kv_indices, tree_slots, kv_indptr = [], [], [0]
    for tree, length, pages in zip(trees, case.prefix_lens, pages_of, strict=True):
        owned = [free.pop() for _ in range(pages)]
        slots = [p * case.page_size + i for p in owned for i in range(case.page_size)]
        kv_indices += slots[:length] + [free[0] * case.page_size] * 3  # past prefix_lens: a poisoned slot
        tree_slots += slots[length : length + len(tree)]
        kv_indptr.append(len(kv_indices))
    used = sorted(
        {
            slot
            for r, length in enumerate(case.prefix_lens)
            for slot in kv_indices[kv_indptr[r] : kv_indptr[r] + length]
        }
        | set(tree_slots)
    )
    tree_slots += [free[0] * case.page_size] * case.padding_rows

    def cache(d: int) -> torch.Tensor:
        values = torch.full((num_pages * case.page_size, h_kv, d), math.nan)
        values[used] = torch.randn(len(used), h_kv, d, generator=generator)
        return values.to(case.kv_dtype or case.q_dtype).to(device)

    def rows_of_q(d: int, fill: float | None = None) -> torch.Tensor:
        width = d + 64 if case.strided else d
        values = torch.randn(total_rows, h_q, width, generator=generator)
        if fill is not None:
            values.fill_(fill)
        return values.to(case.q_dtype).to(device)[..., :d]

    arguments = dict(
        qo_indptr=_cumulative(len(t) for t in trees),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=case.index_dtype),
        prefix_lens=torch.tensor(case.prefix_lens, dtype=torch.int32),
        tree_slots=torch.tensor(tree_slots, dtype=case.index_dtype),
        ancestors=torch.tensor(
            [row for tree in trees for row in _rows_seen(case, tree, words)]
            + ancestor_rows(chain(case.padding_rows), words),
            dtype=torch.int64,
        ).reshape(-1, words),
        sm_scale=case.d_qk**-0.5,
        logit_cap=case.logit_cap,
        sliding_window=case.sliding_window,
        page_size=case.page_size,
    )
    scale = torch.tensor([0.7]) if case.scales else None
    if case.mla:
        arguments["kv_scale"] = scale
    else:
        arguments["k_scale"] = scale
        arguments["v_scale"] = torch.tensor([1.6]) if case.scales else None
        arguments["sinks"] = torch.randn(h_q, generator=generator) if case.sinks else None
    caches = (cache(576),) if case.mla else (cache(case.d), cache(case.d))
    out = rows_of_q(case.d_v, fill=SENTINEL)
    lse = torch.full((total_rows, h_q), SENTINEL)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    return Batch(case, rows_of_q(case.d_qk), caches, arguments, out, lse.to(device))


SENTINEL = 123.0  # in out and lse before a run; rows that no request owns keep it


def expected(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, h_q, d_v], lse [T, h_q]) in float64, by one dense softmax per request. For a batch on the CPU."""
    case, arguments = batch.case, batch.arguments
    out = torch.full(batch.out.shape, SENTINEL, dtype=torch.float64)
    lse = torch.full(batch.lse.shape, SENTINEL, dtype=torch.float64)
    k_cache = batch.caches[0]
    v_cache = k_cache[..., :512] if case.mla else batch.caches[1]
    k_scale = arguments["kv_scale" if case.mla else "k_scale"]
    v_scale = k_scale if case.mla else arguments["v_scale"]
    row = 0
    for request, (parents, prefix_len) in enumerate(zip(case.trees, case.prefix_lens, strict=True)):
        n = len(parents)
        if n == 0:
            continue
        start = int(arguments["kv_indptr"][request])
        slots = torch.cat(
            (
                arguments["kv_indices"][start : start + prefix_len],
                arguments["tree_slots"][row : row + n],
            )
        ).long()
        depth = [0] * n
        sees = torch.zeros(n, prefix_len + n, dtype=torch.bool)
        sees[:, :prefix_len] = True
        for node, parent in enumerate(parents):
            if parent >= 0:
                depth[node] = depth[parent] + 1
                sees[node] = sees[parent]
            sees[node, prefix_len + node] = True
        if case.draft_block:
            sees[:] = True
        if case.sliding_window >= 0:
            position = torch.tensor([*range(prefix_len), *(prefix_len + x for x in depth)])
            sees &= position >= position[prefix_len:, None] - case.sliding_window

        group = case.h_q // case.h_kv
        k = k_cache[slots].double().repeat_interleave(group, dim=1)
        v = v_cache[slots].double().repeat_interleave(group, dim=1)
        if k_scale is not None:
            k, v = k * k_scale.double(), v * v_scale.double()
        v = torch.where(sees.any(0)[:, None, None], v, 0.0)
        logits = arguments["sm_scale"] * torch.einsum("qhd,khd->hqk", batch.q[row : row + n].double(), k)
        if case.logit_cap:
            logits = case.logit_cap * torch.tanh(logits / case.logit_cap)
        logits = logits.masked_fill(~sees, -math.inf)
        sinks = arguments.get("sinks")
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, n, 1)
            logits = torch.cat((logits, column), dim=2)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        out[row : row + n] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
        lse[row : row + n] = logits.logsumexp(-1).T
        row += n
    return out, lse


# Largest error of a row of O, relative to the row's norm. O is rounded to q's type, which costs at most 2^-9 or 2^-12
# in norm, and the kernels round the softmax weights to the same type. Sums are float32 or wider. float8_e4m3 values are
# exact in both types and the reference reads the same quantized cache, so a float8 cache needs no wider bound.
O_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# Absolute error of the natural logarithm. The products are exact in float32, and logits are of order 1 to 50.
LSE_TOLERANCE = 1e-3
# (O, LSE) for kernels that multiply in float8_e4m3. Rounding a weight costs at most 2^-4 of it, and the accumulators of
# these products keep about 14 bits. SGLANG_DDTREE_FP8=exact does not round weights. The reference has Q as
# the kernel rounds it.
FP8_TOLERANCE, EXACT_FP8_TOLERANCE = (5e-2, 1e-2), (1e-2, 1e-2)


def multiplies_fp8(batch: Batch) -> bool:
    """Whether the batch's kernel multiplies a float8 cache as it is stored. The common kernels convert it to 16 bits on
    sm_100, and with SGLANG_DDTREE_FP8=exact."""
    if not batch.out.is_cuda or batch.case.kv_dtype != FP8:
        return False
    major = torch.cuda.get_device_capability()[0]
    own = major == 9 and os.environ.get("SGLANG_DDTREE_SM90") != "0"
    return own or (major != 10 and not exact_fp8())


def exact_fp8() -> bool:
    return os.environ.get("SGLANG_DDTREE_FP8") == "exact"


def tolerances(batch: Batch) -> tuple[float, float]:
    """Largest errors of O and LSE."""
    if multiplies_fp8(batch):
        return EXACT_FP8_TOLERANCE if exact_fp8() else FP8_TOLERANCE
    return O_TOLERANCE[batch.case.q_dtype], LSE_TOLERANCE


def multiplied_q(batch: Batch) -> torch.Tensor:
    """q on the CPU as the batch's kernel multiplies it: in fp8, each row is rounded to float8_e4m3, with the power of two
    as its scale that brings it below 256."""
    q = batch.q.cpu()
    if not multiplies_fp8(batch) or exact_fp8():
        return q
    scale = torch.exp2(7 - q.float().abs().amax(-1, keepdim=True).log2().floor())
    return ((q.float() * scale).to(FP8).float() / scale).to(q.dtype)


def assert_close(batch: Batch, want_out: torch.Tensor, want_lse: torch.Tensor) -> None:
    """Compare out and lse of a batch with the reference, including rows that no request owns."""
    out, lse = batch.out.cpu().double(), batch.lse.cpu().double()
    want_out, want_lse = want_out.cpu().double(), want_lse.cpu().double()
    assert torch.isfinite(out).all(), (
        f"{batch.case}: {int((~torch.isfinite(out)).sum())} values of out not finite"
    )
    error = (out - want_out).norm(dim=-1) / want_out.norm(dim=-1).clamp_min(1e-6)
    tolerance, lse_tolerance = tolerances(batch)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance, (
        f"{batch.case}: out is {worst:.2e} off at (row, head) {_where(error)}, allowed {tolerance:.0e}"
    )
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse)), f"{batch.case}: lse is -inf in other places"
    error = torch.where(torch.isinf(want_lse), 0.0, (lse - want_lse).abs())
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= lse_tolerance, f"{batch.case}: lse is {worst:.2e} off at (row, head) {_where(error)}"


def _where(error: torch.Tensor) -> tuple:
    return tuple(divmod(int(error.nan_to_num(math.inf).argmax()), error.shape[1]))


def _cumulative(lengths: Iterable[int]) -> torch.Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=torch.int32)
