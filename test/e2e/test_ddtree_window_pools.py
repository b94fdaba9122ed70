"""DDTREE on targets whose window layers have a KV pool of their own emits what plain decoding emits.

Plain decoding has one pool for all layers: SGLang's torch backend (0.5.23) reads the wrong slots of the other.
"""

import unittest
from functools import partial

import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.jobs import answer_twice, fill_context, greedy
from support.models import write_models_for
from support.processes import run_engine
from support.prompts import PROMPTS, TOKENS
from support.window_models import (
    WindowedLlama,
    gemma4_choices,
    mimo_v2_choices,
    watch_window_slots,
    write_gemma4,
    write_mimo_v2,
    write_windowed_llama,
)

register_cpu_ci(est_time=150, suite="e2e")

TREE = dict(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32)


def fill_pool(engine):
    """Greedy answers that do not fit into the pool together. Returns them, the change in free slots, and retractions."""
    queue, retracted, free = engine.scheduler._add_request_to_queue, [], engine.free_slots()

    def watched(request, is_retracted=False, **options):
        retracted.extend([request.rid] * is_retracted)
        return queue(request, is_retracted=is_retracted, **options)

    engine.scheduler._add_request_to_queue = watched
    requests = engine.generate(PROMPTS, temperature=0, max_new_tokens=150, ignore_eos=True)
    return (
        [list(request.output_ids)[:150] for request in requests],
        engine.free_slots() - free,
        len(retracted),
    )


class TestWindowPools(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder, target, drafter = write_models_for(cls)
        cls.tree = TREE | dict(
            model_path=write_windowed_llama(target, folder / "windowed"), speculative_draft_model_path=drafter
        )
        cls.plain = dict(model_path=cls.tree["model_path"], disable_hybrid_swa_memory=True)

    def both(self, job, shared=False, **arguments):
        """The job's result with plain decoding and with DDTREE. Checks that DDTREE's window slots were freed."""
        plain, _ = run_engine(self.plain | arguments, WindowedLlama(job, shared=shared))
        tree, freed = run_engine(self.tree | arguments, WindowedLlama(job, shared=shared))
        self.assertGreater(freed, 0, "no slot has left a window")
        return plain, tree

    def check(self, least_accepted=50, shared=False, **arguments):
        plain, tree = self.both(greedy, shared, **arguments)
        self.assertEqual(tree.outputs, plain.outputs)
        self.assertEqual(*tree.free_slots, "KV slots leaked")
        self.assertGreaterEqual(tree.accepted, least_accepted)
        self.assertLess(tree.steps, len(PROMPTS) * TOKENS)

    def test_tree(self):
        self.check()

    def test_page_16(self):
        self.check(page_size=16)

    def test_ancestors_of_several_words(self):
        """The tree is deeper and wider than the window."""
        self.tree = self.tree | dict(speculative_num_draft_tokens=130, speculative_eagle_topk=12)
        self.check()

    def test_chunked_and_mixed_prefill(self):
        self.check(chunked_prefill_size=16, enable_mixed_chunk=True)

    def test_without_radix_cache(self):
        self.check(disable_radix_cache=True)

    def test_shared_kv(self):
        self.check(20, shared=True)

    def test_radix_cache(self):
        for page in (1, 16):
            with self.subTest(page=page):
                plain, tree = self.both(answer_twice, page_size=page)
                self.assertEqual(tree[:2], plain[:2])
                self.assertGreater(tree[2], len(PROMPTS[4]), "the answer's KV was not in the cache")

    def test_retractions(self):
        expected, _, _ = run_engine(self.plain, WindowedLlama(fill_pool))[0]
        outputs, leaked, retracted = run_engine(
            self.tree | dict(max_total_tokens=800), WindowedLlama(fill_pool)
        )[0]
        self.assertEqual(outputs, expected)
        self.assertEqual(leaked, 0)
        self.assertGreater(retracted, 0)

    def test_context_ends(self):
        plain, tree = self.both(fill_context)
        self.assertEqual(tree, plain)


class _Greedy:
    """Runs greedy(). It returns the shapes of both pools too, and how many slots of the windows' pool were freed."""

    def __call__(self, engine):
        slots = engine.scheduler.token_to_kv_pool_allocator
        freed = watch_window_slots(slots)
        pool = slots.get_kvcache()
        shapes = [tuple(half.k_buffer[0].shape[1:]) for half in (pool.full_kv_pool, pool.swa_kv_pool)]
        return greedy(engine), shapes, sum(freed)


class _WithoutSinks(_Greedy):
    """For a MiMo-V2 without sinks. The model passes None, which the torch backend does not know."""

    def before(self):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        prefill = TorchNativeAttnBackend.forward_extend

        def forward_extend(self, *args, sinks, **options):
            assert sinks is None
            return prefill(self, *args, **options)

        TorchNativeAttnBackend.forward_extend = forward_extend


class _OnTorch(_Greedy):
    """For a Gemma 4, for which SGLang refuses its torch backend."""

    def before(self):
        from sglang.srt.arg_groups import model_hook

        model_hook.attention_backends_of = lambda view: ("triton", "triton")


class TestSeveralKVShapes(CustomTestCase):
    """MiMo-V2 and Gemma 4, judged by transformers: SGLang's torch backend cannot decode them plainly."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder, _, drafter = write_models_for(cls)
        cls.tree = TREE | dict(speculative_draft_model_path=drafter)

    def check(self, target, job, shapes, choices, least_accepted):
        for page in (1, 16):
            with self.subTest(page=page):
                found, pools, freed = run_engine(self.tree | dict(model_path=target, page_size=page), job)
                self.assertEqual(pools, shapes)
                self.assertGreater(freed, 0)
                self.assertGreater(found.accepted, least_accepted)
                self.assertEqual(*found.free_slots, "KV slots leaked")
                self.assertGreater(len(set(map(tuple, found.outputs))), 1)
                for prompt, output in zip(PROMPTS, found.outputs, strict=True):
                    self.assertEqual(choices(prompt, output), output)

    def test_mimo_v2(self):
        target = write_mimo_v2(self.folder / "mimo")
        self.check(target, _WithoutSinks(), [(1, 64), (2, 64)], mimo_v2_choices, 50)

    def test_gemma4(self):
        target = write_gemma4(self.folder / "gemma4", heads=(64, 128), dtype=torch.float32)
        self.check(target, _OnTorch(), [(1, 128), (1, 64)], partial(gemma4_choices, target), 20)


if __name__ == "__main__":
    unittest.main()
