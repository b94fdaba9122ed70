"""Which models a weight update changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from torch import nn


def updated_models(selector: str) -> str:
    """Say which models a weight update, or a check of the weights, is for.

    A drafter has weights of its own, but its layers have the same names as the target's. Loading the target's
    weights into it would succeed and ruin it.

    Args:
        selector: upstream's "target", "draft" or "all". Updates from disk and by IPC are always for "all".

    Returns:
        The selector. With DDTREE, "all" means the target.
    """
    if selector == "all" and get_spec().speculative_algorithm == "DDTREE":
        return "target"
    return selector


def refuse_updates(drafter: nn.Module) -> None:
    """Make upstream refuse every update of the drafter's weights.

    On CUDA, DFLASH's worker keeps stacked copies of them, which an update would not change.

    Args:
        drafter: the draft model.
    """
    # Upstream looks for this attribute before it loads anything, and answers with its text.
    drafter._derived_weight_cache_error = (
        "DDTREE does not update the drafter's weights: update the target alone, and restart the server to change "
        "the drafter."
    )
