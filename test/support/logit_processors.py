"""Custom logit processors, and requests that use them in one batch."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)

from support.engine import Engine
from support.prompts import PROMPTS, TOKENS


class Ban(CustomLogitProcessor):
    """Forbids the tokens that each request names."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["banned"]] = -float("inf")
        return logits


class ThinkBriefly(ThinkingBudgetLogitProcessor):
    """Ends the thinking, which token 3 begins, by tokens 10 and 4."""

    THINKING_START_TOKEN_ID = 3
    THINKING_END_TOKEN_ID = 4
    NEW_LINE_TOKEN_ID = 10


class Alternate(CustomLogitProcessor):
    """Returns new logits that favor even tokens after an even number of output tokens, and odd ones otherwise."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits = logits.clone()
        for row, params in zip(logits, custom_param_list, strict=True):
            request = params["__req__"]
            row[(request.seqlen - len(request.origin_input_ids)) % 2 :: 2] += params["bonus"]
        return logits


class CountsInItsRequest(CustomLogitProcessor):
    """Writes to the request from its third token on."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for params in custom_param_list:
            if len(params["__req__"].output_ids) > 2:
                params["__req__"].calls = 1
        return logits


NO_BIGRAM_TWICE = dict(
    custom_logit_processor=DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
    custom_params={"ngram_size": 2, "window_size": 1000},
)
# One set of options per prompt, all in one batch. The first asks for nothing. The prompts are thinking: they have token 3
# and not token 4 after it.
PROCESSORS: tuple[dict[str, Any], ...] = (
    {},
    dict(custom_logit_processor=Ban.to_str(), custom_params={"banned": [5, 6]}),
    dict(custom_logit_processor=ThinkBriefly.to_str(), custom_params={"thinking_budget": 13}),
    NO_BIGRAM_TWICE,
    dict(custom_logit_processor=Alternate.to_str(), custom_params={"bonus": 3.0}),
    dict(custom_logit_processor=Ban.to_str(), custom_params={"banned": [2, 7, 11]}),
)


def answer_with_processors(engine: Engine) -> tuple[list[list[int]], int]:
    """Answer PROMPTS greedily with PROCESSORS; return the tokens of each answer, and accepted draft tokens."""
    requests = [
        engine.submit(prompt, temperature=0, max_new_tokens=TOKENS, ignore_eos=True, **options)
        for prompt, options in zip(PROMPTS, PROCESSORS, strict=True)
    ]
    engine.finish(requests)
    accepted = sum(request.spec_num_correct_drafts for request in requests)
    return [list(request.output_ids)[:TOKENS] for request in requests], accepted


class ForbidAll(CustomLogitProcessor):
    """Forbids every token."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits.fill_(-float("inf"))


class Fails(CustomLogitProcessor):
    """Fails at once."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        raise RuntimeError("it cannot work")


def fail_beside_others(engine: Engine) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Run a request whose processor fails in the prefill, and one whose processor fails later, in one batch with others.

    Two of the others forbid different tokens by SGLang's own processor, which refuses that within one call. Another one
    forbids all tokens and samples.

    Returns:
        The finish reasons of both, and the answers to PROMPTS.
    """
    failing = [
        engine.submit(
            PROMPTS[3],
            temperature=0,
            max_new_tokens=TOKENS,
            custom_params={},
            custom_logit_processor=processor.to_str(),
        )
        for processor in (Fails, CountsInItsRequest)
    ]
    for token in (5, 6):
        engine.submit(
            PROMPTS[1], temperature=0, max_new_tokens=2, custom_params={"token_ids": [token]},
            custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
        )  # fmt: skip
    engine.submit(
        PROMPTS[2], temperature=1.0, top_p=0.9, max_new_tokens=4, custom_params={},
        custom_logit_processor=ForbidAll.to_str(),
    )  # fmt: skip
    others = [
        engine.submit(prompt, temperature=0, max_new_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS
    ]
    engine.finish([*failing, *others])
    return [request.finished_reason.to_json() for request in failing], [
        list(request.output_ids)[:TOKENS] for request in others
    ]
