"""Ends a request in the right place when one step emits several tokens, and counts up to there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def stop_at_first(req: Req, emitted: int) -> bool:
    """End a request at the first new token that completes a stop, as plain decoding does.

    Upstream (0.5.23) tries one stop after the other on all tokens of a step: strings, then regular
    expressions, each in the request's order, and stop tokens last. If a step contains two stops, such as an
    end of turn and a newline after it, the later one can win, and the text between them becomes part of the
    answer.

    If this function finds no stop, upstream still checks all new tokens at once. It then decodes more text
    together than plain decoding does, so it can find a stop string that was spelled in more tokens than its
    own encoding has. Plain decoding misses such a stop.

    Args:
        req: an unfinished request after the step. Its output_ids end with the new tokens.
        emitted: the number of new tokens.

    Returns:
        Whether the request ended here. Always False for requests without stop strings and stop expressions,
        because upstream searches stop tokens in output order, and False when another algorithm serves.
    """
    options = req.sampling_params
    if emitted < 2 or not (options.stop_strs or options.stop_regex_strs):
        return False
    if get_spec().speculative_algorithm != "DDTREE":
        return False
    output = req.output_ids
    tokens = output[-emitted:]
    del output[-emitted:]
    before = len(output)
    for token in tokens:
        output.append(token)
        if req._check_str_based_finish() or req._check_token_based_finish([token]) or req.finished():
            break
    if req.finished():
        req.finished_len = len(output)
        req._cap_finished_len_at_max_new_tokens()
    output.extend(tokens[len(output) - before :])  # the KV of the rest is committed too
    return req.finished()


def count_to_the_end(req: Req) -> None:
    """Take back the reasoning tokens that were counted past a request's end.

    Upstream (0.5.23) counts all tokens of a step, and then finds out that the request ended at one of them.
    Reasoning comes first in an answer, so at most as many tokens as the answer has are reasoning.

    Args:
        req: the request, before its output is sent. Nothing happens if it goes on, or if another algorithm serves.
    """
    if not req.finished() or get_spec().speculative_algorithm != "DDTREE":
        return
    end = len(req.output_ids_through_stop)
    # A model may open its reasoning itself. Without the whole opening tag, nothing is reasoning.
    is_opened = end >= req._think_start_match_len
    req.reasoning_tokens = min(req.reasoning_tokens, end) if is_opened else 0
