"""Drafters in the layout of the Speculators library, which SGLang 0.5.23 does not read.

Their config.json nests the layers' configuration, has no model_type, and numbers the target's hidden states from the
embedding, so that state i is the output of layer i - 1. translated() turns it into a configuration of the layout that
DFlash's authors use. models/dflash_speculators.py reads their weights.

Source: vllm-project/speculators, src/speculators/models/dflash (config.py, core.py, dflash2.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PretrainedConfig

LAYOUT = "speculators_model_type"  # the key of config.json that names the kind of speculator
MODELS = {"dflash": "SpeculatorsDFlashDraftModel", "dflash2": "SpeculatorsDFlash2DraftModel"}
# Keys of a head, or of the block's convolutions.
OF_DFLASH_CONFIG = (
    "block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
)  # fmt: skip
KEPT = (
    LAYOUT,
    "block_size",
    "draft_vocab_size",
    "sample_from_anchor",
    "projector_type",
    "target_hidden_size",
)
WINDOW = "sliding_attention"  # a kind of layer


def is_speculators(config: dict[str, Any]) -> bool:
    """Return whether config.json is that of a DFlash drafter in this layout.

    Args:
        config: contents of config.json.
    """
    return config.get(LAYOUT) in MODELS and isinstance(config.get("transformer_layer_config"), dict)


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a configuration into the layout of DFlash's authors.

    Args:
        config: contents of config.json, of which is_speculators() is true.

    Returns:
        What Qwen3Config takes: the keys of a Qwen3 and those of a DFlash drafter. The keys in KEPT are unchanged, for
        speculators_faults().
    """
    layers, kind = dict(config["transformer_layer_config"]), config[LAYOUT]
    layers.pop("model_type", None)  # whatever the target is, the layers are Qwen3's
    rope = layers.get("rope_parameters") or {}
    if WINDOW in rope:  # one per kind of layer, of which the library uses this one
        layers["rope_parameters"] = rope[WINDOW]
    if WINDOW in (layers.get("layer_types") or ()):
        layers["use_sliding_window"] = True  # without it, Qwen3Config forgets the window
    if dtype := config.get("dtype") or config.get("torch_dtype"):
        layers["dtype"] = dtype
    kept = {key: config[key] for key in KEPT if key in config}
    dflash_config = {key: config[key] for key in OF_DFLASH_CONFIG if key in config}
    states = config.get("aux_hidden_state_layer_ids")
    if states is not None:
        dflash_config["target_layer_ids"] = [state - 1 for state in states]
    # In both layouts full attention sees the whole block. A window is causal in it, unless this key says otherwise.
    if config.get("sliding_window_non_causal", kind == "dflash2"):
        layers["is_causal"] = False
    return layers | kept | dict(architectures=[MODELS[kind]], dflash_config=dflash_config)


def speculators_faults(config: PretrainedConfig) -> Iterator[str]:
    """Find the options of a drafter in this layout that DDTREE does not serve.

    Args:
        config: the drafter's configuration.

    Yields:
        For each key: its name, what was expected and what was given.
    """
    if getattr(config, "sample_from_anchor", None):
        yield (
            "sample_from_anchor: expected false, got true: DDTREE takes the first drafted token from the position after "
            "the bonus token."
        )
    if getattr(config, "projector_type", None) == "domino":
        yield "projector_type: expected dflash in the layout of the Speculators library, got domino."
    width = getattr(config, "target_hidden_size", None)
    if width not in (None, config.hidden_size):
        yield f"target_hidden_size: expected hidden_size, which is {config.hidden_size}, got {width}."


def reading_speculators(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Let upstream's parser of configurations read this layout, too. It still parses every other layout itself.

    Args:
        parse: method of the parser.

    Returns:
        The method that replaces it.
    """

    def parse_any(
        self: Any, model: Any, trust_remote_code: bool, revision: str | None = None, **options: Any
    ) -> Any:
        try:
            raw, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        except Exception:  # upstream reports what is wrong
            raw = {}
        if not is_speculators(raw):
            return parse(self, model, trust_remote_code, revision=revision, **options)
        from transformers import Qwen3Config

        return Qwen3Config(**translated(raw), name_or_path=str(model))

    return parse_any
