"""Prefill and verify on different attention backends in one engine.

A CPU has only one backend. So the test registers a second instance of it as SGLang's intel_amx.
"""

import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.engine import Greedy
from support.models import write_models_for
from support.processes import run_engine
from support.prompts import patterned_prompts

register_cpu_ci(est_time=40, suite="e2e")

PROMPTS = patterned_prompts((1, 35, 95, 17))
NAME = "intel_amx"


def greedy(engine) -> Greedy:
    return engine.greedy(PROMPTS, 40)


class _Split:
    """A job on an engine with a split backend.

    It returns the greedy answers, the class of the backend, and for each half its class and the forward modes
    that it has seen.
    """

    def before(self):
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.speculative.ddtree import server_args

        class Prefill(TorchNativeAttnBackend):
            pass

        register_attention_backend(NAME)(Prefill)
        server_args.PREFILL_BACKENDS["cpu"] += (NAME,)

    def __call__(self, engine):
        split = engine.scheduler.tp_worker.model_runner.attn_backend
        seen = {}
        for half in ("prefill_backend", "decode_backend"):
            backend = getattr(split, half)
            modes = set()
            seen[half] = (type(backend).__name__, modes)

            def watched(*args, extend=backend.forward_extend, modes=modes, **options):
                (batch,) = (arg for arg in (*args, *options.values()) if hasattr(arg, "forward_mode"))
                modes.add(batch.forward_mode.name)
                return extend(*args, **options)

            backend.forward_extend = watched
            backend.forward_decode = None  # with speculation nothing decodes plainly
        return greedy(engine), type(split).__name__, seen


class TestPrefillBackend(CustomTestCase):
    def test_each_half_serves_its_modes(self):
        _, target, drafter = write_models_for(type(self))
        plain = {"model_path": target}
        expected = run_engine(plain, greedy).outputs
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, attention_backend=None,
            prefill_attention_backend=NAME, decode_attention_backend="torch_native", page_size=16,
            enable_mixed_chunk=True, chunked_prefill_size=32,
        )  # fmt: skip
        found, split, seen = run_engine(tree, _Split())
        self.assertEqual(found.outputs, expected)
        self.assertGreater(found.accepted, 20)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertEqual(split, "HybridAttnBackend")
        # SGLang's eager runner calls mixed batches EXTEND too.
        self.assertEqual(seen["prefill_backend"], ("Prefill", {"EXTEND"}))
        self.assertEqual(seen["decode_backend"], ("TorchNativeTreeVerify", {"TARGET_VERIFY"}))


if __name__ == "__main__":
    unittest.main()
