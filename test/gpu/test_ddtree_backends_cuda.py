"""DDTREE on a CUDA device with prefill on another backend than Triton, over page sizes, MLA and an fp8 KV cache."""

from __future__ import annotations

import importlib.util
import unittest
from typing import Any, NamedTuple

import torch
from sglang.test.ci.ci_register import register_cuda_ci
from support.answers import TIE, assert_first_choices
from support.cuda import CUDA, greedy, run_and_judge
from support.models import write_mla_target, write_models_for

register_cuda_ci(est_time=300, suite="gpu")

FLASHINFER = all(importlib.util.find_spec(name) for name in ("flashinfer", "flashinfer.prefill"))


class Case(NamedTuple):
    """A prefill backend and how it is used.

    Attributes:
        backend: --attention-backend.
        prefill: class of the prefill half.
        arguments: the arguments of the engine.
        variant: the model and its KV cache. Each variant has a judge.
        least_accepted: accepted draft tokens, at least.
    """

    backend: str
    prefill: str
    arguments: dict[str, Any]
    variant: str = "plain"
    least_accepted: int = 50

    def obstacle(self) -> str | None:
        """Why this machine cannot run the case, or None."""
        major, minor = torch.cuda.get_device_capability()
        if self.backend in ("flashinfer", "flashmla", "trtllm_mha", "trtllm_mla") and not FLASHINFER:
            return f"{self.backend} prefills on FlashInfer, which is not installed"
        if self.backend in ("fa3", "flashmla") and major != 9:
            return f"{self.backend} has kernels for sm_90 only, and this device is sm_{major}{minor}"
        if self.backend.startswith("trtllm") and major != 10:
            return f"{self.backend} has prefill kernels for sm_100 only, and this device is sm_{major}{minor}"
        return None


FA, FLASHINFER_PREFILL = "FlashAttentionBackend", "FlashInferAttnBackend"
CASES = {
    # Named for all attention, torch's backend would switch graphs off.
    "torch": Case(
        "triton",
        "TorchNativeAttnBackend",
        dict(prefill_attention_backend="torch_native", enable_mixed_chunk=True),
    ),
    "fa3, validate": Case("fa3", FA, dict(speculative_ddtree_verify="validate")),
    "fa3, mixed, page 16": Case("fa3", FA, dict(enable_mixed_chunk=True, page_size=16)),
    "fa3, page 64": Case("fa3", FA, dict(page_size=64)),
    "fa3, page 128": Case("fa3", FA, dict(page_size=128, chunked_prefill_size=128)),
    "fa3, mla": Case("fa3", FA, {}, "mla plain", 30),
    "fa3, fp8": Case("fa3", FA, {}, "fp8 plain", 30),
    "fa4, page 128": Case("fa4", FA, dict(page_size=128, chunked_prefill_size=128)),
    "flashmla": Case("flashmla", "FlashMLABackend", dict(page_size=64), "mla plain", 30),
    "flashinfer, validate": Case(
        "flashinfer", FLASHINFER_PREFILL, dict(speculative_ddtree_verify="validate")
    ),
    "flashinfer, mixed, page 16": Case(
        "flashinfer", FLASHINFER_PREFILL, dict(enable_mixed_chunk=True, page_size=16)
    ),
    "flashinfer, page 64": Case("flashinfer", FLASHINFER_PREFILL, dict(page_size=64)),
    "flashinfer, page 128": Case(
        "flashinfer", FLASHINFER_PREFILL, dict(page_size=128, chunked_prefill_size=128)
    ),
    # Upstream's ragged wrapper takes prefills without a prefix, and the paged one takes the others.
    "flashinfer, mla": Case("flashinfer", "FlashInferMLAAttnBackend", {}, "mla plain", 30),
    "flashinfer, mla, paged only": Case(
        "flashinfer",
        "FlashInferMLAAttnBackend",
        dict(flashinfer_mla_disable_ragged=True),
        "mla plain",
        30,
    ),
    "flashinfer, fp8": Case("flashinfer", FLASHINFER_PREFILL, {}, "fp8 plain", 30),
    "trtllm": Case("trtllm_mha", "TRTLLMHAAttnBackend", dict(page_size=64)),
    "trtllm, mla": Case("trtllm_mla", "TRTLLMMLABackend", dict(page_size=64), "mla plain", 30),
}


def greedy_and_backends(engine):
    """greedy(), and the classes of the target's backend and of its two halves."""
    backend = engine.scheduler.tp_worker.model_runner.attn_backend
    halves = backend, backend.prefill_backend, backend.decode_backend
    return *greedy(engine), [type(half).__name__ for half in halves]


class PrefillChecks:
    """Test methods for a unittest.TestCase: the cases of some backends, all engines at once.

    Attributes:
        backends: the backends whose cases run.
    """

    backends = ()

    @classmethod
    def setUpClass(cls):
        folder, target, drafter = write_models_for(cls)
        cls.cases = {name: case for name, case in CASES.items() if case.backend in cls.backends}
        possible = {name: case for name, case in cls.cases.items() if case.obstacle() is None}
        plain = CUDA | dict(model_path=target)
        variants = {
            "plain": plain,
            "mla plain": plain | dict(model_path=write_mla_target(folder, nope=128, value=128)),
            "fp8 plain": plain | dict(kv_cache_dtype="fp8_e4m3"),
        }
        # With chunks, prefill reads a prefix that itself has written, and one that verify has written.
        tree = dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, chunked_prefill_size=64,
        )  # fmt: skip
        trees = {
            name: (
                case.variant,
                variants[case.variant] | tree | dict(attention_backend=case.backend) | case.arguments,
                greedy_and_backends,
            )
            for name, case in possible.items()
        }
        used = {case.variant for case in possible.values()}
        judges = {variant: arguments for variant, arguments in variants.items() if variant in used}
        cls.results = run_and_judge(folder, judges, trees)

    def test_answers(self):
        for name, case in self.cases.items():
            with self.subTest(name):
                if obstacle := case.obstacle():
                    self.skipTest(obstacle)
                result = self.results[name]
                if isinstance(result, RuntimeError):
                    self.fail(f"{name}: {result}")
                self.assertEqual(result[2], ["HybridAttnBackend", case.prefill, "TritonTreeVerify"])
                # Triton wrote the judge's prefix, another backend the answer's. TIE covers only one rounding.
                tie = None if case.variant == "fp8 plain" else 2 * TIE
                gaps = self.results[case.variant]
                if isinstance(gaps, RuntimeError):
                    self.fail(f"judge of {case.variant}: {gaps}")
                assert_first_choices(self, name, result[0], gaps, case.least_accepted, tie)
                if case.arguments.get("speculative_ddtree_verify") == "validate":
                    value, _, _ = result[1]
                    self.assertGreater(value, 0.0)  # both verify kernels ran on the KV that the prefill wrote
                    self.assertLess(value, 0.05)


# Not CustomTestCase: its module needs packages that a bare CUDA host lacks.
class TestCompiledPrefillCuda(PrefillChecks, unittest.TestCase):
    backends = ("triton", "fa3", "fa4")


class TestFlashInferPrefillCuda(PrefillChecks, unittest.TestCase):
    """FlashInfer compiles for minutes at its first use. Upstream's backends of this class prefill on it."""

    backends = ("flashinfer", "flashmla", "trtllm_mha", "trtllm_mla")


if __name__ == "__main__":
    unittest.main(verbosity=2)
