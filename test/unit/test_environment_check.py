"""The environment check without a GPU: what each check reports for good and for bad installations."""

import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from sglang.srt.environment_check import __main__ as main
from sglang.srt.environment_check import cubins, device, installation, layout, toolchain, variables
from sglang.srt.environment_check.report import FAIL, NONE, OK, WARN, Row
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")

ELF_LIST = """ELF file    1: a.1.sm_90.cubin
ELF file    2: a.2.sm_120f.cubin
ELF file    3: b.3.sm_120f.cubin
"""
RESOURCES = """
Fatbin elf code:
================
arch = sm_90
Resource usage:
 Function one:
  REG:32 STACK:0 SHARED:0
 Function hopper_only:
  REG:32 STACK:0 SHARED:0
arch = sm_120f
 Function one:
  REG:30 STACK:0 SHARED:0
"""


class Scratch(CustomTestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def patch(self, owner, name, value):
        patcher = mock.patch.object(owner, name, value)
        patcher.start()
        self.addCleanup(patcher.stop)

    def only(self, rows):
        (row,) = rows
        return row


class TestReport(Scratch):
    def run_main(self, checks, *arguments):
        with mock.patch.object(main, "CHECKS", checks), contextlib.redirect_stdout(io.StringIO()) as out:
            status = main.main(list(arguments))
        return status, out.getvalue()

    def test_a_check_that_raises_fails_and_the_others_still_run(self):
        def breaks():
            raise OSError("no disk")

        status, out = self.run_main([breaks, lambda: [Row("late", OK, "fine")]])
        self.assertEqual(status, 1)
        self.assertIn("OSError: no disk", out)
        self.assertIn("late", out)
        self.assertIn("1 ok, 0 warnings, 1 failed, 0 not checked", out)

    def test_warnings_and_skipped_checks_do_not_fail(self):
        status, _ = self.run_main([lambda: [Row("a", WARN, "w"), Row("b", NONE, "no card")]])
        self.assertEqual(status, 0)

    def test_stdout_holds_only_the_json(self):
        def noisy():
            print("a library's greeting")
            return [Row("a", FAIL, "broken", {"n": 1})]

        with contextlib.redirect_stderr(io.StringIO()):
            status, out = self.run_main([noisy], "--json")
        document = json.loads(out)
        self.assertEqual((status, document["passed"], document["rows"][0]["data"]), (1, False, {"n": 1}))


class TestInstallation(Scratch):
    def image(self, **build):
        self.patch(layout, "SHARE", self.folder)
        (self.folder / "build.json").write_text(json.dumps(build))

    def test_an_image_of_another_version_fails(self):
        self.image(version="0.0.1")
        self.patch(layout, "installed", lambda name: "9.9")
        row = self.only(installation.versions())
        self.assertEqual(row.status, FAIL)
        self.assertIn("expected 0.0.1 as the image records, got 9.9", row.detail)

    def test_without_our_kernels_it_fails(self):
        self.patch(layout, "build_info", dict)
        self.patch(layout, "installed", lambda name: None if name == "sglang-kernel-ddtree" else "1")
        self.assertEqual(self.only(installation.versions()).status, FAIL)

    def test_caches(self):
        good = self.folder / "id"
        with mock.patch.dict(
            os.environ,
            {
                "SGLANG_IMAGE_CACHE": str(self.folder),
                "TRITON_CACHE_DIR": str(good / "triton"),
                "HOME": str(good / "h"),
            },
        ):
            self.assertIn(self.only(installation.caches()).status, (OK, WARN))
            self.assertTrue((good / "triton").is_dir())
            (good / "h").rmdir()
            (good / "h").write_text("in the way")
            row = self.only(installation.caches())
        self.assertEqual(row.status, FAIL)
        self.assertIn(f"HOME={good / 'h'}", row.detail)
        self.assertIn("mount a volume", row.detail)

    def test_a_noexec_cache_fails(self):
        state = mock.Mock(f_flag=os.ST_NOEXEC, f_bavail=1 << 40, f_frsize=1)
        with (
            mock.patch.dict(os.environ, {"SGLANG_IMAGE_CACHE": str(self.folder), "X": f"{self.folder}/x"}),
            mock.patch.object(installation.os, "statvfs", return_value=state),
        ):
            row = self.only(installation.caches())
        self.assertEqual(row.status, FAIL)
        self.assertIn("noexec", row.detail)

    def test_sboms(self):
        self.image(version="1")
        self.assertEqual(self.only(installation.sboms()).status, FAIL)
        (self.folder / "sbom").mkdir()

        def write(name, *components):
            document = {"bomFormat": "CycloneDX", "components": [{"name": c} for c in components]}
            (self.folder / "sbom" / f"{name}.cdx.json").write_text(json.dumps(document))

        write("python", "sglang", "torch")
        write("debian", "bash")
        self.assertIn("expected CycloneDX with libc6", self.only(installation.sboms()).detail)
        write("debian", "bash", "libc6")
        row = self.only(installation.sboms())
        self.assertEqual((row.status, row.data), (OK, {"python": 2, "debian": 2}))

    def test_what_was_left_out_must_be_gone(self):
        self.image(version="1")
        records = [{"verb": "remove", "paths": ["sgl_kernel/*_ops.so"], "bytes": 3}]
        (self.folder / "pruned.json").write_text(json.dumps(records))
        self.patch(layout, "site_packages", lambda: self.folder)
        self.assertEqual(self.only(installation.left_out()).status, OK)
        (self.folder / "sgl_kernel").mkdir()
        (self.folder / "sgl_kernel" / "flash_ops.so").touch()
        self.assertEqual(self.only(installation.left_out()).status, FAIL)

    def test_a_module_that_cannot_be_imported_is_named(self):
        self.image(version="1")
        self.patch(layout, "profile", lambda: "cpu")
        self.patch(installation, "MODULES", {"cpu": ("json", "csv")})
        self.assertEqual(self.only(installation.imports()).status, OK)
        self.patch(installation, "MODULES", {"cpu": ("json", "no_such_module_here")})
        row = self.only(installation.imports())
        self.assertEqual(row.status, FAIL)
        self.assertIn("1 of 2 fail: no_such_module_here: ModuleNotFoundError", row.detail)

    def test_outside_an_image_an_optional_library_may_be_absent(self):
        self.patch(layout, "profile", lambda: "cpu")
        self.patch(installation, "MODULES", {"cpu": ("json", "no_such_library.part")})
        self.patch(layout, "build_info", dict)
        row = self.only(installation.imports())
        self.assertEqual((row.status, row.data["absent"]), (OK, ["no_such_library.part"]))
        self.assertIn("not installed: no_such_library.part", row.detail)
        self.patch(installation, "REQUIRED", ("no_such_library",))
        self.assertEqual(self.only(installation.imports()).status, FAIL)

    def test_an_import_that_kills_the_process_is_named(self):
        self.image(version="1")
        (self.folder / "dies_on_import.py").write_text("import os; os._exit(3)")
        self.patch(layout, "profile", lambda: "cpu")
        self.patch(installation, "MODULES", {"cpu": ("json", "dies_on_import")})
        with mock.patch.dict(os.environ, {"PYTHONPATH": str(self.folder)}):
            row = self.only(installation.imports())
        self.assertEqual(row.status, FAIL)
        self.assertIn("dies_on_import: the process died", row.detail)


class TestVariables(Scratch):
    def rows(self, **values):
        with mock.patch.dict(os.environ, values, clear=True):
            return variables.variables()

    def test_each_odd_value_is_a_warning_that_names_its_variable(self):
        missing = str(self.folder / "missing.xml")
        for name, value, text in (
            ("NCCL_GRAPH_FILE", "", "expected a file, got an empty value"),
            ("NCCL_TOPO_FILE", missing, "missing.xml, which does not exist"),
            ("NCCL_P2P_LEVEL", "nvl", "got 'nvl'"),
            ("NCCL_P2P_LEVEL", "", "expected one of LOC, NVL"),
            ("NCCL_P2P_DISABLE", "yes", "expected a number, got 'yes'"),
            ("NCCL_DEBUG", "verbose", "got 'VERBOSE'"),
            ("CUDA_VISIBLE_DEVICES", "", "hides every card"),
            ("CUDA_LAUNCH_BLOCKING", "1", "slow"),
            ("CUDA_HOME", str(self.folder), "without bin/nvcc"),
            ("SGLANG_DDTREE_FP8", "exakt", "expected one of exact, got 'exakt'"),
            ("SGLANG_GRAPH_GUARD", "off", "expected one of 0, 1, false, true, got 'off'"),
        ):
            with self.subTest(name=name, value=value):
                row = self.only(self.rows(**{name: value}))
                self.assertEqual((row.check, row.status), (f"variable {name}", WARN))
                self.assertIn(text, row.detail)

    def test_usual_values_are_listed(self):
        graph = self.folder / "graph.xml"
        graph.touch()
        values = {
            "NCCL_GRAPH_FILE": str(graph),
            "NCCL_P2P_LEVEL": "NVL",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_DEBUG": "warn",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "SGLANG_DDTREE_SM90": "0",
            "SGLANG_GRAPH_GUARD": "False",
        }
        row = self.only(self.rows(**values, HF_TOKEN="secret"))
        self.assertEqual((row.status, row.data), (OK, values))
        self.assertNotIn("secret", str(row))

    def test_several_odd_values(self):
        self.assertEqual(len(self.rows(NCCL_GRAPH_FILE="", NCCL_IB_DISABLE="no", NCCL_DEBUG="INFO")), 2)


class TestToolchain(Scratch):
    def nvcc(self, text):
        path = self.folder / "bin" / "nvcc"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        self.patch(layout, "profile", lambda: "cuda")
        self.patch(layout, "build_info", lambda: {"architectures": "9.0;12.0f"})
        self.patch(layout, "cuda_home", lambda: self.folder)
        self.patch(toolchain.shutil, "which", lambda name: f"/bin/{name}")

    def test_a_compiler_error_is_shown(self):
        self.nvcc("echo 'ptxas fatal: no sm_120f here' >&2; exit 255")
        row = self.only(toolchain.compiler())
        self.assertEqual(row.status, FAIL)
        self.assertIn("no sm_120f here", row.detail)

    def test_the_compiler_is_run_for_each_architecture(self):
        self.nvcc(f'echo "$@" >> {self.folder}/calls; echo "release 13.0, V13.0.88"')
        row = self.only(toolchain.compiler())
        self.assertEqual(
            (row.status, row.detail),
            (OK, "nvcc 13.0 compiles and links (-lcudart -lcuda) for sm_90, sm_120f"),
        )
        calls = (self.folder / "calls").read_text()
        for part in ("arch=compute_120f,code=sm_120f", "arch=compute_90,code=sm_90", "-lcuda", "-lcudart"):
            self.assertIn(part, calls)

    def test_without_an_architecture_nothing_is_compiled(self):
        self.nvcc("exit 1")
        self.patch(layout, "build_info", dict)
        self.patch(layout, "site_packages", lambda: self.folder)
        self.assertEqual(self.only(toolchain.compiler()).status, NONE)

    def test_no_host_compiler_fails(self):
        self.nvcc("exit 0")
        self.patch(toolchain.shutil, "which", lambda name: None if name == "ninja" else f"/bin/{name}")
        self.assertIn("ninja", self.only(toolchain.compiler()).detail)


class TestCubins(Scratch):
    def test_serves(self):
        for cubin, capability, expected in (
            ("sm_120f", (12, 0), True),
            ("sm_120f", (12, 1), True),
            ("sm_120a", (12, 1), False),
            ("sm_100a", (10, 0), True),
            ("sm_100a", (10, 3), False),
            ("sm_100", (10, 3), True),
            ("sm_103a", (10, 0), False),
            ("sm_90", (9, 0), True),
            ("sm_90", (12, 0), False),
            ("sm_80", (9, 0), False),
        ):
            with self.subTest(cubin=cubin, capability=capability):
                self.assertEqual(cubins.serves(cubin, capability), expected)

    def library(self, resources=RESOURCES, **build):
        """An installation with our library; ``build`` is what the image records, nothing by default."""
        path = self.folder / "sgl_kernel" / "ddtree" / "_ddtree_cuda.so"
        path.parent.mkdir(parents=True)
        path.touch()
        self.patch(layout, "profile", lambda: "cuda")
        self.patch(layout, "site_packages", lambda: self.folder)
        self.patch(layout, "build_info", lambda: build)
        self.patch(cubins, "listing", lambda *a: ELF_LIST if a[0] == "--list-elf" else resources)

    def test_architectures_are_those_of_the_image(self):
        self.patch(layout, "build_info", lambda: {"architectures": "9.0;12.0f"})
        self.assertEqual(cubins.architectures(), ["90", "120f"])

    def test_outside_an_image_the_architectures_are_those_of_our_library(self):
        self.library()
        self.assertEqual(cubins.architectures(), ["90", "120f"])
        self.assertEqual([row.status for row in cubins.kernels()], [OK, OK])
        layout.ddtree_library().unlink()
        self.assertEqual(cubins.architectures(), [])
        self.assertEqual(self.only(cubins.kernels()).status, FAIL)

    def test_architectures_of_each_library(self):
        self.library()
        row = self.only(cubins.libraries())
        self.assertEqual((row.status, row.data), (OK, {"sm_120f": 2, "sm_90": 1}))

    def test_kernels_of_each_architecture(self):
        self.library()
        hopper, blackwell = cubins.kernels()
        self.assertEqual((hopper.status, hopper.data["kernels"]), (OK, ["hopper_only", "one"]))
        self.assertEqual((blackwell.check, blackwell.status), ("our kernels sm_120f", OK))

    def test_a_kernel_that_an_architecture_lacks_is_a_failure(self):
        more = (
            RESOURCES
            + "arch = sm_100a\n Function one:\n Function two:\narch = sm_103a\n Function one:\n Function two:\n"
        )
        self.library(more, architectures="12.0f;10.0a")
        blackwell, data_center = cubins.kernels()
        self.assertEqual((blackwell.status, blackwell.data["missing"]), (FAIL, ["two"]))
        self.assertEqual(data_center.status, OK)

    def test_an_architecture_without_kernels_is_a_failure(self):
        self.library(architectures="10.3a")
        self.assertEqual(self.only(cubins.kernels()).status, FAIL)


class TestDevice(Scratch):
    def test_without_a_card_nothing_fails(self):
        for check in (device.cards, device.shared_memory, device.kernels, device.all_reduce):
            with (
                mock.patch("torch.cuda.is_available", return_value=False),
                mock.patch("torch.cuda.device_count", return_value=0),
            ):
                self.assertEqual(self.only(check()).status, NONE)

    def test_an_old_driver_fails(self):
        import pynvml

        for version, status in (("570.86.10", FAIL), ("580.65.06", OK)):
            with (
                mock.patch.object(pynvml, "nvmlInit"),
                mock.patch.object(pynvml, "nvmlSystemGetDriverVersion", return_value=version),
            ):
                self.assertEqual(self.only(device.driver()).status, status)

    def test_a_kernel_that_differs_from_its_reference_fails(self):
        reference = device.verify("cpu")
        for change, status in ((0.0, OK), (0.1, FAIL), (float("nan"), FAIL)):

            def verify(place, change=change):
                return reference if place == "cpu" else reference + change

            with (
                mock.patch.object(device, "has_card", return_value=True),
                mock.patch.object(device, "verify", verify),
                mock.patch("torch.cuda.device_count", return_value=1),
            ):
                self.assertEqual(self.only(device.kernels()).status, status)

    def test_the_reference_is_tree_attention(self):
        import torch

        inputs = device.verify_inputs("cpu")
        out = device.verify("cpu").float()
        slots = torch.cat([inputs["kv_indices"], inputs["tree_slots"]]).long()
        prefix, num_nodes = len(inputs["kv_indices"]), len(inputs["q"])
        keys = inputs["k_cache"][slots].float().repeat_interleave(4, dim=1)
        values = inputs["v_cache"][slots].float().repeat_interleave(4, dim=1)
        logits = torch.einsum("nhd,shd->nhs", inputs["q"].float(), keys) / 128**0.5
        for node in range(num_nodes):
            for other in range(num_nodes):
                if not inputs["ancestors"][node, 0] >> other & 1:
                    logits[node, :, prefix + other] = float("-inf")
        expected = torch.einsum("nhs,shd->nhd", logits.softmax(-1), values)
        self.assertLess((out - expected).abs().max().item(), device.KERNEL_TOLERANCE)

    def all_reduce_row(self, results):
        """The row of a host with two cards, when the all-reduces end with these results one after the other."""
        answers = iter(results)
        with (
            mock.patch("torch.cuda.device_count", return_value=2),
            mock.patch.object(device, "all_reduce_in", lambda environment, world: next(answers)),
        ):
            return self.only(device.all_reduce())

    def test_a_failed_all_reduce_names_its_cause(self):
        self.assertEqual(self.all_reduce_row([None]).status, OK)
        row = self.all_reduce_row(["no answer within 120 s", None])
        self.assertEqual(row.status, FAIL)
        self.assertIn("NCCL_P2P_DISABLE=1", row.detail)
        self.assertIn("IOMMU", row.detail)
        self.assertNotIn("IOMMU", self.all_reduce_row(["broken", "still broken"]).detail)

    def test_a_rank_that_hangs_is_ended(self):
        self.patch(device, "_ALL_REDUCE", "import time; time.sleep(60)")
        self.patch(device, "ALL_REDUCE_SECONDS", 0.5)
        self.assertIn("no answer within", device.all_reduce_in(dict(os.environ), 2))
        self.patch(device, "_ALL_REDUCE", "raise SystemExit('rank says no')")
        self.patch(device, "ALL_REDUCE_SECONDS", 20)
        self.assertIn("rank says no", device.all_reduce_in(dict(os.environ), 2))


if __name__ == "__main__":
    unittest.main()
