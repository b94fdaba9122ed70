"""Keeps a grammar that forbids every token from ending the server."""

from __future__ import annotations

import torch


def allow_token_0(logits: torch.Tensor) -> None:
    """Allow token 0, in place, in the rows where no token is allowed.

    A grammar can forbid every token: `root ::= root "a"` matches no text, the vocabulary may not spell what the grammar
    asks for, and min_new_tokens can forbid the end that the grammar requires. The probabilities of such a row would be
    NaN, and sampling from them can end the server. The grammar refuses token 0, and upstream then ends this one
    request.

    Args:
        logits: [rows, vocabulary], with -inf for what penalties and grammars forbid.
    """
    logits[:, 0].masked_fill_(logits.amax(-1) == -float("inf"), 0.0)
