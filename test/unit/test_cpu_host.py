"""The CPU profile: engine selection, the torchvision stand-ins, and the ops of the pure-Python sgl_kernel."""

import os
import subprocess
import sys
import unittest
from unittest import mock

import torch
from sglang.srt.cpu_host import engine, optional_torchvision
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")


class TestSelectCpuEngine(CustomTestCase):
    def select(self, argv, *, can_only_be_cpu, preset=None):
        environment = {} if preset is None else {engine.ENVIRONMENT_VARIABLE: preset}
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(engine, "_can_only_be_cpu", return_value=can_only_be_cpu),
        ):
            return engine.select_cpu_engine(argv), os.environ.get(engine.ENVIRONMENT_VARIABLE)

    def test_the_device_argument_decides(self):
        self.assertEqual(self.select(["--device", "cpu"], can_only_be_cpu=False), (True, "1"))
        self.assertEqual(self.select(["--device=cpu"], can_only_be_cpu=False), (True, "1"))
        self.assertEqual(self.select(["--device", "cuda"], can_only_be_cpu=True), (False, None))
        self.assertEqual(
            self.select(["--device", "cpu", "--device", "cuda"], can_only_be_cpu=True), (False, None)
        )

    def test_without_a_device_argument_the_host_decides(self):
        self.assertEqual(self.select([], can_only_be_cpu=True), (True, "1"))
        self.assertEqual(self.select([], can_only_be_cpu=False), (False, None))

    def test_a_value_set_by_the_user_wins(self):
        self.assertEqual(self.select(["--device", "cpu"], can_only_be_cpu=True, preset="0"), (False, "0"))

    def test_importing_sglang_selects_the_cpu_engine(self):
        code = "import sglang.srt.utils.common as common; print(common.is_cpu())"
        environment = {k: v for k, v in os.environ.items() if k != engine.ENVIRONMENT_VARIABLE}
        output = subprocess.run(
            [sys.executable, "-c", code, "--device", "cpu"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        self.assertEqual(output.split()[-1], "True")


class TestOptionalTorchvision(CustomTestCase):
    def test_stand_ins_exist_only_between_begin_and_end(self):
        with mock.patch.object(optional_torchvision, "find_spec", return_value=None):
            optional_torchvision.begin()
            self.addCleanup(optional_torchvision.end)
            import torchvision.transforms as T
            from torchvision.transforms.functional import InterpolationMode

            optional_torchvision.end()
        self.assertNotIn("torchvision", sys.modules)
        with self.assertRaisesRegex(ImportError, "pip install torchvision"):
            T.Compose([])
        with self.assertRaisesRegex(ImportError, "pip install torchvision"):
            _ = InterpolationMode.BICUBIC

    def test_an_installed_torchvision_is_left_alone(self):
        with mock.patch.object(optional_torchvision, "find_spec", return_value=object()):
            optional_torchvision.begin()
        self.assertNotIn("torchvision", sys.modules)


@unittest.skipIf(torch.cuda.is_available(), "a CUDA host has upstream's sgl_kernel")
class TestCpuKernels(CustomTestCase):
    def test_an_op_that_needs_cuda_raises_when_called(self):
        from sgl_kernel import DeviceOnlyError, fp8_scaled_mm

        with self.assertRaisesRegex(DeviceOnlyError, "sgl_kernel.fp8_scaled_mm needs a CUDA device"):
            fp8_scaled_mm()
        with self.assertRaisesRegex(DeviceOnlyError, "rmsnorm_cpu needs a CUDA device"):
            torch.ops.sgl_kernel.rmsnorm_cpu(torch.zeros(1), torch.zeros(1), 1e-6)

    def test_our_subpackage_is_real(self):
        from sgl_kernel import ddtree

        self.assertTrue(callable(ddtree.verify_gqa))

    def test_copy_reads_all_slots_before_it_writes(self):
        from sgl_kernel import copy_all_layer_kv_cache_cpu

        layers = [torch.randn(10, 4), torch.randn(10, 6, dtype=torch.bfloat16)]
        targets, sources = torch.tensor([1, 2, 7]), torch.tensor([2, 1, 3])
        expected = [layer.clone() for layer in layers]
        for layer in expected:
            layer[targets] = layer[sources]
        copy_all_layer_kv_cache_cpu(
            torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64),
            torch.tensor([layer[0].nbytes for layer in layers]),
            targets,
            sources,
        )
        for layer, wanted in zip(layers, expected):
            self.assertTrue(torch.equal(layer, wanted))

    def test_copy_names_the_wrong_argument(self):
        from sgl_kernel import copy_all_layer_kv_cache_cpu

        with self.assertRaisesRegex(ValueError, r"tgt_loc: expected as many rows as src_loc \(2\), got 1"):
            copy_all_layer_kv_cache_cpu(
                torch.tensor([0]), torch.tensor([4]), torch.tensor([1]), torch.tensor([1, 2])
            )

    def test_new_slots_go_to_the_positions_of_their_requests(self):
        from sgl_kernel import assign_req_to_token_pool_cpu

        table = torch.zeros(3, 6, dtype=torch.int32)
        rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
        assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([11, 12, 13, 21, 22]), 6)
        self.assertEqual(table.tolist(), [[0, 0, 0, 0, 21, 22], [0] * 6, [0, 11, 12, 13, 0, 0]])

    def test_murmur_hash_against_the_published_algorithm(self):
        # MurmurHash3_x86_32 as published, in plain integers (seed 0, 16 bytes).
        def rotate(x, r):
            return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

        def reference(data: bytes) -> int:
            h = 0
            for i in range(0, len(data), 4):
                k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
                h = rotate(h ^ (rotate(k, 15) * 0x1B873593 & 0xFFFFFFFF), 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
            h ^= len(data)
            h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
            h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
            return h ^ (h >> 16)

        seeds, positions, columns = [0, 1, (1 << 63) - 1, -7], [0, 5, 123456, 2**31], [0, 1, 49151]
        hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(
            torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
        )
        for i, (seed, position) in enumerate(zip(seeds, positions)):
            for j, column in enumerate(columns):
                data = b"".join(
                    (value & (1 << bits) - 1).to_bytes(bits // 8, "little")
                    for value, bits in ((seed, 64), (position, 32), (column, 32))
                )
                self.assertEqual(int(hashed[i, j].item()), reference(data))

    def test_fused_sigmoid_mul(self):
        x, gate = torch.randn(5, 12), torch.randn(5, 3, 4)
        expected = x * torch.sigmoid(gate).reshape(5, 12)
        torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, gate)
        torch.testing.assert_close(x, expected)

    def test_text_models_load(self):
        from sglang.srt.models.registry import ModelRegistry

        supported = ModelRegistry.get_supported_archs()
        # qwen3_5, grok and muse_glimmer look up AMX ops when they are imported.
        for architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Grok1ModelForCausalLM",
            "Qwen3_5ForConditionalGeneration",
        ):
            self.assertIn(architecture, supported)


if __name__ == "__main__":
    unittest.main()
