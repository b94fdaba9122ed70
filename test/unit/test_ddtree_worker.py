"""Which targets the worker refuses, and what it warms up."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.ddtree import recurrent_state
from sglang.srt.speculative.ddtree import worker as worker_module
from sglang.srt.speculative.ddtree.worker import DDTreeWorker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")


def model(*layers):
    """A model of attention layers of (h_q, h_kv, head size)."""
    return torch.nn.ModuleList(
        RadixAttention(h_q, size, 1.0, num_kv_heads=h_kv, layer_id=i)
        for i, (h_q, h_kv, size) in enumerate(layers)
    )


class TestTargetModel(CustomTestCase):
    def refuse(self, target, **runner):
        worker = DDTreeWorker.__new__(DDTreeWorker)
        worker.model_runner = SimpleNamespace(model=target, model_config=None, **runner)
        worker.selector, worker.lilicorr, worker._is_domino = None, None, False
        worker.num_nodes = 32
        with patch.object(recurrent_state, "mambaish_config", lambda config: None):
            worker._refuse_models()

    def test_layers_of_several_kv_shapes_are_refused(self):
        """Gemma 4 and MiMo-V2: one pool cannot hold them."""
        self.refuse(model((8, 2, 64), (16, 2, 64)), use_mla_backend=False)
        differing = model((8, 2, 64), (8, 4, 128))
        with self.assertRaisesRegex(
            ValueError,
            r"^DDTREE: target model: expected the same KV shape .* got .* \[\(2, 64, 64\), \(4, 128, 128\)\]: serve",
        ):
            self.refuse(differing, use_mla_backend=False)
        self.refuse(differing, use_mla_backend=True)  # absorbed and unabsorbed layers share one latent


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
