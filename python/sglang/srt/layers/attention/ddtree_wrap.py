"""How DDTREE wraps upstream's attention backends."""

from __future__ import annotations

from typing import TypeVar

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

Wrapper = TypeVar("Wrapper", bound=AttentionBackend)


def wrap(wrapper: type[Wrapper], backend: AttentionBackend) -> Wrapper:
    """Make an object of class `wrapper`, a subclass of the backend's class, that shares the backend's state.

    Why not an object that holds the backend and forwards to it:
    - Upstream checks the type: unless it is a TritonAttnBackend, Gemma 3 and 4 give images causal attention.
    - AttentionBackend has defaults for more than forty attributes and methods. A forwarding object would have
      to name each of them, and would answer with the default of each that a later release adds.
    - Models and graph runners read and write plain attributes of the backend, such as forward_metadata.
    Why not a new backend with a state of its own: upstream's runner builds the backend and may hand it out
    before it is wrapped.
    """
    wrapped = object.__new__(wrapper)
    wrapped.__dict__ = backend.__dict__
    return wrapped
