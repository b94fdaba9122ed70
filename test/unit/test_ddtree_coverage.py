"""DDTREE names what the tree ops and the torch backend do not cover."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.ddtree import coverage
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")


class TestNotCovered(CustomTestCase):
    def gaps(
        self,
        *,
        shape=(9, 3, 64, 64),
        kv=torch.bfloat16,
        device="cuda",
        dtype=torch.bfloat16,
        xai=-1,
        scale=None,
    ):
        layer = SimpleNamespace(
            **dict(zip(("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim"), shape)),
            xai_temperature_len=xai,
            k_scale_float=scale,
            v_scale_float=scale,
        )
        runner = SimpleNamespace(model=None, device=device, dtype=dtype, kv_cache_dtype=kv)
        with patch.object(coverage, "verify_layers", lambda model: [layer]):
            return coverage.not_covered(runner)

    def test_covered(self):
        for options in (
            {},
            {"shape": (16, 1, 576, 512)},
            {"kv": torch.float8_e4m3fn},
            {"scale": 1.0},
            {"kv": torch.float8_e4m3fn, "scale": 0.5},
        ):
            self.assertEqual(self.gaps(**options), [])
        self.assertEqual(self.gaps(device="cpu", dtype=torch.float32, kv=torch.float32), [])

    def test_not_covered(self):
        for options, text in (
            ({"shape": (9, 3, 80, 80)}, "80, 80"),
            ({"shape": (9, 3, 192, 128)}, "192, 128"),
            ({"kv": torch.float8_e5m2}, "float8_e5m2"),
            ({"dtype": torch.float32, "kv": torch.float32}, "queries in torch.float32"),
            ({"xai": 1024}, "temperature"),
            ({"scale": 0.5}, "scales of K and V"),
            ({"scale": 0.5, "kv": torch.float8_e4m3fn, "shape": (16, 1, 576, 512)}, "scales of K and V"),
        ):
            with self.subTest(text):
                (gap,) = self.gaps(**options)
                self.assertIn(text, gap)


class TestTorchPrefill(CustomTestCase):
    def gaps(
        self,
        *,
        mla=False,
        cap=0.0,
        scale=None,
        cache=torch.float8_e4m3fn,
        sinks=False,
        windows=False,
        device="cpu",
    ):
        layer = RadixAttention(4, 64, 1.0, num_kv_heads=2, layer_id=0, logit_cap=cap)
        layer.k_scale_float = layer.v_scale_float = scale
        return coverage.not_prefilled_by_torch(
            SimpleNamespace(
                use_mla_backend=mla,
                kv_cache_dtype=cache,
                model=torch.nn.ModuleList([layer]),
                device=device,
                is_hybrid_swa=windows,
                model_config=SimpleNamespace(has_attention_sinks=sinks),
            )  # fmt: skip
        )

    def test_what_it_prefills(self):
        for options in ({}, {"scale": 1.0}, {"scale": 0.5, "cache": torch.bfloat16}, {"windows": True}):
            self.assertEqual(self.gaps(**options), [])

    def test_what_it_does_not(self):
        """It does not run MLA or sinks. It would ignore caps and scales, and read the wrong slots of a window."""
        for options, expected in (
            ({"mla": True}, ["MLA"]),
            ({"cap": 50.0}, ["capped attention logits"]),
            ({"scale": 0.5}, ["scales of K and V other than 1"]),
            ({"sinks": True}, ["attention sinks"]),
            (
                {"windows": True, "device": "cuda:0"},
                ["a KV pool for sliding windows (unless --disable-hybrid-swa-memory is given)"],
            ),
            ({"mla": True, "cap": 50.0}, ["MLA", "capped attention logits"]),
        ):
            self.assertEqual(self.gaps(**options), expected)


class TestWidestWindow(CustomTestCase):
    def widest(self, *windows):
        return coverage.widest_window(
            torch.nn.ModuleList(
                RadixAttention(8, 64, 1.0, num_kv_heads=2, layer_id=i, sliding_window_size=window)
                for i, window in enumerate(windows)
            )
        )

    def test_widest_window(self):
        self.assertIsNone(self.widest(-1, None))
        self.assertEqual(self.widest(511, -1, 127), 511)


if __name__ == "__main__":
    unittest.main()
