"""Which drafters are refused before any weights are read."""

import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models import dflash, dflash_speculators, lilicorr
from sglang.srt.models.dflash_speculators import DraftHead
from sglang.srt.speculative.ddtree import drafter, heads, speculators
from sglang.srt.speculative.ddtree.domino import DominoHead
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import DRAFTER, MODEL, ArgumentsCase
from support.hub import FakeHub
from transformers import PretrainedConfig

register_cpu_ci(est_time=20, suite="unit")

CONFIG = DRAFTER["dflash_config"]
# What makes SGLang load a drafter's own embedding.
NEMOTRON = dict(
    has_embed_tokens=True, quantization_config=dict(quant_method="modelopt", quant_algo="W4A16_NVFP4"),
    dflash_config=CONFIG | dict(sample_from_anchor=False), eagle_aux_hidden_state_layer_ids=[1, 3],
)  # fmt: skip
SELECTOR = dict(selector_rank=4, selector_top_k=2)
DOMINO = dict(projector_type="domino", gru_hidden_dim=8, emb_dim=8, shift_label=True, pure_draft_prefix_len=1)
LILICORR = dict(
    lilicorr_candidate_topk=4, lilicorr_hidden_size=0, lilicorr_num_layers=1, lilicorr_num_heads=2,
    lilicorr_mlp_ratio=2.0, lilicorr_factor_dim=8, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=4.0,
)  # fmt: skip


class DrafterCase(ArgumentsCase):
    def refused(self, text, **arguments):
        path = arguments.get("speculative_draft_model_path", str(self.drafter))
        with self.assertRaises(ValueError) as caught:
            self.resolve(**arguments)
        message = str(caught.exception)
        self.assertRegex(message, "^DDTREE: --speculative-draft-model-path: ")
        self.assertIn(path, message)
        self.assertIn(text, message)


class TestPath(DrafterCase):
    def test_nothing_there(self):
        for path in (str(self.drafter / "nothing"), "./nothing", "nothing"):
            self.refused("which does not exist", speculative_draft_model_path=path)
        self.refused("got '', which does not exist", speculative_draft_model_path="")

    def test_an_empty_folder(self):
        for path in self.drafter.iterdir():
            path.unlink()
        self.refused("which is empty")

    def test_no_configuration(self):
        (self.drafter / "config.json").unlink()
        self.refused("which has no config.json")

    def test_no_weights(self):
        (self.drafter / "model.safetensors").unlink()
        self.refused("which has no weights")
        self.resolve(speculative_draft_load_format="dummy")

    def test_the_target(self):
        self.refused("got the target itself", speculative_draft_model_path=str(self.model))
        link = self.drafter / "link"
        link.symlink_to(self.model)
        self.refused("got the target itself", speculative_draft_model_path=str(link))

    def test_a_file(self):
        for name, kind in (("model.gguf", "a GGUF file"), ("model.safetensors", "a file")):
            path = self.drafter / name
            path.touch()
            self.refused(f"got {kind}", speculative_draft_model_path=str(path))
        self.refused("got a GGUF file", speculative_draft_model_path="owner/name/model.gguf")

    def test_before_the_target_is_read(self):
        missing = str(self.model / "nothing")
        self.refused("which does not exist", speculative_draft_model_path="./nothing", model_path=missing)


class TestHub(DrafterCase):
    def setUp(self):
        super().setUp()
        self.hub = FakeHub(self)

    def test_repositories_that_cannot_be_read(self):
        for name, text in (
            ("gated", "which is gated: accept its terms on the hub, and set HF_TOKEN"),
            ("missing", "which is neither a folder nor on the hub. If it is private, set HF_TOKEN"),
            ("empty", "which has no config.json"),
            ("broken", "the hub cannot be asked"),
        ):
            with self.subTest(name):
                self.refused(text, speculative_draft_model_path=f"owner/{name}")
                self.assertEqual([f"/owner/{name}/resolve/main/config.json"], self.hub.asked)
                self.hub.asked.clear()

    def test_a_revision_that_is_not_there(self):
        self.refused(
            "no revision 'v9' (--speculative-draft-model-revision)",
            speculative_draft_model_path="owner/revision", speculative_draft_model_revision="v9",
        )  # fmt: skip

    def test_a_hub_that_does_not_answer(self):
        self.hub.url = "http://127.0.0.1:9"
        self.refused("the hub cannot be asked (ConnectError", speculative_draft_model_path="owner/name")

    def test_a_cached_repository_needs_no_hub(self):
        self.hub.cache.return_value = str(self.drafter / "config.json")
        drafter.refuse_path(mock.Mock(speculative_draft_model_path="owner/name", model_path="x"))
        self.assertEqual(self.hub.asked, [])


class TestConfiguration(DrafterCase):
    def write(self, **changes):
        """Write a drafter to a folder of its own, because upstream caches configurations by path."""
        self.drafter = Path(tempfile.mkdtemp(dir=self.model.parent))
        (self.drafter / "config.json").write_text(json.dumps(DRAFTER | changes))
        (self.drafter / "model.safetensors").touch()

    def test_fits(self):
        self.resolve()
        for changes in (
            dict(vocab_size=1024),
            dict(vocab_size=16, draft_vocab_size=16, has_lm_head=True, has_embed_tokens=True),
            dict(layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=8,
                 use_sliding_window=True),
            NEMOTRON,
        ):  # fmt: skip
            with self.subTest(changes):
                self.write(**changes)
                self.resolve()

    def test_another_kind(self):
        for architectures, advice in (
            (["LlamaForCausalLM"], "It is not a DFlash drafter."),
            (["Qwen3DSparkModel"], "--speculative-algorithm DSPARK runs DSpark heads."),
            (["LlamaForCausalLMEagle3"], "--speculative-algorithm EAGLE or EAGLE3 runs EAGLE heads."),
            (None, "It is not a DFlash drafter."),
        ):
            with self.subTest(architectures):
                self.write(architectures=architectures)
                self.refused(f"got {architectures or []}. {advice}")

    def test_models_by_head_are_upstreams(self):
        selectors = {
            model.__name__ for model in dflash.EntryClass if issubclass(model, dflash.DFlash2DraftModel)
        }
        plain = {model.__name__ for model in dflash.EntryClass} - selectors
        self.assertEqual(set(heads.PLAIN_MODELS), plain | {speculators.MODELS["dflash"]})
        self.assertEqual(set(heads.SELECTOR_MODELS), selectors | {speculators.MODELS["dflash2"]})
        self.assertEqual(set(heads.LILICORR_MODELS), {model.__name__ for model in lilicorr.EntryClass})

    def test_not_json(self):
        (self.drafter / "config.json").write_text("{")
        self.refused(
            "config.json: expected the configuration of a DFlash drafter, got one that cannot be read"
        )

    def test_keys(self):
        for changes, text in (
            (dict(dflash_config=CONFIG | dict(target_layer_ids=None)),
             "dflash_config.target_layer_ids: expected the target layers that the drafter reads, got none"),
            (dict(dflash_config=CONFIG | dict(target_layer_ids=[0, 0])),
             "dflash_config.target_layer_ids: expected distinct layers of the target, 0 to 2, got [0, 0]"),
            (dict(dflash_config=CONFIG | dict(target_layer_ids=[0, 3])), "0 to 2, got [0, 3]"),
            (dict(dflash_config=CONFIG | dict(target_layer_ids=[-1, 1])), "0 to 2, got [-1, 1]"),
            (dict(dflash_config=CONFIG | dict(target_layer_ids="all")), "target_layer_ids must be a list"),
            (dict(hidden_size=256), "hidden_size: expected 128, the target's, got 256"),
            (dict(vocab_size=1025), "vocab_size: expected at most 1024, the target's 16 plus padding, got 1025"),
            (dict(draft_vocab_size=8), "draft_vocab_size: expected none or vocab_size, which is 16, got 8"),
            (dict(hidden_act="gelu"), "hidden_act: expected one of ['silu', 'swigluoai'], got 'gelu'"),
            (dict(dflash_config=CONFIG | dict(attention_mode="mla")),
             "dflash_config.attention_mode: expected one of ['gqa', 'mha'], got 'mla'"),
            (dict(kv_lora_rank=512), "kv_lora_rank: expected none, got 512"),
            (dict(layer_types=["linear_attention"] * 3),
             "layer_types: expected only full_attention and sliding_attention, got linear_attention"),
            (dict(layer_types=["sliding_attention"] * 3), "DFLASH sliding_attention layers require config.sliding_window"),
            (NEMOTRON | dict(attention_sink_bias=True), "attention_sink_bias: expected none in the layout of Nemotron"),
            (NEMOTRON | dict(vocab_size=15), "vocab_size: expected at least 16, the target's, for the drafter's own"),
            (dict(dflash_config=CONFIG | dict(mask_token_id=16)),
             "dflash_config.mask_token_id: expected a token below 16, the target's vocab_size, got 16"),
            (dict(dflash_config=CONFIG | SELECTOR),
             "because dflash_config has selector_rank, got ['DFlashDraftModel']: SGLang would drop the head's weights"),
            (dict(architectures=["DFlash2DraftModel"]),
             "dflash_config: expected selector_rank with ['DFlash2DraftModel'], got none"),
            (dict(dflash_config=CONFIG | LILICORR), "because dflash_config has the lilicorr_ keys, got ['DFlashDraftModel']"),
            (dict(architectures=["LiLiCorrDraftModel"]),
             "dflash_config: expected the lilicorr_ keys with ['LiLiCorrDraftModel'], got none"),
            (dict(architectures=["LiLiCorrDraftModel"], dflash_config=CONFIG | dict(lilicorr_candidate_topk=4)),
             "dflash_config.lilicorr_hidden_size is required"),
            (dict(architectures=["DFlash2DraftModel"], dflash_config=CONFIG | SELECTOR | DOMINO),
             "dflash_config.projector_type: expected one head, got domino in addition to that of ['DFlash2DraftModel']"),
            (dict(dflash_config=CONFIG | DOMINO, vocab_size=8),
             "vocab_size: expected 16, the target's, for the head's tables of tokens, got 8"),
            (dict(dflash_config=CONFIG | DOMINO | dict(emb_dim=None)), "requires dflash_config.emb_dim"),
        ):  # fmt: skip
            with self.subTest(text):
                self.write(**changes)
                self.refused(text)

    def test_heads(self):
        for changes, head in (
            ({}, heads.MarginalHead),
            (dict(architectures=["DFlash2DraftModel"], dflash_config=CONFIG | SELECTOR), heads.SelectorHead),
            (dict(architectures=["LiLiCorrDraftModel"], dflash_config=CONFIG | LILICORR), heads.LiLiCorrHead),
            (dict(dflash_config=CONFIG | DOMINO), DominoHead),
        ):
            with self.subTest(head):
                self.write(**changes)
                config = drafter.drafter_config(self.resolve())
                self.assertIs(heads.head_class(config), head)

    def test_every_fault_is_found(self):
        faults = drafter.drafter_faults(
            PretrainedConfig(**DRAFTER | dict(hidden_size=256, vocab_size=2000)), PretrainedConfig(**MODEL)
        )
        self.assertEqual([fault.split(":")[0] for fault in faults], ["hidden_size", "vocab_size"])
        types = PretrainedConfig(**DRAFTER)
        types.layer_types = ["full_attention"]  # the constructor validates it
        found = list(drafter.drafter_faults(types, PretrainedConfig(**MODEL)))
        self.assertEqual(found, ["layer_types: expected one for each of 3 layers, got 1."])
        self.write(hidden_size=256, vocab_size=2000)
        with self.assertRaisesRegex(ValueError, "(?s)^DDTREE: .* hidden_size: .*\nDDTREE: .* vocab_size: "):
            self.resolve()


class TestSpeculators(DrafterCase):
    """The layout of the Speculators library."""

    LAYERS = {
        key: DRAFTER[key] for key in DRAFTER if key not in ("architectures", "block_size", "dflash_config")
    }
    CONFIG = dict(
        architectures=["DFlashDraftModel"], speculators_model_type="dflash", block_size=8, draft_vocab_size=16,
        aux_hidden_state_layer_ids=[1, 3], mask_token_id=1, transformer_layer_config=LAYERS | dict(model_type="llama"),
    )  # fmt: skip
    SELECTOR = dict(speculators_model_type="dflash2", conv_kernel_size=2, conv_group_size=16, **SELECTOR)

    def write(self, **changes):
        self.drafter = Path(tempfile.mkdtemp(dir=self.model.parent))
        (self.drafter / "config.json").write_text(json.dumps(self.CONFIG | changes))
        (self.drafter / "model.safetensors").touch()

    def layers(self, **changes):
        return dict(transformer_layer_config=self.LAYERS | changes)

    def test_it_means_what_the_other_layout_says(self):
        self.write()
        config = drafter.drafter_config(self.resolve())
        self.assertEqual(heads.trained_block_size(config), 8)
        self.assertEqual(config.dflash_config["target_layer_ids"], [0, 2])  # state 0 is the embedding
        self.assertEqual((config.hidden_size, config.head_dim, config.num_hidden_layers), (128, 64, 3))
        self.assertIs(heads.head_class(config), heads.MarginalHead)

    def test_a_selector(self):
        self.write(**self.SELECTOR)
        config = drafter.drafter_config(self.resolve())
        self.assertIs(heads.head_class(config), heads.SelectorHead)
        self.assertEqual(config.dflash_config["conv_group_size"], 16)

    def test_windows_are_causal_unless_the_drafter_says_otherwise(self):
        windows = self.layers(layer_types=["sliding_attention"] * 3, sliding_window=8)
        for changes, kind in (
            (windows, AttentionType.DECODER),
            (windows | dict(sliding_window_non_causal=True), AttentionType.ENCODER_ONLY),
            (windows | self.SELECTOR, AttentionType.ENCODER_ONLY),
            (windows | self.SELECTOR | dict(sliding_window_non_causal=False), AttentionType.DECODER),
            ({}, AttentionType.ENCODER_ONLY),
        ):
            with self.subTest(changes):
                self.write(**changes)
                config = drafter.drafter_config(self.resolve())
                window, found = dflash._get_dflash_layer_attention_params(config, 0)
                self.assertEqual((window, found), (7 if "transformer_layer_config" in changes else -1, kind))

    def test_a_rotary_embedding_per_kind_of_layer(self):
        rope = {f"{kind}_attention": dict(rope_type="default", rope_theta=theta) for kind, theta in
                (("full", 1e6), ("sliding", 1e4))}  # fmt: skip
        self.write(**self.layers(rope_parameters=rope))
        self.assertEqual(drafter.drafter_config(self.resolve()).rope_parameters["rope_theta"], 1e4)

    def test_a_reduced_vocabulary(self):
        self.write(draft_vocab_size=8)
        self.resolve()
        self.write(draft_vocab_size=8, **self.SELECTOR)
        self.refused("draft_vocab_size: expected none or vocab_size, which is 16, got 8")

    def test_what_is_not_served(self):
        for changes, text in (
            (dict(sample_from_anchor=True), "sample_from_anchor: expected false, got true"),
            (
                dict(projector_type="domino"),
                "projector_type: expected dflash in the layout of the Speculators library",
            ),
            (dict(target_hidden_size=512), "target_hidden_size: expected hidden_size, which is 128, got 512"),
            (dict(aux_hidden_state_layer_ids=[0, 3]), "0 to 2, got [-1, 2]"),
            (dict(aux_hidden_state_layer_ids=None), "target_layer_ids: expected the target layers"),
            (dict(speculators_model_type="eagle3"), "got one that cannot be read"),
        ):
            with self.subTest(text):
                self.write(**changes)
                self.refused(text)

    def test_dflash_does_not_take_it(self):
        spec = mock.Mock(speculative_algorithm="DFLASH")
        with mock.patch.object(dflash_speculators, "get_spec", return_value=spec):
            with self.assertRaisesRegex(ValueError, "which only --speculative-algorithm DDTREE reads"):
                dflash_speculators.SpeculatorsDFlashDraftModel(PretrainedConfig())


class TestDraftHead(unittest.TestCase):
    def test_its_rows_are_the_tokens_of_the_mask(self):
        head, weight = DraftHead(3, 4), torch.randn(3, 4)
        mask = torch.zeros(9, dtype=torch.bool)
        mask[[2, 5, 8]] = True
        head.load(weight, mask)
        self.assertEqual(head.tokens.tolist(), [2, 5, 8])
        torch.testing.assert_close(head.weight.data, weight)

    def test_weights_that_do_not_fit(self):
        for weight, mask in (
            (None, torch.ones(3)), (torch.randn(3, 4), None), (torch.randn(2, 4), torch.ones(3)),
            (torch.randn(3, 4), torch.ones(2)),
        ):  # fmt: skip
            with self.assertRaisesRegex(
                ValueError, "^DDTREE: the drafter's weights: expected lm_head.weight of shape"
            ):
                DraftHead(3, 4).load(weight, mask)


if __name__ == "__main__":
    unittest.main()
