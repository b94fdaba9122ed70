"""Whatever options of upstream's DFLASH a drafter has, greedy answers are plain decoding's."""

import unittest
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.drafters import variants, write_speculators, write_variant
from support.head_models import write_head
from support.jobs import greedy
from support.models import VOCABULARY, write_models_for, write_qwen2_target
from support.processes import run_engine
from support.prompts import PROMPTS, TOKENS

register_cpu_ci(est_time=100, suite="e2e")


class OwnEmbedding:
    """Runs a job with a drafter that SGLang takes for one of Nemotron 3.5, which needs a GPU for its 4-bit weights."""

    def __init__(self, job):
        self.job = job

    def before(self):
        from sglang.srt.models import dflash

        dflash.is_nemotron_35_draft_config = lambda config: True

    def __call__(self, engine):
        return self.job(engine)


class TestDrafters(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder, cls.target, cls.drafter = write_models_for(cls)
        cls.expected = run_engine({"model_path": cls.target}, greedy).outputs
        cls.plain = cls.run_tree(cls.drafter)
        cls.size = VOCABULARY, load_file(Path(cls.drafter, "model.safetensors"))["norm.weight"].numel()

    @classmethod
    def run_tree(cls, drafter, job=greedy, **arguments):
        tree = dict(
            model_path=cls.target, speculative_algorithm="DDTREE", speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )  # fmt: skip
        return run_engine(tree | arguments, job)

    def variant(self, **changes):
        return write_variant(self.drafter, self.folder / self.id(), **changes)

    def check(self, found, *, drafts_differently=True):
        """Check the answers, and whether the option changes what is drafted."""
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertLess(found.steps, len(PROMPTS) * TOKENS)
        self.assertEqual(found.steps != self.plain.steps, drafts_differently)

    def test_options(self):
        for name, changes in variants(self.drafter).items():
            with self.subTest(name):
                self.check(self.run_tree(write_variant(self.drafter, self.folder / name, **changes)))

    def test_draft_window(self):
        self.check(self.run_tree(self.drafter, speculative_draft_window_size=6))

    def test_draft_window_as_long_as_the_context(self):
        found = self.run_tree(self.drafter, speculative_draft_window_size=4096)
        self.check(found, drafts_differently=False)

    def test_draft_window_and_sliding_window(self):
        types = ["sliding_attention", "full_attention"]
        drafter = self.variant(layer_types=types, sliding_window=7, use_sliding_window=True)
        self.check(self.run_tree(drafter, speculative_draft_window_size=20))

    def test_padded_vocabulary(self):
        self.check(self.run_tree(self.variant(vocab_size=1000)), drafts_differently=False)

    def test_own_embedding(self):
        own = {"embed_tokens.weight": torch.randn(self.size)}
        self.check(self.run_tree(self.variant(weights=own), OwnEmbedding(greedy)))

    def test_own_embedding_that_equals_the_targets(self):
        weights = load_file(Path(self.target, "model.safetensors"))
        own = {"embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
        found = self.run_tree(self.variant(weights=own), OwnEmbedding(greedy))
        self.check(found, drafts_differently=False)

    def test_files_with_an_embedding_and_a_head(self):
        """Both are the target's in training. As DFLASH does, DDTREE takes the target's."""
        weights = {f"{name}.weight": torch.randn(self.size) for name in ("embed_tokens", "lm_head")}
        drafter = self.variant(weights=weights, has_embed_tokens=True, has_lm_head=True)
        self.check(self.run_tree(drafter), drafts_differently=False)

    def test_the_layout_of_the_speculators_library(self):
        """The same drafter in another layout drafts the same trees."""
        drafter = write_speculators(self.drafter, self.folder / "speculators")
        self.check(self.run_tree(drafter), drafts_differently=False)

    def test_a_selector_in_the_layout_of_the_speculators_library(self):
        selector = write_head(self.drafter, self.folder / "selector", "selector")
        found = self.run_tree(write_speculators(selector, self.folder / "dflash2"))
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(found.steps, self.run_tree(selector).steps)

    def test_an_own_head_over_some_of_the_tokens(self):
        tokens = [token for token in range(VOCABULARY) if token not in (5, 11)]
        drafter = write_speculators(self.drafter, self.folder / "reduced", tokens=tokens, head=self.target)
        self.check(self.run_tree(drafter))

    def test_a_target_that_offers_its_hidden_states_to_eagle3_only(self):
        """The drafter sees the same hidden states, so it drafts the same trees."""
        target = write_qwen2_target(self.target, self.folder / "qwen2")
        self.check(self.run_tree(self.drafter, model_path=target), drafts_differently=False)


if __name__ == "__main__":
    unittest.main()
