"""ddtree_index_logits against the formula in float64, over a paged pool that holds NaN wherever no key is seen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from indexer_cases import place
from sgl_kernel.ddtree import index_logits

register_cpu_ci(est_time=15, suite="kernel")
register_cuda_ci(est_time=20, suite="gpu")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
on_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="needs CUDA")
HEAD_DIM = 128
NOT_WRITTEN = -7777.0
# Of the sum of all absolute products. The kernel adds in float32, the CPU in double.
TOLERANCE = {"cpu": 1e-7, "cuda": 1e-5}


@dataclass
class Case:
    """One launch. `lengths` has the R lengths of each request."""

    lengths: list[list[int]]
    heads: int = 64
    page_size: int = 64
    spare_pages: int = 2  # in the pool, and per line of the page table
    strided: bool = False  # every tensor is a slice of a wider one
    seed: int = 0
    device: str = "cpu"
    q: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)
    weights: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)
    page_table: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        bs, rows = len(self.lengths), sum(map(len, self.lengths))
        used = [-(-max(lengths) // self.page_size) for lengths in self.lengths]
        pages = sum(used) + self.spare_pages
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        table = torch.full((bs, max(used) + self.spare_pages), -1, dtype=torch.int32)
        keys = torch.full((pages, self.page_size, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
        taken = 0
        for r, lengths in enumerate(self.lengths):
            table[r, : used[r]] = order[taken : taken + used[r]]
            taken += used[r]
            values = torch.randn(max(lengths), HEAD_DIM, generator=generator).bfloat16()
            for i in range(used[r]):
                part = values[i * self.page_size : (i + 1) * self.page_size]
                keys[table[r, i], : len(part)] = part
        self.q = self._place(torch.randn(rows, self.heads, HEAD_DIM, generator=generator).bfloat16(), dim=1)
        self.keys = self._place(keys, dim=0)
        self.weights = self._place(torch.randn(rows, self.heads, generator=generator), dim=1)
        self.seq_lens = torch.tensor(sum(self.lengths, []), dtype=torch.int32, device=self.device)
        self.page_table = self._place(table, dim=0)
        self.out = self._place(torch.full((rows, table.shape[1] * self.page_size), NOT_WRITTEN), dim=1)

    def _place(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return place(values, strided=self.strided, dim=dim, device=self.device)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.keys, self.weights, self.seq_lens, self.page_table, self.out

    def run(self) -> torch.Tensor:
        """Return the logits on the CPU; entries that the op left alone hold NOT_WRITTEN."""
        self.out.fill_(NOT_WRITTEN)
        assert index_logits(*self.arguments) is self.out
        return self.out.cpu()


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits in float64 and the sums of the absolute products, both [rows, max_len] and 0 past the lengths."""
    q, keys, weights, seq_lens, table, out = (tensor.cpu() for tensor in case.arguments)
    rows_per_request = len(case.lengths[0])
    logits, sizes = torch.zeros(2, *out.shape, dtype=torch.float64)
    for row, length in enumerate(seq_lens.tolist()):
        t = torch.arange(length)
        pages = table[row // rows_per_request, t // case.page_size].long()
        seen = keys[pages, t % case.page_size].double()
        products = seen @ q[row].double().T
        logits[row, :length] = products.clamp(min=0) @ weights[row].double()
        sizes[row, :length] = seen.abs() @ q[row].double().abs().T @ weights[row].double().abs()
    return logits, sizes


def check(case: Case) -> None:
    got, (want, size) = case.run(), expected(case)
    seen = torch.arange(got.shape[1]) < case.seq_lens.cpu()[:, None]
    assert (got[~seen] == NOT_WRITTEN).all(), f"{case.lengths}: wrote past the lengths"
    error = ((got.double() - want).abs() / size.clamp(min=1e-30))[seen]
    assert not error.isnan().any() and (error <= TOLERANCE[case.device]).all(), f"{error.max()}"


def each(*lengths: int) -> list[list[int]]:
    return [[length] for length in lengths]


@on_each_device
@pytest.mark.parametrize("page_size", [32, 64, 96])
@pytest.mark.parametrize("lengths", [[1], [31, 32, 33], [63, 64, 65], [127, 128, 129], [0, 500, 0, 7]])
def test_page_tails(lengths, page_size, device):
    check(Case(each(*lengths), page_size=page_size, device=device))


@on_each_device
@pytest.mark.parametrize("heads", [8, 24, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_rows_and_heads(rows, heads, device):
    """Rows of a request see different lengths, as draft tokens do. The longest need not be the last."""
    lengths = [[first + i for i in range(rows)] for first in (0, 31, 64, 190)] + [[70, 0, 33, 1][:rows]]
    check(Case(lengths, heads=heads, device=device))


@on_each_device
@pytest.mark.parametrize("rows", [1, 4])
def test_strides(rows, device):
    case = Case([[40] * rows, [0] * rows, [200] * rows], strided=True, device=device)
    assert not any(x.is_contiguous() for x in (case.q, case.keys, case.weights, case.page_table, case.out))
    check(case)


@on_each_device
def test_page_table_with_a_line_per_row(device):
    case = Case([[40, 41], [0, 1], [200, 201]], device=device)
    want = case.run()
    case.page_table = case.page_table.repeat_interleave(2, 0)[::2]
    assert torch.equal(case.run(), want)


@on_each_device
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_score(lengths, device):
    if lengths:
        case = Case(each(*lengths), device=device)
        assert (case.run() == NOT_WRITTEN).all()
    else:
        case = Case(each(1), device=device)
        q, keys, weights, seq_lens, table, out = case.arguments
        assert index_logits(q[:0], keys, weights[:0], seq_lens[:0], table[:0], out[:0]).shape[0] == 0


@on_each_device
def test_many_requests(device):
    """More requests than blocks, with runs of empty ones and one that is much longer than the rest."""
    lengths = [(r * 37) % 90 if r % 50 < 20 else 0 for r in range(700)]
    lengths[333] = 3000
    check(Case(each(*lengths), heads=8, page_size=32, spare_pages=0, device=device))


@on_each_device
def test_a_row_does_not_depend_on_the_batch(device):
    """The same bits alone, in a batch, and next to other rows of the request."""
    case = Case([[300, 301, 302], [64, 65, 66], [1000, 1001, 1002]], device=device)
    together = case.run()
    q, keys, weights, seq_lens, table, out = case.arguments
    for row in range(9):
        alone = torch.full_like(out[:1], NOT_WRITTEN)
        one = slice(row, row + 1)
        index_logits(q[one], keys, weights[one], seq_lens[one], table[row // 3 : row // 3 + 1], alone)
        assert torch.equal(alone.cpu(), together[one])


@on_each_device
def test_nan_products_count_as_zero(device):
    case = Case(each(40), device=device)
    case.keys[case.page_table[0, 0], 5] = torch.nan
    got = case.run()[0, :40]
    assert got[5] == 0 and not got.isnan().any() and (got != 0).sum() == 39


@on_cuda
@pytest.mark.parametrize("lengths", [[131_072], [0, 131_072, 5, 0], [4096] * 32])
@pytest.mark.parametrize("rows", [1, 4])
def test_long(lengths, rows):
    check(Case([[length] * rows for length in lengths], device="cuda"))


@on_cuda
def test_lengths_past_the_room_are_cut():
    """A wrong length must not write or read outside: it counts as the room there is, a negative one as 0."""
    case = Case(each(128, 128, 128), spare_pages=0, device="cuda")
    want = case.run()
    case.seq_lens.copy_(torch.tensor([2**31 - 1, 129, -5]))
    got = case.run()
    assert torch.equal(got[:2], want[:2]) and (got[2] == NOT_WRITTEN).all()


@on_cuda
def test_replays_read_the_current_lengths():
    """One capture serves other lengths, pages, queries and keys, with eager's bits and without a host wait."""
    first = Case([[500, 501], [3, 4], [64, 65]], device="cuda")
    others = [
        Case(lengths, seed=seed, device="cuda")
        for seed, lengths in enumerate(
            [[[0, 0], [511, 512], [1, 0]], [[33, 32], [0, 1], [505, 500]], [[1, 1], [2, 2], [450, 449]]],
            start=1,
        )
    ]
    pages = max(case.keys.shape[0] for case in (first, *others))
    keys = torch.full((pages, *first.keys.shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")

    def load(case):
        keys.fill_(torch.nan)
        keys[: case.keys.shape[0]] = case.keys
        first.q.copy_(case.q)
        first.weights.copy_(case.weights)
        first.seq_lens.copy_(case.seq_lens)
        first.page_table.fill_(-1)
        first.page_table[:, : case.page_table.shape[1]] = case.page_table
        first.out.fill_(NOT_WRITTEN)

    def run():
        index_logits(first.q, keys, first.weights, first.seq_lens, first.page_table, first.out)

    original = Case(first.lengths, device="cuda")
    load(original)
    run()  # loads the module, which a capture cannot do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in (*others, original):
        load(case)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        got, want = first.out.cpu(), case.run()
        assert torch.equal(got[:, : want.shape[1]], want) and (got[:, want.shape[1] :] == NOT_WRITTEN).all()
        check(case)


@on_each_device
def test_opcheck(device):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = Case(each(40, 7), device=device).arguments
    torch.library.opcheck(torch.ops.sgl_kernel.ddtree_index_logits.default, arguments, test_utils=tests)


@on_each_device
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x.float(), "q: expected dtype bfloat16, got float32"),
        ("q", lambda x: x[:, :, :64], "q: expected shape [any, any, 128], got [4, 64, 64]"),
        ("q", lambda x: x[:, :12], "q: expected heads in a multiple of 8, at most 64, got 12 heads"),
        ("q", lambda x: torch.cat([x, x], 1), "at most 64, got 128 heads"),
        ("q", lambda x: x[:3], "q: expected 1 to 4 rows for each of page_table's 2 requests, got 3 rows"),
        ("q", lambda x: x[:0], "q: expected 1 to 4 rows for each of page_table's 2 requests, got 0 rows"),
        (
            "q",
            lambda x: x.repeat(3, 1, 1),
            "q: expected 1 to 4 rows for each of page_table's 2 requests, got 12",
        ),
        ("q", lambda x: x.mT.contiguous().mT, "q: expected a last dimension with stride 1"),
        (
            "q",
            lambda x: x.flatten()[4:-4].view(-1)[: 3 * 8192].view(3, 64, 128),
            "q: expected data aligned to 16",
        ),
        ("keys", lambda x: x.view(torch.uint8), "keys: expected dtype bfloat16, got uint8"),
        ("keys", lambda x: x[0], "keys: expected shape [any, any, 128], got [64, 128]"),
        ("keys", lambda x: x[:, :48], "keys: expected pages of a multiple of 32 slots, got 48 slots"),
        ("keys", lambda x: x[:, ::2], "keys: expected contiguous pages (slots 128 elements apart), got 256"),
        ("weights", lambda x: x.bfloat16(), "weights: expected dtype float32, got bfloat16"),
        ("weights", lambda x: x[:, :8], "weights: expected shape [4, 64], got [4, 8]"),
        ("weights", lambda x: x.T.contiguous().T, "weights: expected a last dimension with stride 1"),
        ("seq_lens", lambda x: x.long(), "seq_lens: expected dtype int32, got int64"),
        ("seq_lens", lambda x: x[:2], "seq_lens: expected shape [4], got [2]"),
        ("page_table", lambda x: x.long(), "page_table: expected dtype int32, got int64"),
        ("page_table", lambda x: x[0], "page_table: expected 2 dimensions, got shape [4]"),
        ("page_table", lambda x: x.T.contiguous().T, "page_table: expected a last dimension with stride 1"),
        ("out", lambda x: x.bfloat16(), "out: expected dtype float32, got bfloat16"),
        ("out", lambda x: x[:2], "out: expected shape [4, any], got [2, 256]"),
        ("out", lambda x: x.T.contiguous().T, "out: expected a last dimension with stride 1"),
    ],
)
def test_wrong_arguments(name, change, message, device):
    case = Case([[40, 41], [100, 101]], device=device)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError) as raised:
        index_logits(*case.arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "name, index, value, message",
    [
        ("seq_lens", 1, -1, "seq_lens: expected 0 to 256 (the room in page_table and out), got -1 at row 1"),
        (
            "seq_lens",
            0,
            257,
            "seq_lens: expected 0 to 256 (the room in page_table and out), got 257 at row 0",
        ),
        ("page_table", (1, 0), 5, "page_table: expected pages of 0 to 4, got 5 at [1, 0]"),
        ("page_table", (1, 1), -1, "page_table: expected pages of 0 to 4, got -1 at [1, 1]"),
    ],
)
def test_wrong_values_on_the_cpu(name, index, value, message):
    case = Case(each(40, 100))
    getattr(case, name)[index] = value
    with pytest.raises(ValueError) as raised:
        index_logits(*case.arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["keys", "weights", "seq_lens", "page_table", "out"])
@on_cuda
def test_all_on_one_device(name):
    case = Case(each(40), device="cuda")
    setattr(case, name, getattr(case, name).cpu())
    with pytest.raises(ValueError, match=f"{name}: expected device cuda:0 like q, got cpu"):
        index_logits(*case.arguments)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
