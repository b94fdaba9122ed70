"""Lets a session go on where the last answer ended, and from KV that has been computed.

A step may decode past a stop, and the last token of an answer may have no KV yet. Upstream (0.5.23) counts both as
parts of the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.streaming_session import StreamingSession


def repair_sessions() -> None:
    """Repair the sessions of this process."""
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import StreamingSession

    concatenate, keep = Session._concat_token_arrays, StreamingSession.try_cache_finished_req

    def without_the_rest(last: Req, *turn: Any) -> Any:
        """Start a turn of a session without streaming from the last answer up to its stop, not from what follows it."""
        del last.output_ids[len(last.output_ids_through_stop) :]
        return concatenate(last, *turn)

    def keep_what_is_computed(sessions: StreamingSession, req: Req) -> bool:
        """Keep the KV of a finished or retracted request. Upstream also counts the last token, which may have none yet."""
        slot, computed = sessions.borrowed_slot(req), req.kv.kv_committed_len
        is_kept = keep(sessions, req)  # takes the session from a request that it keeps for the second time
        if is_kept:
            slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, computed)
        return is_kept

    Session._concat_token_arrays = staticmethod(without_the_rest)
    StreamingSession.try_cache_finished_req = keep_what_is_computed
