"""ddtree_store_index_keys against the formula in float64, in a pool whose other bits must not change."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from indexer_cases import place
from sgl_kernel.ddtree import store_index_keys

register_cpu_ci(est_time=5, suite="kernel")
register_cuda_ci(est_time=10, suite="gpu")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
on_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="needs CUDA")
HEAD_DIM, ROPE_DIM, RATIO = 128, 64, 4
PADDING = -1  # seq_len of the rows that fill up a prefill plan
EPS = 1e-6
HALF_ULP = 2.0**-8  # of bfloat16, relative
FLOAT32_ERROR = 1e-6  # relative to the pair that is rotated


@dataclass
class Case:
    """One step. `seq_lens` has the plan's rows; prefill's token of a row is `tokens[row]`."""

    seq_lens: list[int]
    tokens: list[int] | None = None  # None: a decode plan
    page_size: int = 64
    pages: int = 8
    positions: int = 4096
    strided: bool = False
    seed: int = 0
    device: str = "cpu"
    kv: torch.Tensor = field(init=False)
    plan: torch.Tensor = field(init=False)
    norm_weight: torch.Tensor = field(init=False)
    freqs: torch.Tensor = field(init=False)
    out_loc: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.seq_lens)
        # The other fields of a plan's row have nothing to say here: they get bits that would be wrong.
        if self.tokens is None:
            plan = [struct.pack("<Iiii", n & 0xFFFFFFFF, -7, -7, -7) for n in self.seq_lens]
        else:
            plan = [
                struct.pack("<IHHii", n & 0xFFFFFFFF, t, 0xFFFF, -7, -7)
                for n, t in zip(self.seq_lens, self.tokens, strict=True)
            ]
        self.plan = torch.tensor(list(b"".join(plan)), dtype=torch.uint8, device=self.device).view(rows, 16)
        # Rows of very different sizes, so that the norm matters.
        scale = torch.logspace(-3, 3, max(rows, 1))[:rows, None]
        self.kv = self._place(torch.randn(rows, HEAD_DIM, generator=generator) * scale, dim=1)
        self.norm_weight = torch.randn(HEAD_DIM, generator=generator).to(self.device)
        angles = torch.rand(self.positions, ROPE_DIM // 2, generator=generator) * 100
        self.freqs = self._place(torch.stack([angles.cos(), angles.sin()], -1).flatten(1), dim=0)
        num_tokens = rows if self.tokens is None else max(self.tokens, default=0) + 3
        slots = torch.randperm(self.pages * self.page_size, generator=generator)[:num_tokens]
        self.out_loc = slots.to(self.device)
        pool = torch.randn(self.pages, self.page_size, HEAD_DIM, generator=generator).bfloat16()
        self.keys = self._place(pool, dim=0)

    def _place(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return place(values, strided=self.strided, dim=dim, device=self.device)

    def row_tokens(self) -> list[int]:
        return list(range(len(self.seq_lens))) if self.tokens is None else self.tokens

    def run(self) -> torch.Tensor:
        decode = self.tokens is None
        arguments = self.kv, self.plan, self.norm_weight, EPS, self.freqs, self.out_loc, self.keys
        assert store_index_keys(*arguments, decode=decode) is None
        return self.keys.cpu()


def key(case: Case, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key of a row in float64, and for each dimension the size of the pair that it is rotated with."""
    kv = case.kv[row].cpu().double()
    x = kv / (kv.square().mean() + EPS).sqrt() * case.norm_weight.cpu().double()
    pairs = torch.view_as_complex(x.view(-1, 2).contiguous())
    angles = case.freqs[case.seq_lens[row] - RATIO].cpu().double()
    rotation = torch.view_as_complex(angles.view(-1, 2).contiguous())
    pairs = torch.cat([pairs[: -ROPE_DIM // 2], pairs[-ROPE_DIM // 2 :] * rotation])
    return torch.view_as_real(pairs).flatten(), pairs.abs().repeat_interleave(2)


def check(case: Case) -> None:
    before = case.keys.cpu().clone()
    got = case.run()
    stored = 0
    for row, (length, token) in enumerate(zip(case.seq_lens, case.row_tokens(), strict=True)):
        if length <= 0 or length % RATIO:
            continue
        page, offset = divmod(int(case.out_loc[token]), case.page_size)
        want, size = key(case, row)
        if case.device == "cpu":
            assert torch.equal(got[page, offset], want.float().bfloat16()), f"row {row}"
        error = (got[page, offset].double() - want).abs()
        assert (error <= HALF_ULP * want.abs() + FLOAT32_ERROR * size).all(), f"row {row}: {error.max()}"
        before[page, offset] = got[page, offset]
        stored += 1
    assert torch.equal(got.view(torch.int16), before.view(torch.int16)), "wrote another slot"
    assert stored == sum(n > 0 and n % RATIO == 0 for n in case.seq_lens)


@on_each_device
@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [[4], [3], [1, 2, 3, 4, 5, 6, 7, 8], [0, -4, 4096, 4099, 2048], [4 * i for i in range(1, 100)]],
)
def test_decode(seq_lens, page_size, device):
    check(Case(seq_lens, page_size=page_size, device=device))


@on_each_device
@pytest.mark.parametrize(
    "seq_lens, tokens",
    [
        ([4], [3]),
        (
            [12, 4, 8, PADDING, PADDING],
            [11, 3, 7, 0, 0],
        ),  # in any order: upstream's kernel hands rows out by atomics
        ([PADDING, PADDING], [0, 0]),
        ([400, 404, 408], [0, 4, 8]),  # a chunk that starts within a key
        ([4 * i for i in range(1, 120)], list(range(118, -1, -1))),
    ],
)
def test_prefill(seq_lens, tokens, device):
    check(Case(seq_lens, tokens, device=device))


@on_each_device
def test_prefill_tokens_are_unsigned(device):
    check(Case([4, 8], [65_535, 40_000], pages=2048, device=device))


@on_each_device
@pytest.mark.parametrize("tokens", [None, [9, 3, 1, 5]])
def test_strides(tokens, device):
    case = Case([8, 5, 16, 400], tokens, strided=True, device=device)
    assert not any(x.is_contiguous() for x in (case.kv, case.freqs, case.keys))
    check(case)


@on_each_device
def test_no_rows(device):
    check(Case([], device=device))


@on_each_device
def test_zero_row(device):
    """The epsilon keeps a row of zeros from becoming NaN."""
    case = Case([4, 8], device=device)
    case.kv[0] = 0
    check(case)


@on_each_device
def test_a_row_does_not_depend_on_the_others(device):
    lengths = [4 * i for i in range(1, 20)]
    together = Case(lengths, device=device)
    got = together.run()
    for row in (0, 7, 18):
        alone = Case(lengths, device=device)
        one = slice(row, row + 1)
        store_index_keys(
            alone.kv[one], alone.plan[one], alone.norm_weight, EPS, alone.freqs, alone.out_loc[one], alone.keys,
            decode=True,
        )  # fmt: skip
        page, offset = divmod(int(alone.out_loc[row]), alone.page_size)
        assert torch.equal(alone.keys[page, offset].cpu(), got[page, offset])


@on_cuda
def test_out_of_range_is_not_stored():
    case = Case([4, 8, 4100, 12, 16, 20], [0, 1, 2, 30_000, 3, 4], device="cuda")
    case.out_loc = torch.tensor([5, -1, 6, 8 * 64, 7], device="cuda")  # -1 and 512 are outside the pool
    before = case.keys.cpu()
    got = case.run()
    changed = (got != before).any(-1).flatten().nonzero().flatten().tolist()
    assert changed == [5, 7]


@on_cuda
def test_replays_read_the_current_plan():
    """One capture serves other plans, slots and values, with eager's bits and without a host wait."""
    first = Case([4, 5, 8, 3], device="cuda")
    others = [
        Case(lengths, seed=i + 1, device="cuda") for i, lengths in enumerate([[5, 8, 9, 4], [1] * 4, [4] * 4])
    ]

    def load(case):
        for name in ("kv", "plan", "norm_weight", "freqs", "out_loc", "keys"):
            getattr(first, name).copy_(getattr(case, name))

    first.run()  # loads the module, which a capture cannot do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_index_keys(
            first.kv, first.plan, first.norm_weight, EPS, first.freqs, first.out_loc, first.keys, decode=True
        )
    for case in others:
        load(case)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        got = first.keys.cpu()
        check(case)
        assert torch.equal(got.view(torch.int16), case.keys.cpu().view(torch.int16))


@on_each_device
def test_opcheck(device):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    case = Case([4, 8], device=device)
    arguments = case.kv, case.plan, case.norm_weight, EPS, case.freqs, case.out_loc, case.keys, True
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_store_index_keys.default, arguments, test_utils=tests)


@on_each_device
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("kv", lambda x: x.bfloat16(), "kv: expected dtype float32, got bfloat16"),
        ("kv", lambda x: x[:, :64], "kv: expected shape [any, 128], got [3, 64]"),
        ("kv", lambda x: x.T.contiguous().T, "kv: expected a last dimension with stride 1"),
        ("kv", lambda x: x.flatten()[1:-127].view(2, 128), "kv: expected data aligned to 16"),
        ("plan", lambda x: x.view(torch.int32), "plan: expected dtype uint8, got int32"),
        ("plan", lambda x: x[:2], "plan: expected shape [3, 16], got [2, 16]"),
        ("plan", lambda x: x[:, :8], "plan: expected shape [3, 16], got [3, 8]"),
        ("norm_weight", lambda x: x.bfloat16(), "norm_weight: expected dtype float32, got bfloat16"),
        ("norm_weight", lambda x: x[:64], "norm_weight: expected shape [128], got [64]"),
        ("freqs", lambda x: x.double(), "freqs: expected dtype float32, got float64"),
        ("freqs", lambda x: x[:, :32], "freqs: expected shape [any, 64], got [4096, 32]"),
        ("out_loc", lambda x: x.int(), "out_loc: expected dtype int64, got int32"),
        ("out_loc", lambda x: x[:2], "out_loc: expected a slot for each of kv's 3 rows, got 2"),
        ("keys", lambda x: x.view(torch.uint8), "keys: expected dtype bfloat16, got uint8"),
        ("keys", lambda x: x[:, :48], "keys: expected pages of a multiple of 32 slots, got 48 slots"),
    ],
)
def test_wrong_arguments(name, change, message, device):
    case = Case([4, 5, 8], device=device)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError) as raised:
        case.run()
    assert message in str(raised.value)


def test_wrong_epsilon():
    case = Case([4])
    with pytest.raises(ValueError, match="norm_eps: expected 0 or more, got -1"):
        store_index_keys(
            case.kv, case.plan, case.norm_weight, -1.0, case.freqs, case.out_loc, case.keys, decode=True
        )


@pytest.mark.parametrize(
    "seq_len, token, slot, message",
    [
        (4100, 0, 0, "plan: expected positions of 0 to 4095 (freqs has no more), got 4096 at row 1"),
        (8, 9, 0, "plan: expected tokens of 0 to 7 (out_loc has no more), got 9 at row 1"),
        (8, 1, -1, "out_loc: expected slots of 0 to 511, got -1 at token 1"),
        (8, 1, 512, "out_loc: expected slots of 0 to 511, got 512 at token 1"),
    ],
)
def test_wrong_values_on_the_cpu(seq_len, token, slot, message):
    """A row without a key is not looked at, so its token and slot may be anything."""
    case = Case([5, seq_len, PADDING], [65_535, token, 65_535])
    case.out_loc = torch.full((8,), slot)
    with pytest.raises(ValueError) as raised:
        case.run()
    assert message in str(raised.value)


@on_cuda
@pytest.mark.parametrize("name", ["plan", "norm_weight", "freqs", "out_loc", "keys"])
def test_all_on_one_device(name):
    case = Case([4], device="cuda")
    setattr(case, name, getattr(case, name).cpu())
    with pytest.raises(ValueError, match=f"{name}: expected device cuda:0 like kv, got cpu"):
        case.run()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
