"""--dsv4-index-k-dtype: the argument, what it refuses, the size of the pool, and the choice of the backend."""

import argparse
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.dsv4 import index_key_dtype
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    get_dsv4_indexer_bytes_per_token,
)
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.model_configs import MODELS, write_config

register_cpu_ci(est_time=20, suite="unit")

load_plugins()
GET_EXEC = "sglang.srt.runtime_context.get_exec"


def server(dtype):
    """A server's arguments, as far as they are read here."""
    kernel = SimpleNamespace(dsv4_index_k_dtype=dtype, enable_deepseek_v4_fp4_indexer=False)
    return mock.patch(GET_EXEC, lambda: SimpleNamespace(kernel=kernel))


class TestArgument(CustomTestCase):
    def parse(self, *text):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return parser.parse_args(["--model-path", "x", *text]).dsv4_index_k_dtype

    def test_values(self):
        self.assertEqual(self.parse(), "auto")
        self.assertEqual(self.parse("--dsv4-index-k-dtype", "bf16"), "bf16")
        with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
            self.parse("--dsv4-index-k-dtype", "fp8")

    def test_a_server_on_a_cpu_refuses_it(self):
        with tempfile.TemporaryDirectory() as folder:
            write_config("deepseek_v4", Path(folder))
            args = ServerArgs(
                model_path=folder,
                load_format="dummy",
                device="cpu",
                skip_tokenizer_init=True,
                dsv4_index_k_dtype="bf16",
            )
            with self.assertRaisesRegex(
                ValueError, "dsv4-index-k-dtype bf16: --device: expected 'cuda', got 'cpu'"
            ):
                args.resolve_once()


class TestRefusals(CustomTestCase):
    def refuse(self, config=None, **changes):
        served = {field: value for field, value, _ in index_key_dtype.REFUSALS}
        config = MODELS["deepseek_v4"] | (config or {})
        index_key_dtype.refuse_server_args(SimpleNamespace(**served | changes), SimpleNamespace(**config))

    def test_what_is_served(self):
        self.refuse()

    def test_every_refused_argument_is_named(self):
        for field, value in {
            "device": "xpu",
            "enable_deepseek_v4_fp4_indexer": True,
            "enable_hisparse": True,
            "disaggregation_mode": "prefill",
            "hicache_storage_backend": "file",
        }.items():
            with self.subTest(field=field):
                flag = "--" + field.replace("_", "-")
                with self.assertRaisesRegex(ValueError, f"{flag}: expected .*, got {value!r}"):
                    self.refuse(**{field: value})

    def test_another_model(self):
        with self.assertRaisesRegex(
            ValueError, r"expected a DeepseekV4ForCausalLM, got \['LlamaForCausalLM'\]"
        ):
            self.refuse(config={"architectures": ["LlamaForCausalLM"]})

    def test_a_model_without_c4_layers(self):
        with self.assertRaisesRegex(
            ValueError, r"expected layers of compress ratio 4, got ratios \[0, 128\]"
        ):
            self.refuse(config={"compress_ratios": [0, 128, 128]})

    def test_rocm(self):
        with (
            mock.patch.object(torch.version, "hip", "7.2"),
            self.assertRaisesRegex(ValueError, "expected a CUDA build of torch, got ROCm 7.2"),
        ):
            self.refuse()


class TestSize(CustomTestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(index_key_dtype, "_registered", True))

    def test_bytes_per_key(self):
        for dtype, fp4, expected in (
            ("auto", False, 132),
            ("bf16", False, 256),
            ("auto", True, 68),
            ("bf16", True, 68),  # the pools of ratio 1 and 2
        ):
            with self.subTest(dtype=dtype, fp4=fp4), server(dtype):
                self.assertEqual(get_dsv4_indexer_bytes_per_token(128, fp4), expected)

    def test_without_a_server(self):
        with mock.patch(GET_EXEC, side_effect=ValueError("config namespace 'exec' not published")):
            self.assertEqual(get_dsv4_indexer_bytes_per_token(128, False), 132)

    def test_the_pool_and_its_accounting_agree(self):
        from sglang.srt.model_executor import pool_configurator

        with server("bf16"):
            pool = DeepSeekV4IndexerPool(
                1024,
                64,
                torch.float8_e4m3fn,
                128,
                2,
                "cpu",
                False,
                use_fp4_indexer=False,
                global_page_size=256,
            )
            counted = pool_configurator.get_dsv4_indexer_bytes_per_token(128, False)
        self.assertEqual(len(pool.index_k_with_scale_buffer), 2)
        for buffer in pool.index_k_with_scale_buffer:
            self.assertEqual(buffer.shape[1], 64 * counted)

    def test_a_server_without_the_plugin_is_refused(self):
        with (
            mock.patch.object(index_key_dtype, "_registered", False),
            server("bf16"),
            mock.patch.dict("os.environ", SGLANG_PLUGINS="ddtree"),
            self.assertRaisesRegex(
                ValueError, "SGLANG_PLUGINS to contain 'dsv4_index_keys' .*, got 'ddtree'"
            ),
        ):
            get_dsv4_indexer_bytes_per_token(128, False)


class TestRegistration(CustomTestCase):
    def setUp(self):
        class Upstream:
            pass

        self.created = Upstream()
        self.enterContext(mock.patch.dict(resolution_hooks._HOOKS, clear=True))
        self.enterContext(
            mock.patch.dict(attention_registry.ATTENTION_BACKENDS, {"dsv4": lambda runner: self.created})
        )
        index_key_dtype.register()

    def create(self, dtype):
        with server(dtype):
            return attention_registry.ATTENTION_BACKENDS["dsv4"](None)

    def test_auto_leaves_upstreams_backend_alone(self):
        backend = self.create("auto")
        self.assertIs(backend, self.created)
        self.assertEqual(vars(backend), {})

    def test_bf16_replaces_two_methods(self):
        self.created._forward_compress_all_in_one = upstreams = object()
        backend = self.create("bf16")
        self.assertIs(backend, self.created)
        keys = backend.forward_c4_indexer.__self__
        self.assertIs(backend._forward_compress_all_in_one.__self__, keys)
        self.assertIs(keys._compress_others, upstreams)

    def test_the_plugin_is_an_entry_point(self):
        from importlib.metadata import entry_points

        (found,) = entry_points(group="sglang.srt.plugins", name=index_key_dtype.ENTRY_POINT)
        self.assertIs(found.load(), index_key_dtype.register)


if __name__ == "__main__":
    unittest.main()
