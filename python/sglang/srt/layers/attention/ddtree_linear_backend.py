"""The recurrent layers of DDTREE's verify pass, as wrappers around the server's linear-attention backends.

A wrapper runs TARGET_VERIFY with the recurrent tree ops of sgl_kernel.ddtree. Prefill, decode and graph buffers are
unchanged. Upstream's verify keeps a state per node; these keep the nodes' inputs (see RecurrentStates). In mode
"validate", upstream's runs too, on the tree's links, and the result is compared. It has none for short convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from sgl_kernel.ddtree import ChannelDelta, GatedDelta, StateSpace
from sglang.srt.layers.attention.ddtree_wrap import wrap
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend, MambaAttnBackendBase
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend, ShortConvMetadata
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput

if TYPE_CHECKING:
    from sgl_kernel.ddtree.recurrent import Gate
    from sglang.srt.layers.attention.ddtree_backend import TreeVerifyMixin
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.ddtree.recurrent_state import RecurrentStates


class RecurrentVerifyMixin(MambaAttnBackendBase):
    """Runs TARGET_VERIFY with the recurrent tree ops. The backend that it is mixed into does everything else."""

    def init_recurrent_verify(self, states: RecurrentStates, attention: TreeVerifyMixin) -> None:
        """Make the backend ready for verifies.

        Args:
            states: the recurrent states of the target.
            attention: the wrapper of the target's attention layers, which knows the trees.
        """
        self.tree_states = states
        self.tree_attention = attention
        self.tree_validates = attention.tree_mode == "validate"
        self.topk = 2 if self.tree_validates else 0  # with more than 1, upstream reads the trees' links
        self.tree_shares_buffers = False
        self.accept_lens_pool = None  # KDA: with it, prefill writes states per node

    def narrowed(self, attention: TreeVerifyMixin) -> Self:
        """Make a copy for the graphs of narrower trees, whose attention layers run on `attention`."""
        narrow = copy.copy(self)
        narrow.tree_attention, narrow.tree_shares_buffers = attention, True
        return narrow

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if not self.tree_shares_buffers:
            super().init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        is_verify = forward_batch.forward_mode.is_target_verify()
        if is_verify and not isinstance(forward_batch.spec_info, DDTreeVerifyInput):
            # A forward that upstream made up. Where it reads links, these stand for none.
            forward_batch.spec_info.retrieve_next_token = forward_batch.spec_info.retrieve_next_sibling = None
        super().init_forward_metadata(forward_batch)
        if is_verify:
            self.tree_states.find_slots(forward_batch.req_pool_indices)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self.tree_states.find_slots(forward_batch.req_pool_indices)

    def _nodes(self, forward_batch: ForwardBatch, tokens: int) -> dict[str, torch.Tensor]:
        """Return the slots and ancestor words of a verify's `tokens` nodes."""
        num_nodes = forward_batch.spec_info.draft_token_num
        return dict(
            slots=self.tree_states.slots[: tokens // num_nodes],
            ancestors=self.tree_attention.ancestors_of(tokens),
        )

    def _validate(
        self, native: torch.Tensor, run_base: Callable[[], torch.Tensor], layer_id: int,
        forward_batch: ForwardBatch, slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the result of upstream's verify, and accumulate its difference from `native`.

        Args:
            native: [T, width].
            run_base: upstream's verify of the layer.
            layer_id: the index of the layer in the model.
            forward_batch: a TARGET_VERIFY batch.
            slots: [bs], the slots of the requests' states.
        """
        # Upstream's convolution moves the windows, and its commit would put them right.
        windows, kept = self.tree_states.windows_of(layer_id), slots.long().clamp(min=0)
        before = windows[kept]
        base = run_base()
        windows[kept] = before
        self.tree_attention.accumulate_difference(native, base.reshape(native.shape), layer_id, forward_batch)
        return base


class LinearAttentionVerify(RecurrentVerifyMixin):
    """Tree verify of the backends whose layers are RadixLinearAttention."""

    def _gate(self, layer: RadixLinearAttention, a: torch.Tensor, b: torch.Tensor) -> Gate:
        """Return the layer's gate, of the kind that the tree ops expect. a and b are the model's."""
        raise NotImplementedError

    def forward_extend(
        self, layer: RadixLinearAttention, forward_batch: ForwardBatch, mixed_qkv: torch.Tensor,
        a: torch.Tensor, b: torch.Tensor, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
            )
        nodes = self._nodes(forward_batch, len(mixed_qkv))
        convolved = self.tree_states.convolve(
            mixed_qkv,
            layer.layer_id,
            weight=layer.conv_weights,
            bias=layer.bias,
            activation=layer.activation,
            **nodes,
        )
        q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        out = self.tree_states.verify(
            q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
            k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
            v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
            self._gate(layer, a, b),
            layer.layer_id,
            normalize=True,
            **nodes,
        )
        if not self.tree_validates:
            return out[None]
        base = partial(
            super().forward_extend,
            layer=layer,
            forward_batch=forward_batch,
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            **kwargs,
        )
        return self._validate(out.flatten(1), base, layer.layer_id, forward_batch, nodes["slots"])


class GDNTreeVerify(LinearAttentionVerify, GDNAttnBackend):
    """Tree verify of GDN layers."""

    def _gate(self, layer: RadixLinearAttention, a: torch.Tensor, b: torch.Tensor) -> GatedDelta:
        return GatedDelta(a=a, b=b, a_log=layer.A_log, dt_bias=layer.dt_bias)


class KDATreeVerify(LinearAttentionVerify, KDAAttnBackend):
    """Tree verify of KDA layers, whose decay is per key channel."""

    def _gate(self, layer: RadixLinearAttention, a: torch.Tensor, b: torch.Tensor) -> ChannelDelta:
        heads, size = layer.num_v_heads, layer.head_k_dim
        return ChannelDelta(
            a=a.reshape(-1, heads, size),
            b=b.reshape(-1, heads),
            a_log=layer.A_log.flatten(),
            dt_bias=layer.dt_bias.view(heads, size),
            lower_bound=layer.lower_bound,
        )


class Mamba2TreeVerify(RecurrentVerifyMixin, Mamba2AttnBackend):
    """Tree verify of Mamba2 layers, which hand their whole layer to the backend."""

    def forward(
        self, mixer: MambaMixer2, hidden_states: torch.Tensor, output: torch.Tensor | None, layer_id: int,
        forward_batch: ForwardBatch, mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward(
                mixer, hidden_states, output, layer_id, forward_batch, mup_vector, use_triton_causal_conv
            )
        nodes = self._nodes(forward_batch, len(hidden_states))
        ranks, groups = mixer.tp_size, mixer.n_groups // mixer.tp_size
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        width = mixer.intermediate_size // ranks
        gate, inputs, dt = projected.split([width, mixer.conv_dim // ranks, mixer.num_heads // ranks], dim=-1)
        convolved = self.tree_states.convolve(
            inputs,
            layer_id,
            weight=mixer.conv1d.weight.squeeze(1),
            bias=mixer.conv1d.bias,
            activation=mixer.activation,
            **nodes,
        )
        x, b, c = convolved.split([width, *[mixer.groups_ssm_state_size // ranks] * 2], dim=-1)
        out = self.tree_states.verify(
            c.unflatten(-1, (groups, -1)),
            b.unflatten(-1, (groups, -1)),
            x.unflatten(-1, (-1, mixer.head_dim)),
            StateSpace(dt=dt, a=mixer.A, dt_bias=mixer.dt_bias, d=mixer.D),
            layer_id,
            scale=1.0,
            **nodes,
        )
        result, _ = mixer.out_proj(mixer.norm(out.flatten(1), gate))
        if self.tree_validates:
            base = partial(
                super().forward,
                mixer,
                hidden_states,
                None,
                layer_id,
                forward_batch,
                mup_vector,
                use_triton_causal_conv,
            )
            result = self._validate(result, base, layer_id, forward_batch, nodes["slots"])
        if output is not None:
            output[: len(result)].copy_(result)
        return result


class TreeConvMetadata(ShortConvMetadata):
    """What a model gets from conv_state_metadata() for the verify of trees. See algorithm.tree_convolution().

    Attributes:
        convolve: convolve(x, **weights), as RecurrentStates.convolve() with the rest of its arguments bound.
    """

    convolve: Callable[..., torch.Tensor]


class ShortConvTreeVerify(RecurrentVerifyMixin, ShortConvAttnBackend):
    """Tree verify of short convolutions, which their models run on states that the backend hands out."""

    def conv_state_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> ShortConvMetadata:
        metadata = super().conv_state_metadata(layer_id, forward_batch)
        if not forward_batch.forward_mode.is_target_verify():
            return metadata
        nodes = self._nodes(forward_batch, len(forward_batch.input_ids))
        metadata = TreeConvMetadata(*metadata)
        metadata.convolve = partial(self.tree_states.convolve, layer_id=layer_id, **nodes)
        return metadata


# By the exact class: a subclass would lose its overrides.
WRAPPERS: dict[type[MambaAttnBackendBase], type[RecurrentVerifyMixin]] = {
    GDNAttnBackend: GDNTreeVerify,
    KDAAttnBackend: KDATreeVerify,
    Mamba2AttnBackend: Mamba2TreeVerify,
    ShortConvAttnBackend: ShortConvTreeVerify,
}


def with_recurrent_verify(
    backend: MambaAttnBackendBase, states: RecurrentStates, attention: TreeVerifyMixin
) -> MambaAttnBackendBase:
    """Wrap a linear-attention backend so that it runs TARGET_VERIFY on trees, and everything else as before.

    Args:
        backend: upstream's, after its construction and before graph capture.
        states: the target's.
        attention: the wrapper of the target's attention layers.

    Returns:
        The backend to use instead.

    Raises:
        ValueError: tree verify cannot wrap the backend.
    """
    wrapper = WRAPPERS.get(type(backend))
    if wrapper is None:
        raise ValueError(
            "DDTREE: target model: expected recurrent layers that run on one of "
            f"{[known.__name__ for known in WRAPPERS]}, got {type(backend).__name__}: serve it without DDTREE."
        )
    wrapped = wrap(wrapper, backend)
    wrapped.init_recurrent_verify(states, attention)
    return wrapped
