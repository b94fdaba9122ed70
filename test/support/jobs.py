"""Jobs that the CPU's and the GPU's tests run on an engine."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from support.engine import Engine, Greedy
from support.load import retractions
from support.models import SYMBOLS, text_of
from support.prompts import LONG_PROMPTS, PROMPTS, TOKENS


def greedy(engine: Engine) -> Greedy:
    """Greedy answers to PROMPTS."""
    return engine.greedy(PROMPTS, TOKENS)


def sample(engine: Engine, prompt: list[int], count: int, options: dict[str, Any]) -> list[list[int]]:
    """The first three tokens of `count` answers to one prompt, under the sampling parameters `options`."""
    requests = engine.generate([prompt] * count, max_new_tokens=3, ignore_eos=True, **options)
    return [list(request.output_ids)[:3] for request in requests]


def answer_twice(engine: Engine) -> tuple[list[int], list[int], int]:
    """Ask for a prompt, then for the prompt with most of its answer, whose KV is in the radix cache.

    Returns:
        Both answers, and how many tokens of the second prompt were in the cache.
    """
    prompt = PROMPTS[4]
    (first,) = engine.generate([prompt], temperature=0, max_new_tokens=40, ignore_eos=True)
    answer = list(first.output_ids)[:40]
    (second,) = engine.generate([prompt + answer[:30]], temperature=0, max_new_tokens=20, ignore_eos=True)
    return answer, list(second.output_ids)[:20], second.cached_tokens


def fill_context(engine: Engine, prompts: list[list[int]] = LONG_PROMPTS) -> tuple[list[list[int]], int]:
    """Greedy answers that only the end of the context stops, and by how much the free slots have changed."""
    free = engine.free_slots()
    requests = engine.generate(prompts, temperature=0, max_new_tokens=4096, ignore_eos=True)
    return [list(request.output_ids_through_stop) for request in requests], engine.free_slots() - free


def exhaust_grammar(engine: Engine) -> list[tuple[str, str]]:
    """Run two requests whose grammar allows no fourth token, in one batch with a request without grammar.

    Returns:
        Text and type of the finish reason of the greedy, the sampled and the free request.
    """
    regex = "ab(0|1)x"  # no token has the text "x"
    requests = [
        engine.submit(PROMPTS[1], temperature=0, max_new_tokens=20, regex=regex),
        engine.submit(PROMPTS[1], temperature=1.0, max_new_tokens=20, regex=regex),
        engine.submit(PROMPTS[2], temperature=1.5, top_p=0.9, max_new_tokens=20, ignore_eos=True),
    ]
    engine.finish(requests)
    return [
        (text_of(request.output_ids_through_stop), request.finished_reason.to_json()["type"])
        for request in requests
    ]


def stop_options(output: list[int]) -> list[dict[str, Any]]:
    """Sampling parameters that end a greedy answer at or soon after each of its tokens.

    Each holds one kind of stop (length, string, expression, token) or several that compete.
    """
    symbols = [SYMBOLS[token] for token in output]
    found: list[dict[str, Any]] = [dict(max_new_tokens=length) for length in range(1, 12)]
    for i in range(len(output) - 4):
        token, first, later = output[i], "".join(symbols[i : i + 2]), "".join(symbols[i + 2 : i + 4])
        found += [
            dict(stop=first + later),
            dict(stop=[later, first], no_stop_trim=True),
            dict(stop=[first + later], max_new_tokens=i + 3),
            dict(stop=first, min_new_tokens=i + 5),
            dict(stop_regex=[re.escape(later), re.escape(first) + "$"]),
            dict(stop_regex=re.escape(first) + ".", stop=later),
            dict(stop=symbols[i + 1] + later, stop_token_ids=[token]),
            dict(stop=symbols[i] + symbols[i + 1], stop_token_ids=[token], ignore_eos=True),
            dict(stop_token_ids=[token, output[i + 1]], max_new_tokens=i + 1),
            dict(stop_token_ids=[token], min_new_tokens=i + 3),
        ]
    return found


def stop_everywhere(engine: Engine) -> tuple[list[tuple[dict[str, Any], list[int], dict[str, Any]]], int]:
    """Answer one prompt greedily under each of the stop_options() of its free answer.

    Returns:
        For each of the options: the options, the tokens through the stop, and the finish reason. Then the
        number of answers that stopped before the last token of their last step.
    """
    common = dict(temperature=0, max_new_tokens=24)
    (free,) = engine.generate([PROMPTS[1]], ignore_eos=True, **common)
    every = stop_options(list(free.output_ids[:24]))
    requests = engine.finish([engine.submit(PROMPTS[1], **common | options) for options in every])
    outputs = [list(request.output_ids_through_stop) for request in requests]
    reasons = [request.finished_reason.to_json() for request in requests]
    inside = sum(len(request.output_ids) > len(output) for request, output in zip(requests, outputs))
    return list(zip(every, outputs, reasons)), inside


class Turns(NamedTuple):
    """What continue_sessions() found, in all turns of all sessions.

    Attributes:
        prompts: tokens of each turn before its answer, those of earlier turns included.
        found: the answers.
        inside: how many answers ended before their last step did.
    """

    prompts: list[list[int]]
    found: Greedy
    inside: int


def _close(sessions: Any, request: Any) -> bool:
    """Close a session, if it is open. Always returns True."""
    if request.session_id in sessions:
        sessions.close(request)
    return True


def share_pool(engine: Engine) -> tuple[list[list[int]], int, int]:
    """Answer three turns of a streaming session for each of PROMPTS, all sessions at once.

    Returns:
        The answers, the leaked slots, and the number of retractions.
    """
    from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams

    sessions, free = engine.scheduler.session_controller, engine.free_slots()
    retracted, answers = retractions(engine), []
    names = [f"s{i}" for i in range(len(PROMPTS))]
    for name in names:
        sessions.open(OpenSessionReqInput(capacity_of_str_len=4096, session_id=name, streaming=True))
    for turn in range(3):
        requests = engine.finish([
            engine.submit([3 + turn, 9] if turn else prompt, session_params=SessionParams(id=name), temperature=0,
                          max_new_tokens=25, ignore_eos=True)
            for name, prompt in zip(names, PROMPTS, strict=True)
        ])  # fmt: skip
        answers += [list(request.output_ids_through_stop) for request in requests]
    for name in names:
        engine.finish([], partial(_close, sessions, CloseSessionReqInput(session_id=name)))
    return answers, free - engine.free_slots(), len(retracted)


def continue_sessions(engine: Engine, streaming: bool) -> Turns:
    """Answer four turns of a session for each of PROMPTS. A turn appends two tokens to the last one's answer."""
    from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams

    sessions, free = engine.scheduler.session_controller, engine.free_slots()
    requests, prompts, outputs, inside = [], [], [], 0
    for i, prompt in enumerate(PROMPTS):
        sessions.open(OpenSessionReqInput(capacity_of_str_len=4096, session_id=f"s{i}", streaming=streaming))
        last = None
        for turn in range(4):
            request = engine.submit(
                [3 + turn, 9] if turn else prompt,
                session_params=SessionParams(id=f"s{i}", rid=last),
                temperature=0,
                max_new_tokens=20,
                stop_token_ids=[4 + i, 5 + i],
            )
            prompts.append(list(request.origin_input_ids))
            emitted = request.output_ids
            requests += engine.finish([request])
            outputs.append(list(request.output_ids_through_stop))
            inside += len(emitted) > len(outputs[-1])
            last = None if streaming else request.rid
        # In the event loop, whose stream the KV pool's lists belong to.
        engine.finish([], partial(_close, sessions, CloseSessionReqInput(session_id=f"s{i}")))
    found = Greedy(
        outputs,
        sum(request.spec_verify_ct for request in requests),
        sum(request.spec_num_correct_drafts for request in requests),
        (free, engine.free_slots()),
    )
    return Turns(prompts, found, inside)
