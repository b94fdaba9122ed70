"""Tells the scheduler how DDTREE behaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.ddtree.disaggregation import draft_input_of_arrived
from sglang.srt.speculative.ddtree.server_args import resolve_server_args
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvMetadata
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def keeps_no_state_per_node() -> bool:
    """Return whether recurrent layers are verified without a stored state per node.

    They are if DDTREE serves, except in the mode "validate", which also runs upstream's verify.
    """
    spec = get_spec()
    return spec.speculative_algorithm == "DDTREE" and spec.speculative_ddtree_verify != "validate"


def tree_convolution(
    layer: torch.nn.Module, x: torch.Tensor, metadata: ShortConvMetadata
) -> torch.Tensor | None:
    """Convolve the nodes of trees in a layer of LFM2, whose verify calls this.

    Args:
        layer: the convolution layer.
        x: [bs * N, channels].
        metadata: from the backend's conv_state_metadata().

    Returns:
        [bs * N, channels], or None if the backend is not DDTREE's.
    """
    convolve = getattr(metadata, "convolve", None)
    if convolve is None:
        return None
    return convolve(x, weight=layer.conv_weight, bias=layer.conv_bias, activation=None)


class DDTreeAlgorithm(CustomSpecAlgo):
    """Answers the scheduler as DFLASH does, except for the width of a target verify."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        """Return False: upstream then reserves no page per candidate, as all candidates share one block."""
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: ReqToTokenPool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def build_disagg_draft_input(
        self, batch: ScheduleBatch, last_tokens_tensor: torch.Tensor, future_map: FutureMap
    ) -> DFlashDraftInputV2:
        """Prepare the first step of requests whose prefill ran on another server (disaggregation.py)."""
        return draft_input_of_arrived(batch, last_tokens_tensor, future_map)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens per request of one TARGET_VERIFY forward.

        Args:
            num_draft_tokens: N, the width of the verify tree.
            is_draft_worker: whether the drafter runs the forward.

        Returns:
            F, the draft block, for the drafter; N for the target.
        """
        return get_spec().speculative_dflash_block_size if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: ServerArgs) -> None:
        resolve_server_args(server_args)
