"""Prefill on an attention backend of its own, verify in front of another: both halves in one server.

A CPU has one backend, so a second instance of it stands where the user's would: as SGLang's intel_amx.
"""

import tempfile
import unittest
from pathlib import Path

from ddtree_host import in_child, write_models
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=40, suite="e2e")

PROMPTS = [[3 + (7 * i + 5 * j * j) % 13 for j in range(length)] for i, length in enumerate((1, 35, 95, 17))]
NAME = "intel_amx"


def greedy(host):
    return host.greedy(PROMPTS, 40)


class _Split:
    """greedy(), and by half of the split backend the class of it and the forward modes that it has seen."""

    def before(self):
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.speculative.ddtree import contract

        class Prefill(TorchNativeAttnBackend):
            pass

        register_attention_backend(NAME)(Prefill)
        contract.PREFILL_BACKENDS["cpu"] += (NAME,)

    def __call__(self, host):
        split = host.scheduler.tp_worker.model_runner.attn_backend
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
            backend.forward_decode = None  # speculation has no plain decoding
        return (*greedy(host), type(split).__name__, seen)


class TestPrefillBackend(CustomTestCase):
    def test_each_half_serves_its_modes(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        target, drafter = write_models(Path(folder.name))
        plain = {"model_path": target}
        expected = in_child(plain, greedy)[0]
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, attention_backend=None,
            prefill_attention_backend=NAME, decode_attention_backend="torch_native", page_size=16,
            enable_mixed_chunk=True, chunked_prefill_size=32,
        )  # fmt: skip
        outputs, _, accepted, (before, after), split, seen = in_child(tree, _Split())
        self.assertEqual(outputs, expected)
        self.assertGreater(accepted, 20)
        self.assertEqual(before, after, "KV slots leaked")
        self.assertEqual(split, "HybridAttnBackend")
        # SGLang's eager runner calls a mixed batch EXTEND, too.
        self.assertEqual(seen["prefill_backend"], ("Prefill", {"EXTEND"}))
        self.assertEqual(seen["decode_backend"], ("DDTreeTorchNativeAttnBackend", {"TARGET_VERIFY"}))


if __name__ == "__main__":
    unittest.main()
