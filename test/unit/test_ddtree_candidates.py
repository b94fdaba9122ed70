"""The top-K kernels, in Triton's interpreter: it is chosen when Triton is imported, so they run in a process of their own."""

import os
import subprocess
import sys
import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=40, suite="unit")

CHECK = """
import torch
from sglang.srt.speculative.ddtree.candidates import IDENTITY, TILE, LogitTransform, topk_logsumexp

generator = torch.Generator().manual_seed(0)
for rows, vocabulary, k, dtype, transform in (
    (3, 2 * TILE + 9, 8, torch.bfloat16, IDENTITY), (2, TILE, 1, torch.float32, IDENTITY),
    (1, TILE + 2, 32, torch.float32, IDENTITY), (2, 100, 12, torch.bfloat16, IDENTITY),
    (2, TILE + 9, 8, torch.float32, LogitTransform(0.5)), (2, TILE + 9, 8, torch.float32, LogitTransform(2.0, 5.0)),
):
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)  # in bfloat16 many are equal
    logits[0, : vocabulary // 2] = -float("inf")
    ids, values, log_sum = topk_logsumexp(logits, k, transform)
    expected = transform(logits).sort(dim=-1, descending=True, stable=True)
    if transform == IDENTITY:
        assert torch.equal(values, expected.values[:, :k]), (values, expected.values[:, :k])
        assert torch.equal(ids, expected.indices[:, :k]), (ids, expected.indices[:, :k])
    torch.testing.assert_close(values, expected.values[:, :k])
    torch.testing.assert_close(transform(logits).gather(1, ids), values)
    torch.testing.assert_close(log_sum, transform(logits).logsumexp(-1))
print("all right")
"""


class TestTopK(CustomTestCase):
    def test_against_a_stable_sort(self):
        """Equal logits, a tile without any, and fewer tokens than a tile."""
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        ran = subprocess.run(
            [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=300
        )
        self.assertEqual((ran.returncode, ran.stdout.strip()[-9:]), (0, "all right"), ran.stderr[-3000:])


if __name__ == "__main__":
    unittest.main()
