"""The race detector's knowledge about upstream's ops, against the installed sglang-kernel."""

import unittest

import sgl_kernel
import sgl_kernel.flash_attn
import sgl_kernel.flash_mla  # noqa: F401  the two load further libraries of ops
import torch
from sglang.srt.model_executor.graph_guard.race_detector import detect_graph_races
from sglang.test.ci.ci_register import register_cuda_ci
from support.op_schemas import RETURN_NEW_TENSORS, RETURN_OPERANDS

register_cuda_ci(est_time=20, suite="gpu")


def returns_undeclared_tensor(schema):
    tensors = [r for r in schema.returns if "Tensor" in str(r.type)]
    return any(r.alias_info is None for r in tensors)


class OpsTest(unittest.TestCase):
    def test_every_op_that_returns_an_undeclared_tensor_is_known(self):
        """If this fails after an upgrade, find out whether the new op returns an operand, and record it."""
        schemas = {
            schema.name: schema
            for schema in torch._C._jit_get_all_schemas()
            if schema.name.startswith("sgl_kernel::") and not schema.name.startswith("sgl_kernel::ddtree")
        }
        undeclared = {name for name, schema in schemas.items() if returns_undeclared_tensor(schema)}
        self.assertEqual(undeclared - RETURN_NEW_TENSORS - set(RETURN_OPERANDS), set())
        self.assertIn("sgl_kernel::weak_ref_tensor", undeclared)
        for name, arguments in RETURN_OPERANDS.items():
            if name in schemas:  # FlashMLA's ops are absent where the image leaves its library out
                self.assertEqual(str(schemas[name]), str(torch._C.parse_schema(name + arguments)))

    def test_a_weak_reference_is_an_alias_and_no_access(self):
        x = torch.zeros(1024, device="cuda")
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with detect_graph_races() as report:
            with torch.cuda.stream(side):
                x.add_(1)
            alias = sgl_kernel.weak_ref_tensor(x)
        self.assertEqual(alias.data_ptr(), x.data_ptr())
        self.assertEqual((report.races, report.undeclared_aliases), ([], set()))
        torch.cuda.synchronize()


if __name__ == "__main__":
    unittest.main()
