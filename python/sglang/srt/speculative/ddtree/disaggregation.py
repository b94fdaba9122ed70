"""Requests whose prefill ran on another server, as with --disaggregation-mode decode.

Upstream transfers the KV of target and drafter, the states of recurrent layers and the first token. The worker keeps
more per request, which a prefill sets. A decoding server sets it in the first step of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

_arrived: WeakSet[Req] = WeakSet()


def draft_input_of_arrived(
    batch: ScheduleBatch, last_tokens: torch.Tensor, future_map: FutureMap
) -> DFlashDraftInputV2:
    """Prepare the first step of requests that arrive from a prefill server, or that resume after a retraction.

    Args:
        batch: the requests, with the slots of their KV.
        last_tokens: [bs] int64, the last token that each of them has emitted.
        future_map: upstream's, which gives the step its inputs under overlap scheduling.

    Returns:
        DFLASH's input of a draft.
    """
    from sglang.srt.speculative.dflash_disaggregation import build_dflash_disagg_draft_input

    _arrived.update(batch.reqs)
    return build_dflash_disagg_draft_input(batch, last_tokens, future_map)


def take_arrived(requests: list[Req]) -> list[tuple[int, Req]]:
    """Return the requests that have not had a step on this server yet, each with its index. A second call finds none.

    Args:
        requests: the requests of a step.
    """
    found = [(i, request) for i, request in enumerate(requests) if request in _arrived] if _arrived else []
    _arrived.difference_update(request for _, request in found)
    return found
