"""DDTREE on a CUDA device with prefill on another backend: torch's, and FlashInfer's if it is installed."""

import importlib.util
import unittest

from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import TIE, assert_first_choices
from support.cuda import CUDA, gaps_by_name, greedy
from support.models import write_mla_target, write_models_for
from support.processes import EngineProcess

register_cuda_ci(est_time=120, suite="gpu")

SECONDS = 240  # for each child
FLASHINFER = all(importlib.util.find_spec(name) for name in ("flashinfer", "flashinfer.prefill"))


def greedy_and_backends(engine):
    """greedy(), and the classes of the target's backend and of its two halves."""
    backend = engine.scheduler.tp_worker.model_runner.attn_backend
    halves = backend, backend.prefill_backend, backend.decode_backend
    return *greedy(engine), [type(half).__name__ for half in halves]


def judge(engine, answers):
    """The gaps of all answers in plain decoding on Triton (see support.answers), its own under "plain"."""
    return gaps_by_name(engine, answers | {"plain": greedy(engine)[0].outputs})


# Not CustomTestCase: its module needs packages that a bare CUDA host lacks.
class TestPrefillBackendCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        variants = {
            "": {},
            "mla": dict(model_path=write_mla_target(folder, nope=128, value=128)),
            "fp8": dict(kv_cache_dtype="fp8_e4m3"),
        }
        # With chunks, prefill reads a prefix that itself has written, and one that verify has written.
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, chunked_prefill_size=64,
        )  # fmt: skip
        torch_native = dict(prefill_attention_backend="torch_native", enable_mixed_chunk=True)
        flashinfer = dict(attention_backend="flashinfer")
        cases = {"torch": ("", torch_native)}  # name: variant, arguments
        if FLASHINFER:
            cases |= {
                "flashinfer": ("", flashinfer | dict(speculative_ddtree_verify="validate")),
                "flashinfer, mixed": ("", flashinfer | dict(enable_mixed_chunk=True, page_size=16)),
                "flashinfer, mla": ("mla", flashinfer),
                "flashinfer, fp8": ("fp8", flashinfer),
            }
        children = {
            name: EngineProcess(tree | variants[variant] | arguments, greedy_and_backends)
            for name, (variant, arguments) in cases.items()
        }
        cls.results = {}
        for name, child in children.items():
            try:
                cls.results[name] = child.result(SECONDS)
            except RuntimeError as error:
                cls.results[name] = error
        judges = {}
        for variant, arguments in variants.items():
            answers = {
                name: cls.results[name][0].outputs
                for name, (of, _) in cases.items()
                if of == variant and not isinstance(cls.results[name], RuntimeError)
            }
            if answers:
                judges[variant] = EngineProcess(plain | arguments, judge, answers)
        cls.gaps = {variant: child.result(SECONDS) for variant, child in judges.items()}

    def check(self, name, prefill, least_accepted, variant=""):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        self.assertEqual(result[2], ["HybridAttnBackend", prefill, "TritonTreeVerify"])
        # Triton wrote the judge's prefix, another backend the answer's. TIE covers only one rounding.
        tie = None if variant == "fp8" else 2 * TIE
        assert_first_choices(self, name, result[0], self.gaps[variant], least_accepted, tie)

    def test_torch(self):
        self.check("torch", "TorchNativeAttnBackend", 50)

    @unittest.skipUnless(FLASHINFER, "FlashInfer is not installed")
    def test_flashinfer(self):
        self.check("flashinfer", "FlashInferAttnBackend", 50)
        value, _, _ = self.results["flashinfer"][1]
        self.assertGreater(value, 0.0)  # both verify kernels ran on the KV that FlashInfer's prefill wrote
        self.assertLess(value, 0.05)

    @unittest.skipUnless(FLASHINFER, "FlashInfer is not installed")
    def test_flashinfer_mixed(self):
        self.check("flashinfer, mixed", "FlashInferAttnBackend", 50)

    @unittest.skipUnless(FLASHINFER, "FlashInfer is not installed")
    def test_flashinfer_mla(self):
        self.check("flashinfer, mla", "FlashInferMLAAttnBackend", 30, "mla")

    @unittest.skipUnless(FLASHINFER, "FlashInfer is not installed")
    def test_flashinfer_fp8_kv(self):
        self.check("flashinfer, fp8", "FlashInferAttnBackend", 30, "fp8")


if __name__ == "__main__":
    unittest.main(verbosity=2)
