"""Tree-verify attention: the CPU op against a float64 reference in torch, and the CUDA op against the CPU op."""

import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sgl_kernel.ddtree.verify
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from sgl_kernel.ddtree import GQA_HEAD_SIZES, VerifyWorkspace, verify_workspace
from tree_verify_cases import (
    FP8,
    Batch,
    Case,
    assert_close,
    chain,
    expected,
    make_batch,
    multiplied_q,
    random_tree,
    star,
)

register_cpu_ci(est_time=60, suite="kernel")
register_cuda_ci(est_time=90, suite="gpu")

CUDA = ["cuda"] if torch.cuda.is_available() else []
EXACT = []
if CUDA and torch.cuda.get_device_capability()[0] == 9:
    CUDA.append("cuda, common kernels")  # sm_90 has kernels of its own, but can run the common ones too
    EXACT += ["cuda, exact fp8", "cuda, common kernels, exact fp8"]
on_each_device = pytest.mark.parametrize("device", ["cpu", *CUDA], indirect=True)
on_each_kernel = pytest.mark.parametrize("device", ["cpu", *CUDA, *EXACT], indirect=True)
on_cuda = pytest.mark.parametrize(
    "device",
    CUDA or [pytest.param("cuda", marks=pytest.mark.skip(reason="needs a CUDA device"))],
    indirect=True,
)


@pytest.fixture
def device(request, monkeypatch):
    name, *variant = request.param.split(", ")
    monkeypatch.setenv("SGLANG_DDTREE_SM90", "0" if "common kernels" in variant else "1")
    monkeypatch.setenv("SGLANG_DDTREE_FP8", "exact" if "exact fp8" in variant else "fast")
    return name


def compare(case: Case, device: str) -> None:
    if os.environ["SGLANG_DDTREE_FP8"] == "exact" and case.kv_dtype != FP8:
        pytest.skip("only fp8 KV has an exact mode")
    compare_batches(make_batch(case, device), make_batch(case))


def compare_batches(batch: Batch, reference: Batch) -> None:
    """`reference` is the same on the CPU."""
    batch.run()
    if batch.q.is_cuda:
        assert_close(batch, *reference.run(q=multiplied_q(batch)))
    else:
        assert_close(batch, *expected(reference))


CASES = {
    "one node, zero prefix": Case(trees=(chain(1),), prefix_lens=(0,)),
    "one node": Case(trees=(chain(1),), prefix_lens=(200,)),
    "zero prefix": Case(trees=(star(9),), prefix_lens=(0,)),
    "chain": Case(trees=(chain(17),), prefix_lens=(130,)),
    "star": Case(trees=(star(17),), prefix_lens=(130,)),
    "star of 256": Case(trees=(star(256),), prefix_lens=(65,)),
    "chain of 256": Case(trees=(chain(256),), prefix_lens=(64,)),
    "random 256": Case(trees=(random_tree(256, random.Random(7)),), prefix_lens=(511,)),
    "65 nodes": Case(trees=(chain(65),), prefix_lens=(63,)),
    "draft block": Case(trees=(chain(12), chain(12)), prefix_lens=(130, 0), draft_block=True),
    "draft block of several tiles": Case(
        trees=(chain(33), chain(33)), prefix_lens=(130, 64), h_q=16, h_kv=1, d=128, draft_block=True
    ),
    "one KV head": Case(trees=(star(5),), prefix_lens=(99,), h_q=6, h_kv=1),
    "multi-head": Case(trees=(star(5),), prefix_lens=(99,), h_q=3, h_kv=3),
    "group of 3": Case(trees=(chain(11),), prefix_lens=(99,), h_q=9, h_kv=3),
    "group of 7": Case(trees=(chain(10), star(3)), prefix_lens=(99, 3), h_q=14, h_kv=2, d=128),
    "group of 71": Case(trees=(star(4),), prefix_lens=(70,), h_q=71, h_kv=1),
    "group of 16": Case(trees=(star(13),), prefix_lens=(1,), h_q=16, h_kv=1, d=128),
    "ragged, one empty": Case(
        trees=(chain(3), (), star(33), chain(1), ()),
        prefix_lens=(300, 77, 0, 1, 0),
        padding_rows=3,
    ),
    "all empty": Case(trees=((), ()), prefix_lens=(5, 0), padding_rows=4, num_nodes=8),
    "long and short": Case(trees=(chain(4), star(4), chain(4)), prefix_lens=(5000, 3, 1), num_splits=7),
    "num_nodes above the largest tree": Case(trees=(chain(5),), num_nodes=256),
    "pages": Case(trees=(star(10), chain(7)), prefix_lens=(61, 65), page_size=16, h_q=8),
    "pages of 64": Case(trees=(star(10),), prefix_lens=(129,), page_size=64),
    "pages of 8": Case(trees=(star(10),), prefix_lens=(129,), page_size=8),
    "pages of 48": Case(trees=(star(10),), prefix_lens=(700,), page_size=48, d=192),
    "int64 indices": Case(trees=(chain(9),), index_dtype=torch.int64),
    "strided": Case(trees=(chain(9),), strided=True, d=128),
    "cap": Case(trees=(star(9),), logit_cap=2.0),
    "sinks": Case(trees=(star(9),), sinks=True),
    "sinks, split": Case(trees=(star(9),), prefix_lens=(900,), sinks=True, num_splits=5),
    "window in the prefix": Case(
        trees=(random_tree(40, random.Random(3)),), prefix_lens=(300,), sliding_window=100
    ),
    "window within the tree": Case(trees=(chain(40),), prefix_lens=(300,), sliding_window=7, num_splits=4),
    "window of the token itself": Case(trees=(chain(6),), sliding_window=0),
    "fp8": Case(trees=(star(9),), kv_dtype=FP8),
    "fp8 with scales": Case(trees=(star(9), chain(3)), prefix_lens=(70, 5), kv_dtype=FP8, scales=True),
    "all options": Case(
        trees=(random_tree(30, random.Random(5)), star(3)),
        prefix_lens=(400, 9),
        kv_dtype=FP8,
        scales=True,
        sinks=True,
        logit_cap=30.0,
        sliding_window=150,
        strided=True,
        page_size=16,
        num_splits=3,
    ),
    "MLA": Case(mla=True, h_q=8, h_kv=1, trees=(star(9),)),
    "MLA, 1 head": Case(mla=True, h_q=1, h_kv=1, trees=(chain(3),)),
    "MLA, 128 heads": Case(mla=True, h_q=128, h_kv=1, trees=(chain(3),)),
    "MLA, 256 nodes": Case(mla=True, h_q=2, h_kv=1, trees=(star(256),)),
    "MLA, draft block of several tiles": Case(
        mla=True, h_q=16, h_kv=1, trees=(chain(33),), prefix_lens=(130,), draft_block=True
    ),
    "MLA, fp8, draft block of several tiles": Case(
        mla=True, h_q=16, h_kv=1, trees=(chain(33),), prefix_lens=(130,), draft_block=True, kv_dtype=FP8
    ),
    "fp8, draft block of several tiles": Case(
        trees=(chain(33),), prefix_lens=(130,), h_q=16, h_kv=1, d=128, draft_block=True, kv_dtype=FP8
    ),
    "MLA, ragged": Case(
        mla=True,
        h_q=4,
        h_kv=1,
        trees=(chain(3), (), star(20)),
        prefix_lens=(300, 7, 0),
        padding_rows=2,
        page_size=64,
        num_splits=5,
    ),
    "MLA, window and cap": Case(mla=True, h_q=4, h_kv=1, trees=(star(5),), sliding_window=9, logit_cap=9.0),
    "MLA, fp8": Case(mla=True, h_q=8, h_kv=1, trees=(star(9),), kv_dtype=FP8, scales=True),
}


@on_each_kernel
@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    compare(CASES[name], device)


# Every kernel instantiation: types x head size x tile height (which follows from the packed rows), with and without
# splits.
@on_each_kernel
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("num_nodes", [3, 30, 90])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [*GQA_HEAD_SIZES, "MLA"])
def test_instantiation(head_size, q_dtype, kv_dtype, num_nodes, num_splits, device):
    mla = head_size == "MLA"
    compare(
        Case(
            trees=(random_tree(num_nodes, random.Random(num_nodes)), chain(2)),
            prefix_lens=(333, 18),
            h_q=4,
            h_kv=1 if mla else 2,
            d=0 if mla else head_size,
            mla=mla,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            scales=kv_dtype is not None,
            num_splits=num_splits,
        ),
        device,
    )


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    requests = rng.randint(1, 5)
    mla = rng.random() < 0.3
    h_kv = 1 if mla else rng.choice((1, 2, 3, 4))
    kv_dtype = rng.choice((None, FP8))
    sizes = [rng.choice((0, 1, 2, 7, 16, 33, 64, 100)) for _ in range(requests)]
    return Case(
        trees=tuple(random_tree(n, rng) if n else () for n in sizes),
        prefix_lens=tuple(rng.choice((0, 1, 31, 64, 200, 777)) for _ in sizes),
        h_q=h_kv * rng.choice((1, 2, 3, 8)),
        h_kv=h_kv,
        d=rng.choice(GQA_HEAD_SIZES),
        mla=mla,
        q_dtype=rng.choice((torch.bfloat16, torch.float16)),
        kv_dtype=kv_dtype,
        page_size=rng.choice((1, 16, 64)),
        index_dtype=rng.choice((torch.int32, torch.int64)),
        sliding_window=rng.choice((-1, -1, 0, 5, 120)),
        logit_cap=rng.choice((0.0, 0.0, 20.0)),
        sinks=not mla and rng.random() < 0.3,
        scales=kv_dtype is not None and rng.random() < 0.5,
        strided=rng.random() < 0.3,
        padding_rows=rng.choice((0, 5)),
        num_nodes=rng.choice((None, 128)),
        num_splits=rng.choice((None, 1, 2, 9)),
        seed=seed,
    )


@on_each_kernel
@pytest.mark.parametrize("seed", range(48))
def test_random_trees_and_shapes(seed, device):
    compare(random_case(seed), device)


# On sm_90, a block of 128 packed rows takes several tasks (a request's KV head and 128 rows each), but at most 12. Up to
# 32 requests are sorted by length. A card has 132 multiprocessors or fewer.
MANY_TASKS = {
    "ragged": dict(sizes=(100, 1, 0, 70, 33, 64, 2, 90, 0, 65, 100, 17), h_kv=12),
    "pages": dict(sizes=(70, 0, 65, 33, 1, 66, 2, 70, 68), h_kv=12, page_size=64),
    "fewer than multiprocessors": dict(sizes=(70, 0, 65), h_kv=10, page_size=64),
    "more requests than are sorted": dict(sizes=(40, 3, 0, 33, 39) + (1,) * 30, h_kv=5),
    "more than 12 per multiprocessor": dict(sizes=(65, 66, 0) + (1,) * 29, h_kv=25),
    "splits": dict(sizes=(70, 0, 33, 66), h_kv=8, num_splits=3, page_size=64),
    "one tile each": dict(sizes=(40,) * 14, h_kv=10, prefixes=(0, 1, 70)),
}


@on_each_kernel
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize("name", MANY_TASKS)
def test_many_tasks(name, head_size, kv_dtype, device):
    values = dict(MANY_TASKS[name])
    rng = random.Random(head_size)
    sizes, prefixes = values.pop("sizes"), values.pop("prefixes", (0, 1, 63, 130, 300, 400))
    compare(
        Case(
            trees=tuple(random_tree(n, rng) if n else () for n in sizes),
            prefix_lens=tuple(rng.choice(prefixes) for _ in sizes),
            h_q=2 * values["h_kv"],
            d=head_size,
            kv_dtype=kv_dtype,
            padding_rows=3,
            **values,
        ),
        device,
    )


@on_cuda
@pytest.mark.parametrize("more", [0, 1])
def test_kernel_for_several_tasks(more, device):
    """Over 16-bit KV, sm_90's kernel for several tasks per block runs if there are more tasks than multiprocessors."""
    own = torch.cuda.get_device_capability()[0] == 9 and os.environ["SGLANG_DDTREE_SM90"] == "1"
    tasks = torch.cuda.get_device_properties(device).multi_processor_count + more
    case = Case(trees=(star(40),), prefix_lens=(200,), h_q=2 * tasks, h_kv=tasks, d=64, num_splits=1)
    batch = make_batch(case, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.run()
        torch.cuda.synchronize()
    kernels = " ".join(event.key for event in profile.key_averages())
    assert ("gqa_sm90_partial_kernel" in kernels) == (own and not more), kernels
    assert ("gqa_sm90_tasks_kernel" in kernels) == (own and bool(more)), kernels
    compare_batches(batch, make_batch(case))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_float32(device):
    """The reference itself, which rounds nothing but its result."""
    compare(
        Case(trees=(star(9),), prefix_lens=(150,), q_dtype=torch.float32, sinks=True),
        device,
    )


@on_each_device
def test_duplicate_siblings_agree(device):
    """Siblings with the same token have the same q, K and V, so they get the same answer at any index."""
    batch = make_batch(Case(trees=((-1, 0, 1, 0, 3),), prefix_lens=(77,)), device)
    slots = batch.arguments["tree_slots"].long()
    for first, second in ((1, 3), (2, 4)):
        batch.q[second] = batch.q[first]
        for cache in batch.caches:
            cache[slots[second]] = cache[slots[first]]
    out, lse = batch.run()
    torch.testing.assert_close(out[3:5], out[1:3], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[3:5], lse[1:3], rtol=0, atol=1e-4)


@on_each_device
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("exponent", [-30, 30])
def test_range_of_bfloat16(exponent, mla, kv_dtype, device):
    """q far outside float16's range, with a softmax scale that brings the logits back to order 1."""
    case = Case(mla=mla, h_q=4, h_kv=1, trees=(star(9),), prefix_lens=(150,), kv_dtype=kv_dtype)
    reference = make_batch(case)
    batch = make_batch(case, device)
    for one in (reference, batch):
        one.q.mul_(2.0**exponent)
        one.arguments["sm_scale"] *= 2.0**-exponent
    compare_batches(batch, reference)


@on_each_kernel
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_maximum_rises(shift, mla, kv_dtype, page_size, device):
    """Every other tile of 64 tokens (the even or the odd ones) raises the row maximum, so that all earlier results are
    rescaled: kernels for 16-bit KV do so if it rises by more than 8, those for fp8 always. The last dimension, which MLA
    does not use as a value, brings the rise. The logits are small in fp8, whose sums keep about 14 bits."""
    case = Case(
        mla=mla,
        h_q=8,
        h_kv=1,
        trees=(star(20),),
        prefix_lens=(330,),
        kv_dtype=kv_dtype,
        page_size=page_size,
        num_splits=1,
    )
    reference = make_batch(case)
    batch = make_batch(case, device)
    levels = (torch.arange(330) // 64 + shift) // 2
    for one in (reference, batch):
        one.q.mul_(0.25)[..., -1] = 8
        keys, slots = one.caches[0], one.arguments["kv_indices"][:330].long()
        step = (12 if kv_dtype is None else 1) / (8 * case.d_qk**-0.5 * math.log2(math.e))
        rise = (step * levels).to(keys.dtype).to(keys.device)
        keys.view(-1, case.d_qk)[slots, -1] = rise
    compare_batches(batch, reference)


@on_each_device
def test_row_that_sees_nothing(device):
    """No valid argument produces such a row. Clearing the root's own bit does: at prefix length 0 nothing is left."""
    batch = make_batch(Case(trees=(chain(1),), prefix_lens=(0,)), device)
    batch.arguments["ancestors"].zero_()
    if device == "cpu":  # the CPU op always checks values
        with pytest.raises(ValueError, match="the node itself"):
            batch.run()
        return
    out, lse = batch.run()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@on_each_device
@pytest.mark.parametrize("mla", [False, True])
def test_lse_is_optional(mla, device):
    batch = make_batch(Case(mla=mla, h_q=4, h_kv=1, prefix_lens=(500,)), device)
    out = batch.run()[0].clone()
    assert torch.equal(batch.run(lse=None)[0], out)


@on_each_device
def test_allocates_out(device):
    batch = make_batch(Case(), device)
    out, _ = batch.run()
    arguments = dict(batch.arguments, workspace=batch.workspace())
    again = sgl_kernel.ddtree.verify_gqa(batch.q, *batch.caches, **arguments)
    assert torch.equal(again, out)
    batch = make_batch(Case(mla=True, h_kv=1), device)
    out, _ = batch.run()
    arguments = dict(batch.arguments, workspace=batch.workspace())
    again = sgl_kernel.ddtree.verify_mla(batch.q, *batch.caches, **arguments)
    assert torch.equal(again, out)


@on_each_device
@pytest.mark.parametrize("mla", [False, True])
def test_same_bits_twice(mla, device):
    case = Case(
        mla=mla,
        h_q=8,
        h_kv=1,
        trees=(star(20), chain(9)),
        prefix_lens=(3000, 700),
        num_splits=6,
    )
    batch = make_batch(case, device)
    first = [x.clone() for x in batch.run()]
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, batch.run(), strict=True))


@on_each_kernel
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("h_q", [2, 16])
@pytest.mark.parametrize("head_size", [*GQA_HEAD_SIZES, "MLA"])
def test_pages_change_no_bit(head_size, h_q, kv_dtype, page_size, device):
    """Loads by page, on kernels that have them, give the same bits. Ends of pages hold NaN."""
    if os.environ["SGLANG_DDTREE_FP8"] == "exact" and kv_dtype != FP8:
        pytest.skip("only fp8 KV has an exact mode")
    mla = head_size == "MLA"
    case = Case(
        trees=(random_tree(30, random.Random(1)), chain(3), chain(9), chain(2)),
        prefix_lens=(1000, 17, 128, 0),
        h_q=h_q,
        h_kv=1 if mla else 2,
        d=0 if mla else head_size,
        mla=mla,
        kv_dtype=kv_dtype,
        scales=kv_dtype is not None,
        page_size=page_size,
        num_splits=3,
    )
    batch = make_batch(case, device)
    want = [x.clone() for x in batch.run(page_size=1)]
    assert all(torch.equal(x, y) for x, y in zip(want, batch.run(), strict=True))


@on_cuda
@pytest.mark.parametrize("mla", [False, True])
def test_offsets_beyond_int32(mla, device):
    """A pool of more than 2^31 elements."""
    case = Case(mla=mla, h_q=4, h_kv=1, d=128, index_dtype=torch.int64)
    batch = make_batch(case, device)
    want = [x.clone() for x in batch.run()]
    shift = 2**31 // case.d_qk + 1
    moved = []
    for cache in batch.caches:
        pool = torch.empty((shift + cache.shape[0], *cache.shape[1:]), dtype=cache.dtype, device=device)
        pool[shift:] = cache
        moved.append(pool)
    arguments = batch.arguments
    out, lse = batch.run(
        caches=moved,
        kv_indices=arguments["kv_indices"] + shift,
        tree_slots=arguments["tree_slots"] + shift,
    )
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@on_cuda
@pytest.mark.parametrize("mla", [False, True])
def test_a_million_tokens(mla, device):
    compare(
        Case(mla=mla, h_q=2, h_kv=1, trees=(star(3),), prefix_lens=(1_000_000,), page_size=64),
        device,
    )


@on_cuda
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("heads", [(8, 1), (128, 64), "MLA"])
def test_graph_replay(heads, kv_dtype, device):
    """One capture serves other lengths, slots, trees and values, with eager's bits and without a host wait. With 64 KV
    heads, blocks of sm_90 take several tasks."""
    mla = heads == "MLA"
    h_q, h_kv = (8, 1) if mla else heads

    def case(trees, prefix_lens, seed):
        rows = sum(len(t) for t in trees)
        return Case(
            trees=trees,
            prefix_lens=prefix_lens,
            mla=mla,
            h_q=h_q,
            h_kv=h_kv,
            d=128,
            kv_dtype=kv_dtype,
            padding_rows=80 - rows,
            num_nodes=64,
            seed=seed,
        )

    first = make_batch(case((chain(16), star(7), chain(2)), (40, 900, 3), 1), device)
    others = [
        make_batch(case(trees, lengths, seed), device)
        for seed, (trees, lengths) in enumerate(
            [
                ((star(64), chain(1), ()), (2500, 0, 17)),
                (((), (), chain(5)), (0, 0, 1)),
                ((star(20), chain(40), star(9)), (1, 30, 64)),
            ],
            start=2,
        )
    ]
    pool_rows = max(b.caches[0].shape[0] for b in [first, *others])
    index_rows = max(b.arguments["kv_indices"].shape[0] for b in [first, *others])
    static_caches = tuple(
        torch.full((pool_rows, *c.shape[1:]), math.nan, dtype=c.dtype, device=device) for c in first.caches
    )
    static = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in first.arguments.items()
    }
    static["kv_indices"] = first.arguments["kv_indices"].new_zeros(index_rows)
    workspace = first.workspace()
    q = first.q.clone()

    def load(batch):
        q.copy_(batch.q)
        for pool, cache in zip(static_caches, batch.caches, strict=True):
            pool.fill_(math.nan)
            pool[: cache.shape[0]] = cache
        for name, value in batch.arguments.items():
            if name == "kv_indices":
                static[name][: value.shape[0]] = value
            elif isinstance(value, torch.Tensor):
                static[name].copy_(value)

    def run():
        first.run(workspace, q=q, caches=static_caches, **static)

    load(first)
    run()  # loads the modules, which a capture cannot do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for batch in [*others, first]:
        load(batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            replayed = [x.clone() for x in (first.out, first.lse)]
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows = int(batch.arguments["qo_indptr"][-1])
        assert torch.equal(replayed[0][:rows], first.out[:rows]), f"{batch.case}"
        assert torch.equal(replayed[1][:rows], first.lse[:rows]), f"{batch.case}"
        got = make_batch(batch.case, device)  # its other rows are as they were before any run
        got.out[:rows], got.lse[:rows] = (x[:rows] for x in replayed)
        assert_close(got, *make_batch(batch.case).run(q=multiplied_q(got)))


@on_cuda
def test_runs_on_the_current_stream(device):
    """The op runs on the current stream, after the work already queued there."""
    batch = make_batch(Case(prefix_lens=(500,)), device)
    want = batch.run()[0].clone()
    workspace, q = batch.workspace(), torch.zeros_like(batch.q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            20_000_000
        )  # cycles; a launch on another stream would read q while it is still zero
        q.copy_(batch.q)
        batch.run(workspace, q=q)
    stream.synchronize()
    assert torch.equal(batch.out, want)


def replaced(**values):
    return lambda batch: values


# A change to a valid batch, and the error that it causes: the argument, what was expected, what was given.
WRONG_ARGUMENTS = {
    "q dtype": (lambda b: {"q": b.q.double()}, r"q: expected dtype bfloat16 or float16.*got float64"),
    "q rank": (lambda b: {"q": b.q[0]}, r"q: expected 3 dimensions, got shape \[4, 64\]"),
    "q stride": (
        lambda b: {"q": b.q.new_zeros(5, 64, 4).transpose(1, 2)},
        r"q: expected a last dimension with stride 1, got strides \[256, 1, 4\]",
    ),
    "q alignment": (
        lambda b: {"q": b.q.new_zeros(5 * 4 * 64 + 1)[1:].view(5, 4, 64)},
        r"q: expected data aligned to 16 bytes, got an address 2 bytes past one",
    ),
    "q outer stride": (
        lambda b: {"q": b.q.new_zeros(5, 4, 65)[..., :64]},
        r"q: expected strides that are multiples of 16 bytes, got strides \[260, 65, 1\]",
    ),
    "head size": (
        lambda b: {"q": b.q.new_zeros(5, 4, 80), "caches": [c.new_zeros(9, 2, 80) for c in b.caches]},
        r"q: expected one of the head sizes 64, 96, 128, 192, 256, got shape \[5, 4, 80\]",
    ),
    "heads": (
        lambda b: {"q": b.q.new_zeros(5, 3, 64)},
        r"q: expected a multiple of the cache's 2 heads, got 3 heads",
    ),
    "k_cache dtype": (
        lambda b: {"caches": [c.half() for c in b.caches]},
        r"k_cache: expected dtype bfloat16 or float8_e4m3fn, got float16",
    ),
    "k_cache shape": (
        lambda b: {"caches": [b.caches[0][..., :32], b.caches[1]]},
        r"k_cache: expected shape \[any, any, 64\], got \[\d+, 2, 32\]",
    ),
    "v_cache dtype": (
        lambda b: {"caches": [b.caches[0], b.caches[1].to(FP8)]},
        r"v_cache: expected dtype bfloat16, got float8_e4m3fn",
    ),
    "v_cache slots": (
        lambda b: {"caches": [b.caches[0], b.caches[1][1:]]},
        r"v_cache: expected shape \[\d+, 2, 64\], got \[\d+, 2, 64\]",
    ),
    "qo_indptr dtype": (
        lambda b: {"qo_indptr": b.arguments["qo_indptr"].long()},
        r"qo_indptr: expected dtype int32, got int64",
    ),
    "qo_indptr empty": (
        lambda b: {"qo_indptr": b.arguments["qo_indptr"][:1]},
        r"qo_indptr: expected shape \[bs \+ 1\] with bs of 1 or more, got \[1\]",
    ),
    "kv_indptr length": (
        lambda b: {"kv_indptr": b.arguments["kv_indptr"][:1]},
        r"kv_indptr: expected shape \[2\], got \[1\]",
    ),
    "kv_indices dtype": (
        lambda b: {"kv_indices": b.arguments["kv_indices"].float()},
        r"kv_indices: expected dtype int32 or int64, got float32",
    ),
    "prefix_lens length": (
        lambda b: {"prefix_lens": b.arguments["prefix_lens"].repeat(2)},
        r"prefix_lens: expected shape \[1\], got \[2\]",
    ),
    "tree_slots length": (
        lambda b: {"tree_slots": b.arguments["tree_slots"][1:], "ancestors": b.arguments["ancestors"][1:]},
        r"tree_slots: expected shape \[5\], got \[4\]",
    ),
    "ancestors dtype": (
        lambda b: {"ancestors": b.arguments["ancestors"].int()},
        r"ancestors: expected dtype int64, got int32",
    ),
    "ancestors rows": (
        lambda b: {"ancestors": b.arguments["ancestors"][1:]},
        r"ancestors: expected shape \[5, any\], got \[4, 1\]",
    ),
    "ancestors strides": (
        lambda b: {"ancestors": b.arguments["ancestors"].repeat(1, 2)[:, :1]},
        r"ancestors: expected a contiguous tensor, got shape \[5, 1\] with strides \[2, 1\]",
    ),
    "ancestors too small": (
        lambda b: {"workspace": VerifyWorkspace(b.workspace().buffer, (1,), 65)},
        r"ancestors: expected at least 2 words per node for num_nodes = 65, got shape \[5, 1\]",
    ),
    "num_nodes": (
        lambda b: {"workspace": VerifyWorkspace(b.workspace().buffer, (1,), 257)},
        r"num_nodes: expected 1 to 256, got 257",
    ),
    "num_splits": (
        lambda b: {"workspace": VerifyWorkspace(b.workspace().buffer, (0,), 5)},
        r"num_splits: expected 1 or more, got 0",
    ),
    "workspace dtype": (
        lambda b: {"workspace": VerifyWorkspace(torch.zeros(64, device=b.q.device), (1,), 5)},
        r"workspace: expected dtype uint8, got float32",
    ),
    "workspace batch": (
        lambda b: {"workspace": VerifyWorkspace(b.workspace().buffer, (), 5)},
        r"workspace: expected one for at least 1 requests, got one for 0",
    ),
    "page_size": (replaced(page_size=0), r"page_size: expected 1 or more tokens, got 0"),
    "sm_scale": (replaced(sm_scale=0.0), r"sm_scale: expected a positive number, got 0"),
    "logit_cap": (
        replaced(logit_cap=-1.0),
        r"logit_cap: expected a positive number, or 0 for no cap, got -1",
    ),
    "sinks dtype": (
        lambda b: {"sinks": b.q.new_zeros(4)},
        r"sinks: expected dtype float32, got bfloat16",
    ),
    "sinks shape": (
        lambda b: {"sinks": torch.zeros(2, device=b.q.device)},
        r"sinks: expected shape \[4\], got \[2\]",
    ),
    "k_scale without fp8": (
        lambda b: {"k_scale": torch.ones(1, device=b.q.device)},
        r"k_scale: expected None unless the KV cache is float8_e4m3fn, got a tensor",
    ),
    "v_scale shape": (
        lambda b: {"v_scale": torch.ones(2, device=b.q.device), "caches": [c.to(FP8) for c in b.caches]},
        r"v_scale: expected one element, got shape \[2\]",
    ),
    "out dtype": (lambda b: {"out": b.out.float()}, r"o: expected dtype bfloat16, got float32"),
    "out shape": (lambda b: {"out": b.out[1:]}, r"o: expected shape \[5, 4, 64\], got \[4, 4, 64\]"),
    "lse dtype": (lambda b: {"lse": b.lse.double()}, r"lse: expected dtype float32, got float64"),
    "lse shape": (lambda b: {"lse": b.lse.T}, r"lse: expected shape \[5, 4\], got \[4, 5\]"),
}


@on_each_device
@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_argument(name, device):
    change, message = WRONG_ARGUMENTS[name]
    batch = make_batch(Case(), device)
    with pytest.raises(ValueError, match=message):
        batch.run(**change(batch))


WRONG_MLA_ARGUMENTS = {
    "head size": (
        lambda b: {"q": b.q[..., :512], "caches": [b.caches[0][..., :512]]},
        r"q: expected a last dimension of 576 \(ckv 512, kpe 64\), got shape \[5, 4, 512\]",
    ),
    "two latent heads": (
        lambda b: {"caches": [b.caches[0].repeat(1, 2, 1)]},
        r"kv_cache: expected shape \[slots, 1, 576\], got \[\d+, 2, 576\]",
    ),
    "kv_scale without fp8": (
        lambda b: {"kv_scale": torch.ones(1, device=b.q.device)},
        r"kv_scale: expected None unless the KV cache is float8_e4m3fn, got a tensor",
    ),
    "out shape": (
        lambda b: {"out": b.q.clone()},
        r"o: expected shape \[5, 4, 512\], got \[5, 4, 576\]",
    ),
}


@on_each_device
@pytest.mark.parametrize("name", WRONG_MLA_ARGUMENTS)
def test_wrong_mla_argument(name, device):
    change, message = WRONG_MLA_ARGUMENTS[name]
    batch = make_batch(Case(mla=True, h_kv=1), device)
    with pytest.raises(ValueError, match=message):
        batch.run(**change(batch))


def edited(name, index, value):
    def change(batch):
        tensor = batch.arguments[name].clone()
        tensor[index] = value
        return {name: tensor}

    return change


# Values that shapes cannot show, in a batch with trees of 5 and 2 nodes and one padding row.
WRONG_VALUES = {
    "slot below the pool": (
        edited("tree_slots", 3, -1),
        r"tree_slots\[3\]: expected a slot of the pool, 0 to \d+, got -1",
    ),
    "slot past the pool": (
        edited("kv_indices", 2, 10**6),
        r"kv_indices\[2\]: expected a slot of the pool, 0 to \d+, got 1000000",
    ),
    "slot apart from its page": (
        replaced(page_size=16),
        r"kv_indices\[\d+\]: expected \d+, the slot after the token before \(page_size = 16\), got \d+",
    ),
    "bit of another request": (
        edited("ancestors", 6, 0b1011),
        r"ancestors\[6\]: expected bits inside its request \(nodes 0 to 1\), got 3",
    ),
    "sign bit": (
        edited("ancestors", 0, -(2**63) + 1),
        r"ancestors\[0\]: expected bits inside its request \(nodes 0 to 4\), got 63",
    ),
    "no self bit": (
        edited("ancestors", 4, 0b01111),
        r"ancestors\[4\]: expected bit 4 \(the node itself\), got 0",
    ),
    "qo_indptr start": (edited("qo_indptr", 0, 1), r"qo_indptr\[0\]: expected 0, got 1"),
    "qo_indptr falls": (
        edited("qo_indptr", 2, 3),
        r"qo_indptr\[2\]: expected 5 to 8 \(at most num_nodes = 5 rows per request, 8 in total\), got 3",
    ),
    "too many rows": (
        edited("qo_indptr", 1, 6),
        r"qo_indptr\[1\]: expected 0 to 5 \(at most num_nodes = 5 rows per request, 8 in total\), got 6",
    ),
    "rows past q": (
        edited("qo_indptr", 2, 9),
        r"qo_indptr\[2\]: expected 5 to 8 .* got 9",
    ),
    "kv_indptr past the end": (
        edited("kv_indptr", 2, 1000),
        r"kv_indptr\[2\]: expected \d+ to \d+ \(the length of kv_indices\), got 1000",
    ),
    "prefix too long": (
        edited("prefix_lens", 0, 41),
        r"prefix_lens\[0\]: expected 0 to 40 \(the room that kv_indptr leaves\), got 41",
    ),
    "negative prefix": (
        edited("prefix_lens", 1, -1),
        r"prefix_lens\[1\]: expected 0 to \d+ .* got -1",
    ),
}


@on_each_device
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_value(name, mla, device):
    change, message = WRONG_VALUES[name]
    case = Case(mla=mla, h_kv=1, trees=(chain(5), chain(2)), prefix_lens=(37, 9), padding_rows=1)
    batch = make_batch(case, device)
    with pytest.raises(ValueError, match=message):
        batch.run(debug=True, **change(batch))


@on_cuda
def test_debug_switch(device, monkeypatch):
    """SGLANG_DDTREE_DEBUG, read at import, checks values. Without it nothing waits for the device."""
    batch = make_batch(Case(), device)
    batch.arguments["tree_slots"] = batch.arguments["tree_slots"].clone()
    workspace = batch.workspace()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.run(workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.arguments["tree_slots"][0] = -1
    monkeypatch.setattr(sgl_kernel.ddtree.verify, "DEBUG", True)
    with pytest.raises(ValueError, match=r"tree_slots\[0\]: expected a slot of the pool"):
        batch.run(workspace)


def test_debug_variable():
    """The environment variable sets DEBUG."""
    code = "from sgl_kernel.ddtree import verify; print(verify.DEBUG)"
    for value, want in (("1", "True"), ("0", "False")):
        environment = dict(os.environ, SGLANG_DDTREE_DEBUG=value)
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == want


@on_cuda
def test_workspace_too_small(device):
    batch = make_batch(Case(num_splits=3), device)
    good = batch.workspace()
    small = VerifyWorkspace(good.buffer[:-16], good.num_splits, good.num_nodes)
    with pytest.raises(ValueError, match=r"workspace: expected at least \d+ bytes .*, got \d+"):
        batch.run(small)


@on_cuda
@pytest.mark.parametrize("name", ["qo_indptr", "kv_indices", "ancestors"])
def test_wrong_device(name, device):
    batch = make_batch(Case(), device)
    with pytest.raises(ValueError, match=f"{name}: expected device cuda:0 like .*, got cpu"):
        batch.run(**{name: batch.arguments[name].cpu()})


@on_cuda
def test_float32_is_for_the_cpu(device):
    batch = make_batch(Case(q_dtype=torch.float32), device)
    with pytest.raises(ValueError, match="q: expected dtype bfloat16 or float16, got float32"):
        batch.run()


@on_each_device
def test_plan(device):
    shape = dict(max_bs=4, num_nodes=64, h_q=32, h_kv=8, d_qk=128, d_v=128, device=device)
    workspace = verify_workspace(**shape)
    assert workspace.max_bs == len(workspace.num_splits) == 4
    assert workspace.buffer.device.type == device
    alone = verify_workspace(**dict(shape, max_bs=1))
    assert alone.num_splits == workspace.num_splits[:1]
    for bs, num_splits in enumerate(workspace.num_splits, start=1):
        partials = bs * num_splits * 64 * 32 * (128 + 1) * 4 if num_splits > 1 else 0
        assert num_splits >= 1 and partials <= workspace.buffer.numel()
    if device == "cuda":  # 8 KV heads occupy a small part of any card, so a single request is split more
        assert workspace.num_splits[0] > workspace.num_splits[-1]
    for name, value, message in (
        ("num_nodes", 257, "num_nodes: expected 1 to 256, got 257"),
        ("max_bs", 0, "max_bs: expected 1 or more, got 0"),
        ("h_q", 12, "h_q: expected a multiple of h_kv = 8, got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_workspace(**dict(shape, **{name: value}))


@pytest.mark.skipif(len(CUDA) < 2, reason="needs sm_90, which has kernels of its own")
def test_switch(monkeypatch):
    """SGLANG_DDTREE_SM90=0, read at each call, selects the common kernels. Two blocks of their 128-row tile share a
    multiprocessor, while one block of sm_90's takes it alone. Therefore the plans differ."""
    planned = []
    for value in ("1", "0", "1"):
        monkeypatch.setenv("SGLANG_DDTREE_SM90", value)
        workspace = verify_workspace(max_bs=1, num_nodes=32, h_q=32, h_kv=8, d_qk=128, d_v=128, device="cuda")
        planned.append(workspace.num_splits)
    assert planned[0] == planned[2] != planned[1]


def test_launch_is_split_by_its_own_batch_size(monkeypatch):
    """A launch takes the plan for its own batch size. The buffer is large enough for every plan."""
    plans = {1: (8, 640), 2: (4, 1024), 3: (1, 0)}
    launched = []

    class Ops:
        ddtree_verify_plan = staticmethod(lambda like, bs, *shape: plans[bs])
        ddtree_verify_gqa = staticmethod(lambda *arguments: launched.append(arguments[-4:-2]))
        ddtree_verify_mla = ddtree_verify_gqa

    monkeypatch.setattr(sgl_kernel.ddtree.verify, "_ops", Ops)
    for mla in (False, True):
        batches = [
            make_batch(Case(mla=mla, h_kv=1, trees=(chain(2),) * n, prefix_lens=(5,) * n)) for n in plans
        ]
        workspace = batches[-1].workspace()
        assert workspace.buffer.numel() == 1024
        for batch in batches:
            batch.run(workspace)
        assert [num_splits for num_splits, _ in launched] == [8, 4, 1]
        assert all(buffer is workspace.buffer for _, buffer in launched)
        launched.clear()


def op_arguments(batch) -> tuple:
    """A GQA batch as arguments of the bare op."""
    workspace, a = batch.workspace(), batch.arguments
    names = "qo_indptr kv_indptr kv_indices prefix_lens tree_slots ancestors "
    names += "sinks k_scale v_scale sm_scale logit_cap sliding_window page_size"
    return (
        batch.q,
        *batch.caches,
        *(a[name] for name in names.split()),
        workspace.num_nodes,
        workspace.num_splits[-1],
        workspace.buffer,
        batch.out,
        batch.lse,
    )


@on_each_device
def test_opcheck(device):
    """The schema (mutations and aliases), fake tensors and autograd registration are as torch requires."""
    batch = make_batch(Case(sinks=True), device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.sgl_kernel.ddtree_verify_gqa.default,
        op_arguments(batch),
        test_utils=tests,
    )


def test_meta():
    arguments = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in op_arguments(make_batch(Case()))]
    assert torch.ops.sgl_kernel.ddtree_verify_gqa(*arguments) is None


def test_import_without_the_library(tmp_path):
    """A package that was not built reports how to build it."""
    source = Path(sgl_kernel.ddtree.__file__).parent
    package = tmp_path / "sgl_kernel"  # found before the installed one, because the child starts in tmp_path
    shutil.copytree(source, package / "ddtree", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (package / "__init__.py").touch()
    result = subprocess.run(
        [sys.executable, "-c", "import sgl_kernel.ddtree"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "_ddtree_cpu.so is missing: build it with" in result.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
