"""Which KV pools DDTREE accepts."""

import unittest
from types import SimpleNamespace

import torch
from sglang.srt.speculative.ddtree.kv_pool import kv_buffers
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")


def pool(name, **fields):
    """A pool of a class of this name."""
    return type(name, (), fields)()


class TestKVBuffers(CustomTestCase):
    def test_buffers_of_all_layers(self):
        layers = [torch.zeros(5, 2, 4)] * 2
        mha = pool("MHATokenToKVPool", k_buffer=layers, v_buffer=layers, is_quantized_kv_cache=False)
        self.assertEqual(kv_buffers(mha).table.shape, (4, 3))
        self.assertEqual(kv_buffers(pool("MLATokenToKVPool", kv_buffer=layers)).table.shape, (2, 3))

    def test_packed_numbers_are_refused(self):
        """Their scales are in separate buffers."""
        packed = pool(
            "MHATokenToKVPool",
            is_quantized_kv_cache=True,
            quant_method=SimpleNamespace(name="fp4_mx_block16"),
        )
        with self.assertRaisesRegex(ValueError, "^DDTREE: --kv-cache-dtype: .*fp4_mx_block16"):
            kv_buffers(packed)

    def test_other_layouts_are_refused(self):
        """A row of such a buffer is a page, in which a slot's numbers are not contiguous."""
        with self.assertRaisesRegex(ValueError, "^DDTREE: KV pool: expected the layout 'nhd'.*'hnd'"):
            kv_buffers(pool("MHATokenToKVPool", kv_cache_layout="hnd"))

    def test_other_pools_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: KV pool: expected .* got SWAKVPool, .*without DDTREE"
        ):
            kv_buffers(pool("SWAKVPool"))


if __name__ == "__main__":
    unittest.main()
