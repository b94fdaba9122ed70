"""Decides which requests DDTREE refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def refuse_request(req: Req) -> str | None:
    """Say why DDTREE cannot answer a request exactly.

    Args:
        req: a request that is not queued yet.

    Returns:
        The reason, or None if the request is fine or another algorithm serves it.
    """
    if get_spec().speculative_algorithm != "DDTREE":
        return None
    if req.return_sampling_mask:
        return "DDTREE does not support return_sampling_mask: it samples at every node of a tree."
    if req.return_hidden_states:
        return "DDTREE does not support return_hidden_states: they go to the drafter only."
    params = req.sampling_params
    if params.sampling_seed is not None and params.n > 1 and params.top_k != 1:
        return (
            f"DDTREE does not support a seed with n > 1 (seed {params.sampling_seed}, n {params.n}): all answers "
            "would be the same. Send one request per seed."
        )
    return None
