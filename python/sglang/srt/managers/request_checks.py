"""Refuses the requests that would end the server.

Upstream's scheduler trusts what its tokenizer managers send. If one request raises an exception there, the whole server
ends. These rules apply to the requests of every endpoint before they are sent. Upstream turns a ValueError into status 400.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from sglang.srt.runtime_context import get_observability

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import (
        EmbeddingReqInput,
        GenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams

MAX_SAMPLES = 1024
# The time to compile a grammar grows with the square of its depth and of its length. At these limits it is seconds.
MAX_NESTING = 256
MAX_GRAMMAR_LENGTH = 1 << 18
# The scheduler puts numbers into tensors of these types.
INTEGERS = range(-(2**31), 2**31)
LONG_INTEGERS = range(-(2**63), 2**63)
LONG_FIELDS = frozenset({"sampling_seed", "bootstrap_room"})
LARGEST_FLOAT = float(np.finfo(np.float32).max)
# Logits stay finite with these, whatever the temperature. An infinite one makes the probabilities of its row NaN.
LARGEST_BIAS = 1e30
SMALLEST_REPETITION_PENALTY = 1e-20
# Not checked against a declared type: tensors, fields with a check of their own, and what only a plug-in reads.
UNTYPED = (
    "input_ids",
    "input_embeds",
    "mm_inputs",
    "positional_embed_overrides",
    "time_stats",
    "logit_bias",
    "custom_params",
)
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_request(request: GenerateReqInput | EmbeddingReqInput) -> None:
    """Refuse a request that would end the tokenizer manager itself.

    Such a request asks for more than MAX_SAMPLES samples, which go into a list, or has labels that the metrics lack.

    Args:
        request: the request as the client sent it.
    Raises:
        ValueError: the request breaks a rule. The text names the field, what was expected and what was given.
    """
    parameters = request.sampling_params
    for one in parameters if isinstance(parameters, list) else [parameters]:
        samples = one.get("n") if isinstance(one, dict) else None
        if samples is not None and (type(samples) is not int or not 1 <= samples <= MAX_SAMPLES):
            raise ValueError(f"n: expected an integer from 1 to {MAX_SAMPLES}, got {_shown(samples)}")
    if labels := getattr(request, "custom_labels", None):
        allowed = set(get_observability().tokenizer_metrics_allowed_custom_labels or ())
        if unknown := labels.keys() - allowed:
            raise ValueError(
                f"custom_labels: expected names of --tokenizer-metrics-allowed-custom-labels ({_shown(sorted(allowed))}), "
                f"got {_shown(sorted(unknown))}"
            )


def check_tokenized(
    request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, model_config: ModelConfig
) -> None:
    """Refuse a request that the scheduler could not compute.

    Args:
        request: the request as it will be sent, without its time statistics.
        model_config: the configuration of the served model. Its vocabulary and its hidden size bound the prompt.
    Raises:
        ValueError: the request breaks a rule. The text names the field, what was expected and what was given.
    """
    vocab_size = model_config.vocab_size
    parameters = request.sampling_params
    _check_prompt(request, model_config)
    _check_types(request)
    for fields in (request, parameters):
        for name in fields.__struct_fields__:
            if name not in UNTYPED:
                _check_numbers(name, getattr(fields, name))
    for name in GRAMMARS:
        _check_grammar(name, getattr(parameters, name))
    for token, bias in (parameters.logit_bias or {}).items():
        _check_range(f"logit_bias of token {token}", bias, -LARGEST_BIAS, LARGEST_BIAS)
    _check_range("repetition_penalty", parameters.repetition_penalty, SMALLEST_REPETITION_PENALTY, 2)
    _check_stop_tokens(parameters, vocab_size)
    _check_range("top_logprobs_num", getattr(request, "top_logprobs_num", 0), 0, vocab_size)
    _check_range("logprob_start_len", getattr(request, "logprob_start_len", -1), -1, INTEGERS[-1])


def _check_prompt(
    request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, model_config: ModelConfig
) -> None:
    """A prompt has at least one token, and each is in the vocabulary. Embeddings are as wide as the model."""
    embeddings = getattr(request, "input_embeds", None)
    if embeddings is not None:
        widths = {len(row) for row in embeddings}
        if widths != {model_config.hidden_size}:
            raise ValueError(
                f"input_embeds: expected at least one row, each of {model_config.hidden_size} numbers, got rows of {sorted(widths)}"
            )
        return
    if request.mm_inputs is not None:
        return  # a multimodal processor puts ids of its own in place of images
    ids = np.array(() if request.input_ids is None else request.input_ids, dtype=np.int64)
    # A session can continue from what it holds. The scheduler refuses the request if that is nothing.
    if ids.size == 0 and getattr(request, "session_params", None) is None:
        raise ValueError("prompt: expected at least one token, got none")
    wrong = ids[(ids < 0) | (ids >= model_config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"prompt: expected token ids from 0 to {model_config.vocab_size - 1}, got {wrong[0]}"
        )


def _check_types(request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> None:
    """Each field has its declared type, which msgspec checks when it decodes."""
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    overrides = request.positional_embed_overrides
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(
            f"positional_embed_overrides: expected PositionalEmbeds, which JSON cannot hold, got {_shown(overrides)}"
        )

    def without_untyped(fields: Any) -> Any:
        return msgspec.structs.replace(fields, **{name: None for name in UNTYPED if hasattr(fields, name)})

    typed = msgspec.structs.replace(
        without_untyped(request), sampling_params=without_untyped(request.sampling_params)
    )
    try:
        encoded = msgpack_encode(typed)
    except TypeError:
        return  # an object that a program passed to its own engine; JSON cannot hold it
    except (msgspec.MsgspecError, OverflowError, UnicodeError, RecursionError) as error:
        raise ValueError(f"request: expected values that can be sent to the scheduler: {error}") from error
    try:
        msgpack_decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"request: expected fields of their declared types: {error}") from error


def _check_numbers(name: str, value: Any) -> None:
    """Integers fit into 32 bits, or into 64 for a field that has as many. Floats are finite."""
    if isinstance(value, float):
        _check_range(name, value, -LARGEST_FLOAT, LARGEST_FLOAT)
    elif isinstance(value, int):
        numbers = LONG_INTEGERS if name in LONG_FIELDS else INTEGERS
        _check_range(name, value, numbers[0], numbers[-1])
    elif isinstance(value, (list, set, tuple)):
        for inner in value:
            _check_numbers(name, inner)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    # The comparison is in this order so that NaN fails it.
    if not (isinstance(value, (int, float, np.number)) and low <= value <= high):
        raise ValueError(f"{name}: expected a number from {low} to {high}, got {_shown(value)}")


def _check_stop_tokens(parameters: SamplingParams, vocab_size: int) -> None:
    """Stop tokens are in the vocabulary. min_new_tokens, which forbids them, leaves at least half of it."""
    stops = parameters.stop_token_ids or ()
    for token in stops:
        _check_range("stop_token_ids", token, 0, vocab_size - 1)
    if parameters.min_new_tokens and len(stops) > vocab_size // 2:
        raise ValueError(
            f"stop_token_ids: expected at most {vocab_size // 2} tokens with min_new_tokens, got {len(stops)}"
        )


def _check_grammar(name: str, text: str | None) -> None:
    """A grammar is no longer than MAX_GRAMMAR_LENGTH, and its brackets nest at most MAX_NESTING deep."""
    text = text or ""
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{name}: expected at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{}\])]", re.sub(r"\\.", "", text)):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"{name}: expected at most {MAX_NESTING} brackets open at a time, got {deepest}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
