"""ddtree_commit against a copy of the pool: every layout, overlapping moves, and bytes that must not change."""

import random
import sys

import pytest
import torch
from ci_registration import register_cpu_ci, register_cuda_ci
from draft_tree_cases import check_registration, on_each_device
from sgl_kernel.ddtree import KVBuffers, commit_path

register_cpu_ci(est_time=15, suite="kernel")
register_cuda_ci(est_time=20, suite="gpu")


def random_bytes(shape, dtype, generator) -> torch.Tensor:
    """Arbitrary bits, including NaN: a move must copy bits, not numbers."""
    size = torch.empty(0, dtype=dtype).element_size()
    values = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return values.view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def random_path(num_nodes: int, block_size: int, rng: random.Random) -> list[int]:
    """The root, then nodes in increasing order."""
    return [0, *sorted(rng.sample(range(1, num_nodes), rng.randint(0, min(block_size, num_nodes) - 1)))]


def check(
    layout, paths, num_nodes: int, block_size: int, device: str, page_size=1, hidden=None, seed=0
) -> None:
    """Commit `paths` (one list of nodes per request) in a pool and compare every byte of the pool.

    layout: for each buffer, (shape of a slot's row, dtype, elements of padding after the row).
    """
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    bs = len(paths)
    pages = list(range(-(-bs * num_nodes // page_size) + bs + 2))
    rng.shuffle(pages)
    slots = []
    for _ in range(bs):  # a request owns whole pages and starts in the middle of the first
        start = rng.randrange(page_size)
        owned = [pages.pop() for _ in range(-(-(start + num_nodes) // page_size))]
        slots.append([p * page_size + i for p in owned for i in range(page_size)][start : start + num_nodes])
    num_slots = 1 + max(max(s) for s in slots)

    buffers, wanted = [], []
    for row_shape, dtype, padding in layout:
        pool = random_bytes((num_slots, *row_shape[:-1], row_shape[-1] + padding), dtype, generator)
        buffers.append((pool.to(device), row_shape[-1]))
        want = pool.clone()
        for path, slot in zip(paths, slots, strict=True):
            source = [slot[node] for node in path]
            want[slot[: len(path)], ..., : row_shape[-1]] = pool[source][..., : row_shape[-1]]
        wanted.append(want)

    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    path = torch.tensor([p + [0] * (block_size - len(p)) for p in paths])
    extra = []
    if hidden is not None:
        width, dtype = hidden
        states = random_bytes((bs * num_nodes, width), dtype, generator)
        out = random_bytes((bs, block_size, width), dtype, generator).to(device)
        extra = [states.to(device), out]
    kv = KVBuffers.of([pool[..., :width] for pool, width in buffers])
    commit_path(path.to(device), lengths.to(device), torch.tensor(slots).to(device), kv, *extra)
    for i, ((pool, _), want) in enumerate(zip(buffers, wanted, strict=True)):
        assert torch.equal(bits(pool), bits(want)), f"buffer {i}"
    if hidden is not None:
        rows_of = path + torch.arange(0, bs * num_nodes, num_nodes)[:, None]
        assert torch.equal(bits(out), bits(states[rows_of]))


HALF, BYTE = torch.bfloat16, torch.uint8
LAYOUTS = {
    "MHA": [((2, 64), HALF, 0)] * 6,
    "MHA, fp8": [((8, 128), torch.float8_e4m3fn, 0)] * 4,
    "MHA, K and V of different widths": [((4, 192), HALF, 0)] * 2 + [((4, 128), HALF, 0)] * 2,
    "MLA": [((1, 576), HALF, 0)] * 5,
    "MLA, fp8": [((1, 576), torch.float8_e4m3fn, 0)] * 3,
    "rows over several blocks": [((16, 256), HALF, 0)] * 2 + [((1, 64), HALF, 0)],
    "slices of a wider pool": [((96,), HALF, 32)] * 3,
    "unaligned bytes": [((77,), BYTE, 0), ((4096 + 3,), BYTE, 5), ((1,), BYTE, 0)],
    "with a scale per slot": [((2, 64), BYTE, 0)] * 2 + [((2, 1), torch.float32, 0)] * 2,
}


@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_layouts(layout, page_size, device):
    rng = random.Random(page_size)
    num_nodes, block_size = 24, 12
    paths = [random_path(num_nodes, block_size, rng) for _ in range(5)]
    check(LAYOUTS[layout], paths, num_nodes, block_size, device, page_size, hidden=(320, HALF))


@on_each_device
@pytest.mark.parametrize(
    "path",
    [
        [],
        [0],
        [0, 1, 2, 3],
        [0, 2],
        [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],  # each move writes what the previous one read
        [0, 1, 3, 4, 7, 8, 11],
        [0, 11],
        [0, *range(4, 12)],
        [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11],  # the first move comes after a whole batch in place
    ],
)
def test_paths(path, device):
    check(LAYOUTS["MLA"], [path], 12, 12, device)
    check(LAYOUTS["unaligned bytes"], [[0, 3], path, []], 12, 12, device)


@on_each_device
@pytest.mark.parametrize("seed", range(12))
def test_random_paths(seed, device):
    rng = random.Random(seed)
    num_nodes = rng.choice((2, 9, 33, 64, 256))
    block_size = min(num_nodes, rng.choice((2, 8, 9, 33, 256)))
    paths = [random_path(num_nodes, block_size, rng) for _ in range(rng.choice((1, 3, 17)))]
    hidden = (rng.choice((1, 7, 64, 5120)), rng.choice((HALF, torch.float32, BYTE)))
    check(
        [((1, 32), HALF, 0), ((3,), BYTE, 0)], paths, num_nodes, block_size, device, hidden=hidden, seed=seed
    )


@on_each_device
def test_longest_path(device):
    """256 rows in place, and 255 of which most move by one: more than a block has threads."""
    check(LAYOUTS["MHA"], [list(range(256)), [0, *range(1, 200), *range(201, 256)]], 256, 256, device)


@on_each_device
def test_padding_requests(device):
    """Requests that commit nothing may share slots with others, as they do in a padded batch."""
    pool = torch.arange(12.0, device=device).view(12, 1).repeat(1, 8).contiguous()
    path = torch.tensor([[0, 2], [0, 1], [0, 0]], device=device)
    lengths = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([[4, 5, 6], [4, 5, 6], [0, 0, 0]], device=device)
    commit_path(path, lengths, slots, KVBuffers.of([pool]))
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4, 6, 6, 7, 8, 9, 10, 11]


@on_each_device
def test_registration(device):
    kv = KVBuffers.of([torch.zeros(8, 16, device=device)])
    arguments = [
        torch.tensor([[0, 2]], device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
        torch.tensor([[1, 2, 3]], device=device),
        kv.table,
        kv.max_row_bytes,
        torch.randn(3, 4, device=device),
        torch.randn(1, 2, 4, device=device),
    ]
    check_registration(torch.ops.sgl_kernel.ddtree_commit, arguments)


def test_buffers():
    pool = torch.zeros(6, 2, 40, dtype=torch.bfloat16)
    kv = KVBuffers.of([pool, pool[:, 1]])
    assert kv.table.tolist() == [[pool.data_ptr(), 160, 160], [pool.data_ptr() + 80, 80, 160]]
    assert kv.max_row_bytes == 160
    with pytest.raises(
        ValueError, match=r"buffers\[1\]: expected \[slots, ...\] with contiguous rows, got shape"
    ):
        KVBuffers.of([pool, pool[..., :3]])
    with pytest.raises(ValueError, match=r"buffers: expected tensors on one device, got \[\]"):
        KVBuffers.of([])


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("path", torch.zeros(1, 2, dtype=torch.int32), "path: expected dtype int64, got int32"),
        ("lengths", torch.zeros(2, dtype=torch.int32), r"lengths: expected shape \[1\], got \[2\]"),
        ("slots", torch.zeros(1, 3, dtype=torch.int32), "slots: expected dtype int64, got int32"),
        ("hidden", None, "hidden_out: expected None, as hidden is None, got a tensor"),
        ("hidden", torch.zeros(4, 4), r"hidden: expected shape \[3, any\], got \[4, 4\]"),
        ("hidden_out", torch.zeros(1, 2, 4).half(), "hidden_out: expected dtype float32, got float16"),
        ("hidden_out", torch.zeros(1, 3, 4), r"hidden_out: expected shape \[1, 2, 4\], got \[1, 3, 4\]"),
    ],
)
def test_errors(name, value, message):
    arguments = dict(
        path=torch.tensor([[0, 2]]),
        lengths=torch.tensor([2], dtype=torch.int32),
        slots=torch.tensor([[1, 2, 3]]),
        kv=KVBuffers.of([torch.zeros(8, 16)]),
        hidden=torch.zeros(3, 4),
        hidden_out=torch.zeros(1, 2, 4),
    )
    arguments[name] = value
    with pytest.raises((ValueError, RuntimeError), match=message):
        commit_path(**arguments)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
