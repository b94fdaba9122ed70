"""The built libraries, and what Python reads from them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ci_registration import register_cpu_ci
from draft_tree_cases import ancestor_rows
from sgl_kernel import ddtree

register_cpu_ci(est_time=5, suite="kernel")

LIBRARIES = sorted(Path(ddtree.__file__).parent.glob("_ddtree_*.so"))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_exports_nothing(library):
    """Otherwise a statically linked libstdc++ would be mixed with torch's, and the first call of an op would crash."""
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    )
    assert symbols.stdout == ""


def test_limits_are_those_of_the_headers():
    """Python unpacks one list by position, so the order must be the library's."""
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    source = (csrc / "common/draft_tree.h").read_text() + (csrc / "tree_verify/params.h").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    sizes = re.search(r"#define DDTREE_GQA_HEAD_SIZES\(F\) (.*)", source)[1]
    assert ddtree.MAX_NODES == constants["kMaxNodes"]
    assert ddtree.MAX_DEPTH == constants["kMaxDepth"]
    assert ddtree.MAX_CANDIDATES == constants["kMaxCandidates"]
    assert ddtree.MAX_PATHS == constants["kMaxPaths"]
    assert ddtree.MLA_HEAD_SIZES == (constants["kMlaQkDim"], constants["kMlaVDim"])
    assert ddtree.GQA_HEAD_SIZES == tuple(map(int, re.findall(r"F\((\d+)\)", sizes)))


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 65, 128, 200, 256])
def test_ancestor_words(num_nodes):
    """Packing and unpacking against the layout in plain Python; bit 63 of a word is its sign."""
    generator = torch.Generator().manual_seed(num_nodes)
    parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes)]
    words = ddtree.ancestor_words(num_nodes)
    assert words == (num_nodes + 63) // 64
    want = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        want[node] |= want[parents[node]]
    packed = torch.tensor(ancestor_rows(parents, words), dtype=torch.int64)
    assert torch.equal(ddtree.ancestor_mask(packed, num_nodes), want)
    assert torch.equal(ddtree.pack_ancestors(want), packed)
    batch = packed.repeat(3, 1).view(3, num_nodes, words)
    assert torch.equal(ddtree.ancestor_mask(batch, num_nodes), want.expand(3, -1, -1))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
