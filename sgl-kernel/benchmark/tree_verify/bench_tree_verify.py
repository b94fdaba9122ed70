"""Times tree-verify attention against the card's limits, upstream's Triton kernel and the best chain kernels.

The limits are measured in the same run: the copy rate (bytes read + written) and the bf16 rate of mma.sync
(mma_rate.cu). "KV" is the size of the prefix and tree KV, read once, divided by the time. "common" is the kernel of
sm_100, on a card that normally runs one of its own (SGLANG_DDTREE_SM90). "exact" is the time with
SGLANG_DDTREE_FP8=exact. "error" is the relative error of O against float64 for some rows. Upstream's kernel runs if
sglang can be imported. --peers times FlashAttention 3, FlashMLA and FlashInfer (peers.py), which run a chain of N
tokens. Every time is a median of do_bench over replays of a captured graph, with the L2 cache cleared before each
replay. Prints a Markdown table; never asserts.

    python bench_tree_verify.py --peers fa3,flashmla --output results/NAME.json
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import sgl_kernel.ddtree
import torch
import triton
from peers import Chain, Peer, peers_of
from sgl_kernel.ddtree import MLA_HEAD_SIZES, pack_ancestors, verify_gqa, verify_mla, verify_workspace

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
LIBRARY = Path(sgl_kernel.ddtree.__file__).parent / "_ddtree_cuda.so"
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    kind: str  # "mla" or "gqa"
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    bs: int
    num_nodes: int  # N, per request
    prefix: int  # tokens per request

    def __str__(self) -> str:
        heads = f"MLA h_q {self.h_q}" if self.kind == "mla" else f"GQA {self.d_v} h {self.h_q}/{self.h_kv}"
        return f"{heads}, bs {self.bs}, N {self.num_nodes}, prefix {self.prefix}"

    def kv_bytes(self, element: int) -> int:
        width = self.d_qk if self.kind == "mla" else self.d_qk + self.d_v
        return self.bs * (self.prefix + self.num_nodes) * self.h_kv * width * element

    @property
    def flop(self) -> float:
        tokens = self.prefix + self.num_nodes / 2
        return 2 * self.bs * self.num_nodes * self.h_q * tokens * (self.d_qk + self.d_v)


def mla(h_q: int, bs: int, num_nodes: int, prefix: int) -> Shape:
    return Shape("mla", h_q, 1, *MLA_HEAD_SIZES, bs, num_nodes, prefix)


def gqa(h_q: int, h_kv: int, bs: int, num_nodes: int, prefix: int, d: int = 128) -> Shape:
    return Shape("gqa", h_q, h_kv, d, d, bs, num_nodes, prefix)


BASELINE = [  # also timed with upstream's kernel
    mla(8, 1, 16, 4096),
    mla(8, 1, 64, 32768),
    mla(8, 1, 16, 131072),
    mla(8, 8, 64, 8192),
    mla(8, 32, 16, 4096),
    mla(64, 1, 64, 32768),
    mla(64, 8, 64, 8192),
    mla(64, 32, 16, 4096),
    gqa(32, 8, 1, 16, 4096),
    gqa(32, 8, 1, 64, 32768),
    gqa(32, 8, 1, 16, 131072),
    gqa(32, 8, 8, 64, 8192),
    gqa(32, 8, 32, 16, 4096),
    gqa(8, 2, 1, 16, 131072),
]
MEMORY_BOUND = [  # at most 64 packed rows per KV head, 64 MB of KV or more
    gqa(32, 8, 8, 16, 16384, d=64),
    gqa(16, 4, 8, 16, 16384, d=256),
    mla(8, 1, 8, 131072),
    gqa(32, 8, 1, 4, 131072),
    gqa(32, 8, 8, 16, 16384),
    gqa(8, 8, 8, 16, 16384),
]
WIDE = [  # the tree is a large part of the tokens
    mla(8, 1, 256, 4096),
    gqa(32, 8, 8, 256, 1024),
]


def copy_rate() -> float:
    """GB/s of a device-to-device copy, bytes read and written."""
    a = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    ms = triton.testing.do_bench(lambda: b.copy_(a), warmup=50, rep=200, return_mode="median")
    return 2 * a.nbytes / ms / 1e6


def mma_rate(binary: str | None) -> float:
    """TFLOP/s of mma.sync m16n8k16 bf16."""
    if binary:
        return float(subprocess.check_output([binary]))
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/mma_rate"
        source = str(HERE / "mma_rate.cu")
        subprocess.check_call(["nvcc", "-O3", "-std=c++17", "-arch=native", "-I", CSRC, "-o", binary, source])
        return float(subprocess.check_output([binary]))


def random_tree(n: int, generator: torch.Generator) -> torch.Tensor:
    """[n, n] bool ancestor mask. A parent is one of the eight preceding nodes."""
    mask = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        mask[i] |= mask[int(torch.randint(max(0, i - 8), i, (1,), generator=generator))]
    return mask


def time_us(f: Callable[[], object]) -> float:
    """Microseconds per replay of f's captured graph. Like a server, this excludes Python's time between launches."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return triton.testing.do_bench(graph.replay, warmup=20, rep=80, return_mode="median") * 1e3


class Inputs:
    """The tensors of one launch of ours. With `chain`, they are a peer's, and the tree is a chain."""

    def __init__(self, shape: Shape, chain: Chain | None = None) -> None:
        s = self.shape = shape
        generator = torch.Generator().manual_seed(0)
        bf16 = dict(device="cuda", dtype=torch.bfloat16)
        slots = s.bs * (s.prefix + s.num_nodes)
        self.page_size = chain.page_size if chain else 1
        if chain:
            self.q = chain.q.to(torch.bfloat16).view(-1, s.h_q, s.d_qk)
            self.k_cache, self.v_cache = chain.k.flatten(0, 1), chain.v.flatten(0, 1)
            self.kv_indices, self.tree_slots = (
                part.flatten() for part in chain.slots().split([s.prefix, s.num_nodes], 1)
            )
        else:
            self.q = torch.randn(s.bs * s.num_nodes, s.h_q, s.d_qk, **bf16) * 0.3
            self.k_cache = torch.randn(slots, s.h_kv, s.d_qk, **bf16) * 0.3
            self.v_cache = self.k_cache[..., : s.d_v] if s.kind == "mla" else torch.randn_like(self.k_cache)
            order = torch.randperm(slots, device="cuda")
            self.kv_indices = order[: s.bs * s.prefix]
            self.tree_slots = order[s.bs * s.prefix :]
        int32 = dict(device="cuda", dtype=torch.int32)
        self.qo_indptr = torch.arange(0, s.bs * s.num_nodes + 1, s.num_nodes, **int32)
        self.kv_indptr = torch.arange(0, s.bs * s.prefix + 1, s.prefix, **int32)
        self.prefix_lens = torch.full((s.bs,), s.prefix, **int32)
        self.tree = (
            torch.ones(s.num_nodes, s.num_nodes).tril().bool()
            if chain
            else random_tree(s.num_nodes, generator)
        )
        self.ancestors = pack_ancestors(self.tree).repeat(s.bs, 1).cuda()
        self.out = torch.empty(s.bs * s.num_nodes, s.h_q, s.d_v, **bf16)

    def ours(self, fp8: bool) -> Callable[[], object]:
        s = self.shape
        workspace = verify_workspace(
            max_bs=s.bs,
            num_nodes=s.num_nodes,
            h_q=s.h_q,
            h_kv=s.h_kv,
            d_qk=s.d_qk,
            d_v=s.d_v,
            device=self.q.device,
        )
        keywords = dict(
            qo_indptr=self.qo_indptr,
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            prefix_lens=self.prefix_lens,
            tree_slots=self.tree_slots,
            ancestors=self.ancestors,
            workspace=workspace,
            sm_scale=s.d_qk**-0.5,
            page_size=self.page_size,
            out=self.out,
        )
        k = self.k_cache.to(FP8) if fp8 else self.k_cache
        if s.kind == "mla":
            return lambda: verify_mla(self.q, k, **keywords)
        v = self.v_cache.to(FP8) if fp8 else self.v_cache
        return lambda: verify_gqa(self.q, k, v, **keywords)

    def error(self, fp8: bool) -> float:
        """The relative error of `out` against float64, for up to eight heads of the first request and KV head."""
        s = self.shape
        slots = torch.cat([self.kv_indices[: s.prefix], self.tree_slots[: s.num_nodes]])
        heads = min(8, s.h_q // s.h_kv)
        q = self.q[: s.num_nodes, :heads].double()
        k, v = (
            (cache[slots, 0].to(FP8) if fp8 else cache[slots, 0]).double()
            for cache in (self.k_cache, self.v_cache)
        )
        logits = s.d_qk**-0.5 * torch.einsum("nhd,td->nht", q, k)
        tree = self.tree.cuda()[:, None].expand(-1, heads, -1)
        logits[..., s.prefix :].masked_fill_(~tree, -torch.inf)
        want = logits.softmax(-1) @ v
        got = self.out[: s.num_nodes, :heads].double()
        return float((got - want).norm() / want.norm())

    def upstream(self) -> tuple[Callable[[], None], torch.Tensor]:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        s = self.shape
        k = self.k_cache[self.tree_slots].contiguous()
        v = k[..., : s.d_v] if s.kind == "mla" else self.v_cache[self.tree_slots].contiguous()
        prefix = torch.ones(s.num_nodes, s.prefix, dtype=torch.bool)
        mask = torch.cat([prefix, self.tree], 1).reshape(-1).repeat(s.bs).cuda()
        size = s.num_nodes * (s.prefix + s.num_nodes)
        mask_indptr = torch.arange(0, s.bs * size + 1, size, device="cuda", dtype=torch.int64)
        out = torch.empty_like(self.out)

        def f() -> None:
            extend_attention_fwd(
                self.q,
                k,
                v,
                out,
                self.k_cache,
                self.v_cache,
                self.qo_indptr,
                self.kv_indptr,
                self.kv_indices,
                mask,
                True,
                mask_indptr,
                s.num_nodes,
                1.0,
                1.0,
                s.d_qk**-0.5,
            )

        return f, out


def time_peer(shape: Shape, peer: Peer, fp8: bool) -> dict:
    """The peer's time, our time on the same chain, and how far the results are apart. A peer that fails is reported."""
    try:
        chain = Chain(shape, peer.page_size, fp8)
        f = peer.build(chain)
        inputs = Inputs(shape, chain)
        inputs.ours(fp8)()
        ours, theirs = inputs.out.float(), f().float().view(inputs.out.shape)
        difference = float((theirs - ours).norm() / ours.norm())
        return dict(us=time_us(f), ours_us=time_us(inputs.ours(fp8)), difference=difference)
    except Exception as error:  # a missing package, or a shape that the peer does not take
        return dict(error=f"{type(error).__name__}: {error}"[:300])


class Environment:
    """A context in which an environment variable that launches read has a value."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value

    def __enter__(self) -> None:
        os.environ[self.name] = self.value

    def __exit__(self, *_: object) -> None:
        del os.environ[self.name]


def smi(fields: str) -> str:
    uuid = "GPU-" + str(torch.cuda.get_device_properties("cuda").uuid).removeprefix("GPU-")
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()[0]


def time_ours(inputs: Inputs, fp8: bool, with_common: bool) -> dict:
    """Our time and error, those of the exact mode, and the time of the common kernels."""
    found = dict(us=time_us(inputs.ours(fp8)), exact_us=None, exact_error=None, common_us=None)
    if with_common:
        # sm_100 converts fp8 KV, which is the common kernels' exact mode here.
        with Environment("SGLANG_DDTREE_SM90", "0"), Environment("SGLANG_DDTREE_FP8", "exact"):
            found["common_us"] = time_us(inputs.ours(fp8))
    if fp8:
        with Environment("SGLANG_DDTREE_FP8", "exact"):
            found.update(exact_us=time_us(inputs.ours(fp8)), exact_error=inputs.error(fp8))
    inputs.ours(fp8)()
    return found | dict(error=inputs.error(fp8))


def time_upstream(inputs: Inputs) -> dict:
    """The time of upstream's kernel with bf16 KV, and how far our result is from its."""
    upstream, out = inputs.upstream()
    us = time_us(upstream)
    inputs.ours(fp8=False)()
    upstream()
    reference = out.float()
    difference = float((inputs.out.float() - reference).norm() / reference.norm())
    return dict(upstream_us=us, difference_from_upstream=difference)


def bench(shape: Shape, options: argparse.Namespace, copy: float, mma: float) -> Iterator[dict]:
    """The rows of a shape: bf16, then fp8. `copy` and `mma` are the card's limits, in GB/s and TFLOP/s."""
    own_kernels = torch.cuda.get_device_capability()[0] == 9
    inputs = Inputs(shape)
    upstream: dict = dict(upstream_us=None, difference_from_upstream=None)
    for fp8 in (False, True):
        ours = time_ours(inputs, fp8, own_kernels and not options.no_common)
        if fp8:
            upstream["difference_from_upstream"] = None  # it is that of bf16 KV
        elif not options.no_upstream and shape in BASELINE:
            upstream = time_upstream(inputs)
        peers = {peer.name: time_peer(shape, peer, fp8) for peer in peers_of(shape.kind, fp8, options.peers)}
        gb_s = shape.kv_bytes(1 if fp8 else 2) / ours["us"] / 1e3
        tflop_s = shape.flop / ours["us"] / 1e6
        yield dict(
            shape=asdict(shape),
            name=str(shape),
            kv="fp8_e4m3" if fp8 else "bf16",
            kv_gb_s=gb_s,
            of_copy=gb_s / copy,
            tflop_s=tflop_s,
            of_mma=tflop_s / mma,
            **ours,
            **upstream,
            peers=peers,
        )


def print_header(results: dict) -> None:
    print(
        f"{results['gpu']}, copy {results['copy_gb_s']:.0f} GB/s, mma.sync {results['mma_sync_tflop_s']:.0f} TFLOP/s, "
        f"{results['clocks_after_copy_and_mma']}"
    )
    print(
        "| shape | KV | us | KV GB/s | of copy | TFLOP/s | of mma.sync | error | exact us, error | common us "
        "| upstream us | faster | peers |"
    )
    print("|-|-|-|-|-|-|-|-|-|-|-|-|-|")


def print_row(row: dict) -> None:
    exact, common, upstream = row["exact_us"], row["common_us"], row["upstream_us"]
    cells = [
        row["name"],
        row["kv"],
        f"{row['us']:.1f}",
        f"{row['kv_gb_s']:.0f}",
        f"{row['of_copy']:.0%}",
        f"{row['tflop_s']:.0f}",
        f"{row['of_mma']:.0%}",
        f"{row['error']:.1e}",
        "-" if exact is None else f"{exact:.1f}, {row['exact_error']:.1e}",
        "-" if common is None else f"{common:.1f}",
        "-" if upstream is None else f"{upstream:.0f}",
        "-" if upstream is None else f"{upstream / row['us']:.1f}x",
        ", ".join(f"{name} {peer.get('us', float('nan')):.1f}" for name, peer in row["peers"].items()),
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="results file (JSON)")
    parser.add_argument("--commit", default="unknown", help="recorded in the results")
    parser.add_argument("--mma-rate", help="a built mma_rate; default: builds one with nvcc")
    parser.add_argument("--no-upstream", action="store_true", help="skip upstream's kernel")
    parser.add_argument("--no-common", action="store_true", help="skip the common kernels")
    parser.add_argument("--only", help="shapes whose name contains this")
    parser.add_argument("--peers", default="", help="peers whose name contains one of these words (commas)")
    options = parser.parse_args()

    copy, mma = copy_rate(), mma_rate(options.mma_rate)
    results = {
        "gpu": torch.cuda.get_device_name(),
        "clocks_after_copy_and_mma": smi("clocks.sm,clocks.mem,clocks.max.sm"),
        "driver": smi("driver_version"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit,
        # Identifies the library: with upstream's sgl_kernel installed, only a package installed into it is imported.
        "library_sha256": hashlib.sha256(LIBRARY.read_bytes()).hexdigest(),
        "command": " ".join(["python", *sys.argv]),
        "copy_gb_s": copy,
        "mma_sync_tflop_s": mma,
        "rows": [],
    }
    print_header(results)
    for shape in BASELINE + MEMORY_BOUND + WIDE:
        if options.only and options.only not in str(shape):
            continue
        for row in bench(shape, options, copy, mma):
            results["rows"].append(row)
            print_row(row)
        torch.cuda.empty_cache()
        if options.output:  # after every shape, so that an interrupted run keeps its results
            options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
