"""Where a request stops when one step emits several tokens."""

from __future__ import annotations

from sglang.srt.runtime_context import get_spec


def stop_at_first(req, emitted: int) -> bool:
    """Ends a request at the first of its new tokens that completes a stop, as plain decoding does.

    Upstream (0.5.23) searches a step's tokens for each stop in turn: strings, then expressions, each kind in the order that
    the request names them, and stop tokens last. With two stops in one step, such as the end of the turn and a newline
    after it, a later one can win, and what lies between them is answered.

    If none is found here upstream looks at all new tokens at once. That shows it more text than plain decoding's look at
    each token, so it can find a stop that was spelled in more tokens than its own encoding has, which plain decoding misses.

    Args:
        req: after the step, unfinished; its output_ids end with the new tokens.
        emitted: how many tokens are new.

    Returns:
        Whether it ended here. Always False for requests with neither stop strings nor expressions, for which
        upstream's order is that of the output, and when another algorithm serves.
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
    output.extend(tokens[len(output) - before :])  # their KV is committed
    return req.finished()
