"""The race detector's recorder on CPU tensors with numbered streams, its report and its exit status."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.model_executor.graph_guard import race_detector
from sglang.srt.model_executor.graph_guard.happens_before import LIVE, REUSE
from sglang.srt.model_executor.graph_guard.race_detector import Recorder, region_of
from sglang.srt.model_executor.graph_guard.race_report import RaceReport
from sglang.srt.model_executor.graph_guard.triton_stores import written_parameters
from sglang.test.ci.ci_register import register_cpu_ci
from support.op_schemas import RETURN_OPERANDS

register_cpu_ci(est_time=8, suite="unit")


class FakeRecorder(Recorder):
    on = 1

    def stream(self):
        return self.on

    def owns(self, tensor):
        return True


# The kernels below are only read as source, never run. These two classes stand for Triton's language modules.
class gl:
    pass


class tl:
    pass


def _store_through_helper(dst, value):
    tl.store(dst, value)


def kernel_copy(src_ptr, dst_ptr, index_ptr, n, BLOCK: int):
    index = tl.load(index_ptr + n)
    row = dst_ptr + index * n
    value = tl.load(src_ptr + n)
    if n > 0:
        tl.store(row + n, value)


def kernel_indirect(a_ptr, b_ptr, c_ptr, lock_ptr, n):
    out = a_ptr
    out += n
    _store_through_helper(b_ptr + n, tl.load(c_ptr))
    tl.store(out, 0)
    tl.atomic_add(lock_ptr, 1)


def kernel_other_names(a_ptr, b_ptr, c_ptr, desc_ptr):
    gl.store(a_ptr, gl.load(c_ptr))
    gl.nvidia.atomic_add(pointer=b_ptr, value=1)
    desc_ptr.store([0], 1)


class RecorderTest(unittest.TestCase):
    def setUp(self):
        self.report = RaceReport()
        self.recorder = FakeRecorder(self.report)

    def test_the_schema_tells_reads_from_writes(self):
        x, out = torch.ones(8), torch.zeros(8)
        with self.recorder:
            torch.add(x, 1, out=out)
            self.recorder.on = 2
            y = x * 2  # two reads do not race
            self.assertEqual(self.report.races, [])
            out.mul_(2)  # writes what stream 1 wrote
        (race,) = self.report.races
        self.assertEqual((race.kind, race.first.stream, race.second.stream), (LIVE, 1, 2))
        self.assertEqual(race.second.name, "aten.mul_.Tensor")
        self.assertTrue(race.first_writes and race.second_writes)
        self.assertEqual(y.sum(), 16)

    def implement(self, name, kernel):
        """Give an op of sglang-kernel a CPU kernel. Hosts without CUDA do not have the op, so define it first."""
        library = torch.library.Library("sgl_kernel", "FRAGMENT")
        self.addCleanup(library._destroy)
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(name + RETURN_OPERANDS[f"sgl_kernel::{name}"])
        library.impl(name, kernel, "CPU")
        return getattr(torch.ops.sgl_kernel, name)

    def test_an_op_that_marks_no_write_and_returns_nothing_writes_its_fresh_operands(self):
        library = torch.library.Library("graph_guard_unmarked", "DEF")
        self.addCleanup(library._destroy)
        library.define(
            "sum_reduce(Tensor input, Tensor output) -> ()"
        )  # the form of sgl_kernel::moe_sum_reduce
        library.impl("sum_reduce", lambda source, output: None, "CPU")
        source, output = torch.ones(4), torch.zeros(4)
        self.recorder.on_alloc(output.data_ptr())
        with self.recorder:
            torch.ops.graph_guard_unmarked.sum_reduce(source, output)
            self.recorder.on = 2
            source.clone()
            self.assertEqual(self.report.races, [])
            output.clone()
        self.assertEqual(len(self.report.races), 1)

    def test_an_op_that_only_makes_an_alias_touches_no_memory(self):
        """Breakable graphs call it on tensors that a side stream is still writing."""
        weak_ref_tensor = self.implement("weak_ref_tensor", lambda x: x.view(x.shape))
        x = torch.ones(4)
        with self.recorder:
            x.add_(1)
            self.recorder.on = 2
            weak_ref_tensor(x)
        self.assertEqual((self.report.races, self.report.undeclared_aliases), ([], set()))

    def test_a_known_op_reads_the_operand_that_it_returns(self):
        """FlashMLA returns the scheduler metadata that it was given."""

        def kernel(q, kcache, head_size_v, seqlens_k, block_table, scale, causal, metadata, splits):
            return q.clone(), q.clone(), metadata, splits

        dense_decode_fwd = self.implement("dense_decode_fwd", kernel)
        q, metadata, splits = torch.ones(4), torch.ones(4), torch.ones(4)
        with self.recorder:
            metadata.clone()
            self.recorder.on = 2
            dense_decode_fwd(q, q, 1, q, q, 1.0, True, metadata, splits)
            self.assertEqual(self.report.races, [])  # two reads
            self.recorder.on = 3
            metadata.add_(1)
        self.assertIn("sgl_kernel.dense_decode_fwd.default", {r.first.name for r in self.report.races})
        self.assertEqual(self.report.undeclared_aliases, set())

    def test_the_lists_cover_all_ops_that_return_operands(self):
        self.assertEqual(race_detector.ALIAS_ONLY | race_detector.RETURNS_OPERANDS, set(RETURN_OPERANDS))

    def test_an_unknown_op_that_returns_an_operand_is_named(self):
        library = torch.library.Library("graph_guard_alias", "DEF")
        self.addCleanup(library._destroy)
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CPU")
        x = torch.ones(4)
        with self.recorder:
            x.clone()
            self.recorder.on = 2
            torch.ops.graph_guard_alias.same(x)
        self.assertEqual(self.report.undeclared_aliases, {"graph_guard_alias::same"})
        self.assertEqual(len(self.report.races), 1)  # it may have written x
        self.assertIn("graph_guard_alias::same", str(self.report))

    def test_an_event_orders(self):
        out = torch.zeros(8)
        with self.recorder:
            out.add_(1)
            self.recorder.on_record(77, 1)
            self.recorder.on_wait(77, 2)
            self.recorder.on = 2
            out.add_(1)
        self.assertEqual(self.report.races, [])

    def test_reuse_is_found_through_the_allocation_trace(self):
        memory = torch.zeros(64)
        address = memory.data_ptr()
        with self.recorder:
            self.recorder.on_alloc(address)
            memory.add_(1)
            self.recorder.on_free(address)
            self.recorder.on = 2
            self.recorder.on_alloc(address)
            memory[:16].fill_(0)
        (race,) = self.report.races
        self.assertEqual(race.kind, REUSE)
        self.assertEqual(race.allocations[1][1], 2)

    def test_views_and_empties_launch_nothing(self):
        x = torch.zeros(4, 4)
        with self.recorder:
            x.t()[1:].unsqueeze(0)
            torch.empty_like(x)
        self.assertEqual(self.report.engine.operations, 0)

    def test_an_operand_that_only_provides_its_shape_is_not_read(self):
        x = torch.ones(4)
        with self.recorder:
            x.add_(1)
            self.recorder.on = 2
            torch.zeros_like(x)
            self.assertEqual(self.report.races, [])
            x.clone()
        self.assertEqual(len(self.report.races), 1)

    def test_operations_inside_a_custom_op_written_in_python_are_seen(self):
        def forked(x, out):
            self.recorder.on = 2
            out.copy_(x)
            self.recorder.on = 1

        library = torch.library.Library("graph_guard_race_detector", "DEF")
        self.addCleanup(library._destroy)
        library.define("forked(Tensor x, Tensor out) -> ()")  # the schema marks no write
        library.impl("forked", forked, "CPU")
        x, out = torch.ones(4), torch.zeros(4)
        with self.recorder:
            torch.ops.graph_guard_race_detector.forked(x, out)
            out.add_(1)
        self.assertEqual({r.first.name for r in self.report.races}, {"aten.copy_.default"})

    def test_an_opaque_launch_writes_the_operands_that_nothing_wrote_yet(self):
        source, result = torch.ones(4), torch.zeros(4)
        self.recorder.on_alloc(result.data_ptr())
        self.recorder.launch_opaque("jit::forward", [source, result])
        self.recorder.on = 2
        self.recorder.launch_opaque("jit::read", [source])
        self.assertEqual(self.report.races, [])
        self.recorder.launch_opaque("jit::read", [result])
        self.assertEqual(len(self.report.races), 1)

    def test_the_schema_of_a_custom_op_tells_what_its_launches_only_read(self):
        """Nothing has shown the recorder how the input was written, as if an unseen kernel had done it."""
        library = torch.library.Library("graph_guard_declared", "DEF")
        self.addCleanup(library._destroy)
        library.define("gemm(Tensor x, Tensor(a!) out) -> ()")
        library.impl("gemm", lambda x, out: self.recorder.launch_opaque("jit::run", [x, out]), "CPU")
        x, out = torch.ones(4), torch.zeros(4)
        for tensor in (x, out):
            self.recorder.on_alloc(tensor.data_ptr())
        with self.recorder:
            torch.ops.graph_guard_declared.gemm(x, out)
            self.recorder.on = 2
            x.clone()
            self.assertEqual(self.report.races, [])
            out.clone()
        self.assertNotEqual(self.report.races, [])
        self.recorder.launch_opaque("jit::run", [x])  # outside of the op it is a guess again
        self.assertIn(x.data_ptr(), self.recorder._written_blocks)

    def test_a_module_writes_the_tensors_that_it_returns(self):
        made = torch.zeros(4)

        class Function:
            def __call__(self):
                return made

        class Module:
            plan = Function()

        ffi = SimpleNamespace(Module=Module, Function=Function, Array=tuple)
        self.recorder.on_alloc(made.data_ptr())
        with (
            mock.patch.dict(sys.modules, tvm_ffi=ffi),
            race_detector._observe_tvm_ffi(self.recorder),
        ):
            self.assertIs(Module().plan(), made)
        self.recorder.on = 2
        self.recorder.launch_opaque("jit::forward", [made])  # reads what the plan wrote on the other stream
        (race,) = self.report.races
        self.assertEqual((race.first.name, race.first_writes, race.second_writes), ("jit::plan", True, False))

    def test_layer_and_stack(self):
        class Attention(torch.nn.Module):
            layer_id = 3

            def forward(self, x):
                return x.add_(1)

        x = torch.zeros(2)
        with self.recorder.layers, self.recorder:
            Attention()(x)
            self.recorder.on = 2
            x.add_(1)
        race = self.report.races[0]
        self.assertEqual(race.first.info["layer"], "3.Attention")
        self.assertIsNone(race.second.info["layer"])
        self.assertIn("Attention.forward", race.first.info["stack"][0])
        self.assertIn("float32[2] (8 B)", race.first.info["tensors"][0])


class RegionTest(unittest.TestCase):
    def test_dense_and_columns(self):
        x = torch.zeros(10, 64)
        self.assertEqual(region_of(x).nbytes, 2560)
        self.assertEqual(region_of(x).pitch, 0)
        q, k = x.split([48, 16], dim=1)
        self.assertEqual((region_of(q).pitch, region_of(q).width), (256, 192))
        self.assertFalse(region_of(q).overlaps(region_of(k)))
        self.assertTrue(region_of(q).overlaps(region_of(x)))
        self.assertFalse(region_of(q.unflatten(1, (3, 16))).overlaps(region_of(k)))
        self.assertEqual(region_of(x[:0]).nbytes, 0)
        self.assertEqual(region_of(torch.zeros(1).expand(5)).nbytes, 4)


class TritonSourceTest(unittest.TestCase):
    def test_parameters_that_a_kernel_stores_through(self):
        for kernel, pointers in (
            (kernel_copy, {"dst_ptr"}),
            (kernel_indirect, {"a_ptr", "b_ptr", "lock_ptr"}),
            (kernel_other_names, {"a_ptr", "b_ptr", "desc_ptr"}),
        ):
            self.assertEqual({p for p in written_parameters(kernel) if p.endswith("_ptr")}, pointers)
        self.assertIsNone(written_parameters(len))


class ReportTest(unittest.TestCase):
    def run_main(self, *argv):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            return race_detector.main(list(argv)), out.getvalue()

    def test_json_text_and_exit_status(self):
        report = RaceReport()
        recorder = FakeRecorder(report)
        x = torch.zeros(8)
        with recorder:
            for stream in (1, 2):
                recorder.on = stream
                x.add_(1)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "races.json")
            report.write(path)
            code, text = self.run_main(str(path))
            self.assertEqual(code, 1)
            for part in (
                "live-conflict",
                "stream 0x1",
                "stream 0x2",
                "aten.add_",
                "float32[8] (32 B)",
                __file__,
            ):
                self.assertIn(part, text)
            data = json.loads(path.read_text())
            self.assertEqual((data["races"], data["distinct"][0]["bytes"]), (1, 32))
            RaceReport().write(path)
            self.assertEqual(self.run_main(str(path))[0], 0)
            path.write_text("{}")
            code, text = self.run_main(str(path))
            self.assertEqual(code, 2)
            self.assertIn(str(path), text)
            self.assertEqual(self.run_main()[0], 2)


if __name__ == "__main__":
    unittest.main()
