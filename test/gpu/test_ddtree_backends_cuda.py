"""DDTREE on a CUDA device with prefill on a backend of its own: torch's, and FlashInfer's where it is installed."""

import importlib.util
import sys
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
from ddtree_host import Child, write_mla_target  # noqa: E402
from test_ddtree_cuda import CUDA, PROMPTS, TIE, assert_first_choices, greedy, models  # noqa: E402

register_cuda_ci(est_time=120, suite="gpu")

SECONDS = 240  # for all children together
FLASHINFER = all(importlib.util.find_spec(name) for name in ("flashinfer", "flashinfer.prefill"))


def split(host):
    """greedy(), and the classes of the target's backend and its halves."""
    backend = host.scheduler.tp_worker.model_runner.attn_backend
    halves = backend, backend.prefill_backend, backend.decode_backend
    return *greedy(host), [type(half).__name__ for half in halves]


def judge(host, answers):
    """How far the tokens of each answer are from greedy, in plain decoding on Triton; by name, with its own as `plain`."""
    answers = answers | {"plain": greedy(host)[0]}
    return {name: host.gaps(PROMPTS, outputs) for name, outputs in answers.items()}


# not CustomTestCase, whose module wants packages that a bare CUDA host lacks
class TestPrefillBackendCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = models(cls)
        plain = CUDA | dict(model_path=target)
        variants = {
            "": {},
            "mla": dict(model_path=write_mla_target(folder, nope=128, value=128)),
            "fp8": dict(kv_cache_dtype="fp8_e4m3"),
        }
        # Chunks, so that prefill reads a prefix that it has written and one that verify has.
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, chunked_prefill_size=64,
        )  # fmt: skip
        torch_native = dict(prefill_attention_backend="torch_native", enable_mixed_chunk=True)
        flashinfer = dict(attention_backend="flashinfer")
        cases = {"torch": ("", torch_native)}  # name: its variant, its arguments
        if FLASHINFER:
            cases |= {
                "flashinfer": ("", flashinfer | dict(speculative_ddtree_verify="validate")),
                "flashinfer, mixed": ("", flashinfer | dict(enable_mixed_chunk=True, page_size=16)),
                "flashinfer, mla": ("mla", flashinfer),
                "flashinfer, fp8": ("fp8", flashinfer),
            }
        children = {
            name: Child(tree | variants[variant] | arguments, split)
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
                name: cls.results[name][0]
                for name, (of, _) in cases.items()
                if of == variant and not isinstance(cls.results[name], RuntimeError)
            }
            if answers:
                judges[variant] = Child(plain | arguments, judge, answers)
        cls.gaps = {variant: child.result(SECONDS) for variant, child in judges.items()}

    def check(self, name, prefill, least_accepted, variant=""):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        self.assertEqual(result[4], ["HybridAttnBackend", prefill, "DDTreeTritonAttnBackend"])
        # The judge's prefix is Triton's, the answer's another backend's: two roundings, where there is one in TIE.
        tie = None if variant == "fp8" else 2 * TIE
        assert_first_choices(self, name, result, self.gaps[variant], least_accepted, tie)

    def test_torch(self):
        self.check("torch", "TorchNativeAttnBackend", 50)

    @unittest.skipUnless(FLASHINFER, "FlashInfer is not installed")
    def test_flashinfer(self):
        self.check("flashinfer", "FlashInferAttnBackend", 50)
        value, _, _ = self.results["flashinfer"][3]
        self.assertGreater(value, 0.0)  # the two kernels have run on the rows that FlashInfer wrote
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
