"""What the worker warms up."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.speculative.ddtree import worker as worker_module
from sglang.srt.speculative.ddtree.worker import DDTreeWorker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")


class TestWarmUp(CustomTestCase):
    def reserved(self, max_requests):
        """Requests per batch, and whether its slots are aligned, of each reservation that the warm-up makes."""
        worker = DDTreeWorker.__new__(DDTreeWorker)
        worker.device = "cpu"
        table = torch.arange(6).view(2, 3)
        worker.model_runner = SimpleNamespace(
            max_running_requests=max_requests, req_to_token_pool=SimpleNamespace(req_to_token=table)
        )
        made = []

        def reserve(rows, table, begin, end, slots, bs):
            self.assertTrue(torch.equal(begin, end))  # writes nothing
            made.append((bs, slots.data_ptr() % 16 == 0))

        with patch.object(worker_module, "assign_req_to_token_pool_func", reserve):
            worker._warm_up_reservations()
        return made

    def test_every_batch_has_its_kernel(self):
        """Triton compiles upstream's kernel for the next power of two."""
        for max_requests, expected in ((1, [1]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16])):
            made = self.reserved(max_requests)
            self.assertEqual(made, [(bs, aligned) for bs in expected for aligned in (True, False)])


if __name__ == "__main__":
    unittest.main()
