"""Lets LoRA adapters serve with DDTREE, as with DFLASH: the target runs with them, the drafter without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolving_view

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class _AsDFlash:
    """A server's arguments, read-only, that name DFLASH as the algorithm."""

    speculative_algorithm = "DFLASH"
    _resolved_overrides = ()  # where upstream would look for the algorithm first

    def __init__(self, args: ServerArgs) -> None:
        self._view = resolving_view(args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def checking_as_dflash(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make upstream's check of LoRA with speculation treat DDTREE as DFLASH. It knows algorithms by name.

    LoRA needs the same number of tokens per request in a verify. A tree of DDTREE has N, with padding.

    Args:
        check: upstream's. It takes the server's arguments, and raises ValueError for those that LoRA does not serve.
    """

    def checked(args: ServerArgs) -> None:
        is_ddtree = resolving_view(args).speculative_algorithm == "DDTREE"
        check(_AsDFlash(args) if is_ddtree else args)

    return checked
