"""Whatever options of upstream's DFLASH a drafter has, greedy answers are plain decoding's."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.drafters import of_each_layer, write_variant
from support.jobs import greedy
from support.models import VOCABULARY, write_models_for
from support.processes import run_engine
from support.prompts import PROMPTS, TOKENS

register_cpu_ci(est_time=200, suite="e2e")


WINDOW = dict(sliding_window=7, use_sliding_window=True)


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
        cls.config = json.loads(Path(cls.drafter, "config.json").read_text())
        cls.expected = run_engine({"model_path": cls.target}, greedy).outputs
        cls.plain = cls.run_tree(cls.drafter)

    @classmethod
    def run_tree(cls, drafter, job=greedy, **arguments):
        tree = dict(
            model_path=cls.target, speculative_algorithm="DDTREE", speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=32,
        )  # fmt: skip
        return run_engine(tree | arguments, job)

    def variant(self, **changes):
        torch.manual_seed(1)
        return write_variant(self.drafter, self.folder / self.id(), **changes)

    def check(self, found, *, drafts_differently=True):
        """Check the answers, and whether the option changes what is drafted."""
        self.assertEqual(found.outputs, self.expected)
        self.assertEqual(*found.free_slots, "KV slots leaked")
        self.assertLess(found.steps, len(PROMPTS) * TOKENS)
        self.assertEqual(found.steps != self.plain.steps, drafts_differently)

    def test_block_of_16(self):
        self.check(self.run_tree(self.variant(dflash_config=dict(block_size=16))))

    def test_block_of_32(self):
        drafter = self.variant(dflash_config=dict(block_size=32))
        self.check(self.run_tree(drafter, speculative_num_draft_tokens=64))

    def test_draft_window(self):
        self.check(self.run_tree(self.drafter, speculative_draft_window_size=6))

    def test_draft_window_as_long_as_the_context(self):
        found = self.run_tree(self.drafter, speculative_draft_window_size=4096)
        self.check(found, drafts_differently=False)

    def test_causal_sliding_window(self):
        self.check(self.run_tree(self.variant(layer_types=["sliding_attention"] * 2, **WINDOW)))

    def test_sliding_window_that_is_not_causal(self):
        types = ["sliding_attention", "full_attention"]
        self.check(self.run_tree(self.variant(layer_types=types, **WINDOW, is_causal=False)))

    def test_draft_window_and_sliding_window(self):
        drafter = self.variant(layer_types=["sliding_attention", "full_attention"], **WINDOW)
        self.check(self.run_tree(drafter, speculative_draft_window_size=20))

    def test_sinks_and_scaled_values(self):
        sinks = of_each_layer(self.config, "self_attn.attention_sink_bias", 2)
        options = dict(attention_sink_bias=True, attention_value_scale=0.7)
        self.check(self.run_tree(self.variant(dflash_config=options, weights=sinks)))

    def test_scaled_and_capped_logits(self):
        options = dict(output_multiplier=0.3, final_logit_softcapping=2.0)
        self.check(self.run_tree(self.variant(dflash_config=options)))

    def test_padded_vocabulary(self):
        self.check(self.run_tree(self.variant(vocab_size=1000)), drafts_differently=False)

    def test_own_embedding(self):
        own = {"embed_tokens.weight": torch.randn(VOCABULARY, self.config["hidden_size"])}
        self.check(self.run_tree(self.variant(weights=own), OwnEmbedding(greedy)))

    def test_own_embedding_that_equals_the_targets(self):
        weights = load_file(Path(self.target, "model.safetensors"))
        own = {"embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
        found = self.run_tree(self.variant(weights=own), OwnEmbedding(greedy))
        self.check(found, drafts_differently=False)

    def test_files_with_an_embedding_and_a_head(self):
        """Both are the target's in training. As DFLASH does, DDTREE takes the target's."""
        size = VOCABULARY, self.config["hidden_size"]
        weights = {f"{name}.weight": torch.randn(size) for name in ("embed_tokens", "lm_head")}
        drafter = self.variant(weights=weights, has_embed_tokens=True, has_lm_head=True)
        self.check(self.run_tree(drafter), drafts_differently=False)

    def test_laguna(self):
        """A gate after the attention, and a norm for each target layer that the drafter reads."""
        hidden, heads, size = (self.config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
        weights = of_each_layer(self.config, "self_attn.g_proj.weight", heads * size, hidden)
        weights |= {f"aux_hidden_norms.{i}.weight": torch.ones(hidden) for i in range(2)}
        drafter = self.variant(architectures=["DFlashLagunaForCausalLM"], gating=True, weights=weights)
        self.check(self.run_tree(drafter))

    def test_convolution(self):
        hidden = self.config["hidden_size"]
        weights = {}
        for name in ("attention_conv", "mlp_conv"):
            weights |= of_each_layer(self.config, f"{name}.base_kernel", 2, 2, hidden)
            weights |= of_each_layer(self.config, f"{name}.kernel_projection.weight", 2 * 2 * 4, hidden)
        options = dict(conv_kernel_size=2, conv_group_size=hidden // 4)
        self.check(self.run_tree(self.variant(dflash_config=options, weights=weights)))


if __name__ == "__main__":
    import unittest

    unittest.main()
