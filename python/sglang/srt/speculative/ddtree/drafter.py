"""Which drafters DDTREE refuses, before any weights are read.

refuse_path() looks for the drafter's files, and drafter_faults() compares its configuration with the target's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.speculative.ddtree.checkpoint import DRAFTER_FLAG, is_same_file, refuse_missing

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

ACTIVATIONS = ("silu", "swigluoai")  # of upstream's DFlash layers
ATTENTION_MODES = ("gqa", "mha")  # of them; SpecForge also trains "mla"
LAYER_TYPES = ("full_attention", "sliding_attention")
VOCABULARY_MULTIPLE = 1024  # models pad their vocabulary to a multiple of this or of a divisor
NEEDED = "a folder with a DFlash drafter, or the name of such a repository on the hub"


def refuse_path(args: ServerArgs) -> None:
    """Refuse a drafter whose files do not exist. This asks the hub at most once, without retries.

    Args:
        args: the server's arguments as the user gave them, with a drafter.

    Raises:
        ArgumentRefused: names the drafter and what is missing.
    """
    from sglang.srt.utils.common import is_remote_url

    path = args.speculative_draft_model_path
    if is_remote_url(path):
        return
    if path == args.model_path or is_same_file(path, args.model_path):
        raise ArgumentRefused(f"DDTREE: {DRAFTER_FLAG}: expected {NEEDED}, got the target itself: {path}.")
    load_format = args.speculative_draft_load_format or args.load_format
    refuse_missing(
        path,
        flag=DRAFTER_FLAG,
        needed=NEEDED,
        revision=args.speculative_draft_model_revision,
        with_weights=load_format in ("auto", "safetensors"),
    )


def refuse_drafter(args: ServerArgs) -> None:
    """Refuse a drafter whose configuration does not fit the target's.

    Args:
        args: the server's arguments, after refuse_path().

    Raises:
        ArgumentRefused: has a line for each fault. It names the drafter, the key of its config.json, what was expected and
            what was given.
    """
    faults = drafter_faults(drafter_config(args), model_config_of(args).hf_text_config)
    path = args.speculative_draft_model_path
    if lines := [f"DDTREE: {DRAFTER_FLAG}: {path}: config.json: {fault}" for fault in faults]:
        raise ArgumentRefused("\n".join(lines))


def drafter_config(args: ServerArgs) -> PretrainedConfig:
    """Read the drafter's configuration.

    Args:
        args: the server's arguments.

    Returns:
        The configuration, with --json-model-override-args applied, as upstream does.

    Raises:
        ArgumentRefused: it cannot be read.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = args.speculative_draft_model_path
    try:
        return get_config(
            path,
            trust_remote_code=args.trust_remote_code,
            revision=args.speculative_draft_model_revision,
            model_override_args=json.loads(args.json_model_override_args),
        )
    except Exception as error:  # a file that is not JSON, a model_type that nobody knows
        raise ArgumentRefused(
            f"DDTREE: {DRAFTER_FLAG}: {path}: config.json: expected the configuration of a DFlash drafter, got one "
            f"that cannot be read: {error}"
        ) from error


def drafter_faults(drafter: PretrainedConfig, target: PretrainedConfig) -> Iterator[str]:
    """Compare a drafter's configuration with its target's.

    Args:
        drafter: configuration of the drafter.
        target: text configuration of the target.

    Yields:
        For each key that does not fit: its name, what was expected and what was given.
    """
    from sglang.srt.speculative.ddtree.heads import DRAFT_MODELS, head_faults
    from sglang.srt.speculative.ddtree.speculators import speculators_faults
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    architectures = list(getattr(drafter, "architectures", None) or [])
    if not set(architectures).intersection(DRAFT_MODELS):
        yield f"architectures: expected one of {list(DRAFT_MODELS)}, got {architectures}. {_advice(architectures)}"
        return  # the other keys mean something else there
    if faults := list(speculators_faults(drafter)):
        yield from faults
        return  # what they would become is wrong, too
    try:
        parsed = parse_dflash_draft_config(draft_hf_config=drafter)
    except (ValueError, TypeError) as error:
        yield f"expected the keys of a DFlash drafter, got one with a wrong value: {error}"
        return
    yield from head_faults(drafter, target.vocab_size)
    num_layers = target.num_hidden_layers * getattr(target, "num_loops", 1)  # upstream numbers loops through
    yield from _layer_faults(parsed.target_layer_ids, num_layers)
    if drafter.hidden_size != target.hidden_size:
        yield (
            f"hidden_size: expected {target.hidden_size}, the target's, got {drafter.hidden_size}. The drafter "
            "was trained for another model."
        )
    yield from _layer_type_faults(drafter)
    yield from _vocabulary_faults(drafter, target.vocab_size)
    mask = parsed.mask_token_id
    if mask is not None and mask >= target.vocab_size:
        yield (
            f"dflash_config.mask_token_id: expected a token below {target.vocab_size}, the target's vocab_size, "
            f"got {mask}."
        )


def _layer_faults(ids: list[int] | None, num_layers: int) -> Iterator[str]:
    """Yield what is wrong with the ids of the target layers that the drafter reads.

    Args:
        ids: from the drafter's configuration. Upstream would guess missing ones.
        num_layers: the number of layers of the target.
    """
    if ids is None:
        yield "dflash_config.target_layer_ids: expected the target layers that the drafter reads, got none."
    elif len(set(ids)) < len(ids) or not all(0 <= layer < num_layers for layer in ids):
        yield (
            f"dflash_config.target_layer_ids: expected distinct layers of the target, 0 to {num_layers - 1}, "
            f"got {ids}."
        )


def _layer_type_faults(drafter: PretrainedConfig) -> Iterator[str]:
    """Yield the options of a drafter's layers that upstream's DFlash layers do not implement."""
    from sglang.srt.speculative.dflash_utils import (
        get_dflash_attention_sliding_window_size,
        get_dflash_layer_types,
        is_nemotron_35_draft_config,
    )

    dflash_config = getattr(drafter, "dflash_config", None) or {}
    mode = dflash_config.get("attention_mode")
    if mode not in (None, *ATTENTION_MODES):
        yield f"dflash_config.attention_mode: expected one of {list(ATTENTION_MODES)}, got {mode!r}."
    elif (rank := getattr(drafter, "kv_lora_rank", None)) is not None:
        yield f"kv_lora_rank: expected none, got {rank}: SGLang's DFlash layers have no MLA."
    activation = getattr(drafter, "hidden_act", ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        yield f"hidden_act: expected one of {list(ACTIVATIONS)}, got {activation!r}."
    try:
        types = get_dflash_layer_types(drafter) or ()
        get_dflash_attention_sliding_window_size(drafter)
    except ValueError as error:
        yield f"layer_types: expected a list, and sliding_window with 'sliding_attention' in it: {error}"
        return
    if types and len(types) < drafter.num_hidden_layers:
        yield f"layer_types: expected one for each of {drafter.num_hidden_layers} layers, got {len(types)}."
    if others := sorted(set(types).difference(LAYER_TYPES)):
        yield f"layer_types: expected only {' and '.join(LAYER_TYPES)}, got {' and '.join(others)}."
    if is_nemotron_35_draft_config(drafter) and getattr(drafter, "attention_sink_bias", False):
        yield (
            "attention_sink_bias: expected none in the layout of Nemotron 3.5, got one: SGLang runs them on "
            "trtllm_mha only, and DDTREE drafts on Triton. --speculative-algorithm DFLASH runs it."
        )


def _vocabulary_faults(drafter: PretrainedConfig, vocab_size: int) -> Iterator[str]:
    """Yield what does not fit in the drafter's vocabulary, embedding and LM head.

    Like DFLASH, DDTREE drafts with the target's embedding and head, even if the drafter's files contain copies of them.
    So the drafter's vocabulary is only a number, which may be padded differently. There are two exceptions: an embedding
    in the layout of Nemotron 3.5, and a head over some of the target's tokens in the layout of the Speculators library.

    Args:
        drafter: its configuration.
        vocab_size: the vocabulary of the target, with padding.
    """
    from sglang.srt.speculative.ddtree.speculators import MODELS
    from sglang.srt.speculative.dflash_utils import is_nemotron_35_draft_config

    own = getattr(drafter, "vocab_size", None)
    most = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if own is not None and own > most:
        yield (
            f"vocab_size: expected at most {most}, the target's {vocab_size} plus padding, got {own}. The drafter "
            "was trained for another vocabulary."
        )
    reduced = getattr(drafter, "draft_vocab_size", None)
    if reduced not in (None, own) and MODELS["dflash"] not in drafter.architectures:
        yield f"draft_vocab_size: expected none or vocab_size, which is {own}, got {reduced}: SGLang needs all tokens."
    if is_nemotron_35_draft_config(drafter) and (own is None or own < vocab_size):
        yield f"vocab_size: expected at least {vocab_size}, the target's, for the drafter's own embedding, got {own}."


def _advice(architectures: list[str]) -> str:
    """Return what to do with a drafter of another kind."""
    names = " ".join(architectures).lower()
    if "eagle" in names:
        return "--speculative-algorithm EAGLE or EAGLE3 runs EAGLE heads."
    if "dspark" in names:
        return "--speculative-algorithm DSPARK runs DSpark heads."
    return "It is not a DFlash drafter."
