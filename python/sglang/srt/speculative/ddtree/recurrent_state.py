"""The target's recurrent states: their layers, what a verify keeps instead of a state per node, and the commit."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sgl_kernel.ddtree import (
    MAX_RECURRENT_NODES,
    RecurrentWorkspace,
    tree_conv_commit,
    tree_conv_verify,
    tree_recurrent_commit,
    tree_recurrent_verify,
)
from sglang.srt.configs.hybrid_arch import (
    hybrid_gdn_config,
    hybrid_kda_config,
    mamba2_config,
    mambaish_config,
)
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv
from sglang.srt.runtime_context import get_exec, get_schedule, mamba_track_grid
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sgl_kernel.ddtree import Accepted
    from sgl_kernel.ddtree.recurrent import Gate
    from sglang.srt.configs.mamba_utils import Mamba2StateDType
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SHORT_CONVOLUTIONS = (Lfm2ShortConv, Lfm2MoeShortConv)
CUDA_KEY_SIZES = (64, 128)  # d_k of the CUDA kernels
CUDA_VALUE_MULTIPLE = 16  # of d_v


@dataclass(frozen=True)
class RecurrentShape:
    """Heads and sizes of a recurrent layer on this rank.

    Attributes:
        h_k, h_v, d_k, d_v: key and value heads, and their sizes. Mamba2 calls them groups, heads, state size and
            head size. All are 0 in a short convolution without a recurrence (LFM2).
        channels: the channels of the short convolution.
    """

    h_k: int
    h_v: int
    d_k: int
    d_v: int
    channels: int

    @classmethod
    def of(cls, layer: torch.nn.Module) -> RecurrentShape:
        """Return the shape of a layer that recurrent_layers() found."""
        if isinstance(layer, SHORT_CONVOLUTIONS):
            return cls(h_k=0, h_v=0, d_k=0, d_v=0, channels=layer.hidden_size_per_partition)
        if isinstance(layer, RadixLinearAttention):
            return cls(
                h_k=layer.num_k_heads,
                h_v=layer.num_v_heads,
                d_k=layer.head_k_dim,
                d_v=layer.head_v_dim,
                channels=layer.q_dim + layer.k_dim + layer.v_dim,
            )
        return cls(
            h_k=layer.n_groups // layer.tp_size,
            h_v=layer.num_heads // layer.tp_size,
            d_k=layer.ssm_state_size,
            d_v=layer.head_dim,
            channels=layer.conv_dim // layer.tp_size,
        )


def recurrent_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the recurrent layers that call SGLang's linear-attention backend: GDN, KDA, Mamba2 and LFM2's."""
    kinds = (RadixLinearAttention, MambaMixer2, *SHORT_CONVOLUTIONS)
    return [m for m in model.modules() if isinstance(m, kinds)]


def recurrent_gaps(runner: ModelRunner, num_nodes: int) -> list[str]:
    """Name the parts of a target's recurrent layers that the tree ops do not cover.

    Args:
        runner: the target's.
        num_nodes: N.

    Returns:
        One phrase per gap; empty if the tree ops cover the layers, and if there are none.
    """
    config = mambaish_config(runner.model_config)
    if config is None:
        return []
    if gaps := kind_gaps(runner.model_config):
        return gaps
    params = config.mamba2_cache_params
    layers = recurrent_layers(runner.model)
    if len(layers) != len(params.layers):
        return [
            f"{len(params.layers) - len(layers)} recurrent layers that run their own kernels instead of "
            "SGLang's GDN, KDA, Mamba2 or LFM2 layer"
        ]
    shapes = {RecurrentShape.of(layer) for layer in layers}
    if len(shapes) > 1:
        gaps.append(f"recurrent layers of different shapes: {sorted(map(str, shapes))}")
    sizes = {(shape.d_k, shape.d_v) for shape in shapes if shape.h_v}
    return gaps + state_gaps(
        params.dtype, sizes, dtype=runner.dtype, device=torch.device(runner.device).type, num_nodes=num_nodes
    )


def kind_gaps(config: ModelConfig) -> list[str]:
    """Name the kind of a target's recurrent layers if the tree ops have no kernel for it.

    Args:
        config: the configuration of a target with recurrent layers.
    """
    if any(kind(config) is not None for kind in (hybrid_gdn_config, hybrid_kda_config, mamba2_config)):
        return []
    return [f"recurrent layers of {type(mambaish_config(config)).__name__}, which have no tree kernel"]


def state_gaps(
    stored: Mamba2StateDType,
    sizes: Iterable[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: str,
    num_nodes: int,
) -> list[str]:
    """Name the properties of recurrent states that the tree ops do not cover.

    Args:
        stored: the dtypes of states and convolution windows.
        sizes: (d_k, d_v) of the layers that have a state.
        dtype: the dtype of the activations.
        device: the type of the device.
        num_nodes: N.

    Returns:
        One phrase per gap.
    """
    gaps = []
    if stored.conv != dtype:
        gaps.append(
            f"convolution windows in {stored.conv} and activations in {dtype} (the environment variable "
            "SGLANG_MAMBA_CONV_DTYPE sets the windows' dtype)"
        )
    if device == "cuda":
        if dtype != torch.bfloat16:
            gaps.append(f"recurrent layers in {dtype}")
        if stored.temporal not in (torch.float32, torch.bfloat16):
            gaps.append(f"recurrent states in {stored.temporal}")
        for d_k, d_v in sizes:
            if d_k not in CUDA_KEY_SIZES or d_v % CUDA_VALUE_MULTIPLE:
                gaps.append(f"recurrent layers with (d_k, d_v) = {(d_k, d_v)}")
        if num_nodes > MAX_RECURRENT_NODES:
            gaps.append(f"recurrent layers with trees of {num_nodes} nodes, more than {MAX_RECURRENT_NODES}")
    return gaps


class RecurrentStates:
    """The recurrent layers' side of a step: verify() and convolve() for each layer, and one commit() for all.

    Between them only the nodes' keys, updates, decays and convolution inputs are kept, in a workspace. It is
    allocated before the pools, whose size is what memory then remains.

    A verify and its commit use the same slots of states, which find_slots() reads when the verify begins. By the
    time of the commit, the scheduler may have given the slot of a request that has ended to another one.

    Args:
        runner: the runner of a target whose recurrent_gaps() are empty.
        num_nodes: N.
        max_bs: the most requests of a batch.
    """

    def __init__(self, runner: ModelRunner, *, num_nodes: int, max_bs: int) -> None:
        self.runner = runner
        self.num_nodes = num_nodes
        self.is_kda = hybrid_kda_config(runner.model_config) is not None
        layers = recurrent_layers(runner.model)
        shape = RecurrentShape.of(layers[0])
        device, rows = torch.device(runner.device), max_bs * num_nodes
        self.workspace: RecurrentWorkspace | None = None
        if shape.h_v:
            self.workspace = RecurrentWorkspace.allocate(
                layers=len(layers),
                rows=rows,
                h_k=shape.h_k,
                h_v=shape.h_v,
                d_k=shape.d_k,
                d_v=shape.d_v,
                dtype=runner.dtype,
                device=device,
                per_channel=self.is_kda,
            )
        self.conv_workspace = torch.empty(
            len(layers), rows, shape.channels, dtype=runner.dtype, device=device
        )
        self.slots = torch.full((max_bs,), -1, dtype=torch.int32, device=device)  # of the current verify
        # [max_bs] int64, slots for the states that the radix cache keeps; None: it keeps those of whole answers only
        self.tracked_slots: torch.Tensor | None = None
        if get_exec().mamba.enable_mamba_extra_buffer:
            self.tracked_slots = torch.full((max_bs,), -1, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, runner: ModelRunner, num_nodes: int) -> RecurrentStates | None:
        """Return the states of a target, or None if it has no recurrent layers."""
        if mambaish_config(runner.model_config) is None:
            return None
        max_bs = get_schedule().max_running_requests + 1  # the pool of requests has one for padding
        return cls(runner, num_nodes=num_nodes, max_bs=max_bs)

    @property
    def pool(self) -> HybridReqToTokenPool:
        return self.runner.req_to_token_pool

    @property
    def states(self) -> torch.Tensor:
        """[layers, slots, h_v, d_v, d_k], the pool's."""
        return self.pool.mamba_pool.mamba_cache.temporal

    @property
    def windows(self) -> torch.Tensor:
        """[layers, slots, channels, width - 1], the pool's."""
        windows = self.pool.mamba_pool.mamba_cache.conv[0]
        return windows.transpose(-1, -2) if self.is_kda else windows

    def windows_of(self, layer_id: int) -> torch.Tensor:
        """Return a layer's windows, [slots, channels, width - 1]."""
        return self.windows[self.pool.mamba2_layer_index(layer_id)]

    def log_memory(self) -> None:
        """Log what the workspace takes, and what a state and a window per node would take."""
        kept = [self.conv_workspace]
        if self.workspace is not None:
            kept += [self.workspace.k, self.workspace.u, self.workspace.g]
        workspace = sum(tensor.nbytes for tensor in kept)
        per_slot = sum(tensor[:, 0].nbytes for tensor in (self.states, self.windows))
        max_bs = self.conv_workspace.shape[1] // self.num_nodes
        per_node = per_slot * max_bs * self.num_nodes
        logger.info(
            "DDTREE: verify keeps %.3f GB for the recurrent layers of %d requests with %d nodes. "
            "A state per node would take %.3f GB.",
            workspace / 1e9,
            max_bs,
            self.num_nodes,
            per_node / 1e9,
        )

    # ---- what a verify begins with ----

    def find_slots(self, rows: torch.Tensor) -> None:
        """Find the states of the requests that are verified. A graph can capture it.

        Args:
            rows: [bs] int64, each request's row of the slot table. Row 0 is the padding's.
        """
        slots = self.pool.translate_mamba_indices(self.pool.get_mamba_indices(rows))
        self.slots[: rows.numel()].copy_(slots.masked_fill(rows == 0, -1))

    def prepare_tracking(self, batch: ScheduleBatch) -> None:
        """Choose the slots for the states that the radix cache keeps, as upstream does before a verify."""
        prepare_mamba_track_for_verify(batch)
        self.stage_tracking(batch)

    def stage_tracking(self, batch: ScheduleBatch) -> None:
        """Give the commit the slots that upstream chose for a batch."""
        if self.tracked_slots is not None:
            slots = self.pool.translate_mamba_indices(batch.mamba_track_indices)
            self.tracked_slots[: slots.numel()].copy_(slots)

    # ---- verify, layer by layer ----

    def convolve(
        self,
        x: torch.Tensor,
        layer_id: int,
        *,
        slots: torch.Tensor,
        ancestors: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """Convolve each node's path.

        Args:
            x: [bs * N, channels].
            layer_id: the index of the layer in the model.
            slots: [bs] states of the requests; negative: none.
            ancestors: [bs * N, words] int64.
            weight: [channels, width].
            bias: [channels] or None.
            activation: "silu" or None.

        Returns:
            [bs * N, channels].
        """
        if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
            x = x.contiguous()  # the kernel reads vectors of 16 bytes
        index = self.pool.mamba2_layer_index(layer_id)
        return tree_conv_verify(
            x,
            self.windows[index],
            slots,
            ancestors,
            weight,
            bias,
            self.conv_workspace,
            index,
            activation=activation,
        )

    def verify(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: Gate,
        layer_id: int,
        *,
        slots: torch.Tensor,
        ancestors: torch.Tensor,
        scale: float | None = None,
        normalize: bool = False,
    ) -> torch.Tensor:
        """Run one layer over all nodes. It reads each request's state and writes none.

        Args:
            q, k: [bs * N, h_k, d_k].
            v: [bs * N, h_v, d_v].
            gate: the kind of layer, with its decay.
            layer_id: the index of the layer in the model.
            slots, ancestors: as in convolve().
            scale, normalize: as in tree_recurrent_verify().

        Returns:
            [bs * N, h_v, d_v].
        """
        index = self.pool.mamba2_layer_index(layer_id)
        return tree_recurrent_verify(
            q,
            k,
            v,
            gate,
            self.states[index],
            slots,
            ancestors,
            self.workspace,
            index,
            scale=scale,
            normalize=normalize,
        )

    # ---- commit ----

    def commit(self, prefix_lens: torch.Tensor, accepted: Accepted, num_nodes: int) -> None:
        """Apply the accepted paths to states and windows, in place. A graph can capture it.

        If the radix cache keeps states at multiples of an interval ("extra_buffer"), the state at the last
        multiple that a path reaches is written to the slot that upstream chose for it.

        Args:
            prefix_lens: [bs] int64, committed tokens of each request before the step.
            accepted: the accepted paths of the step.
            num_nodes: N of the step's verify.
        """
        bs = prefix_lens.numel()
        tracked = {}
        if self.tracked_slots is not None:
            interval = mamba_track_grid(self.runner.page_size)
            tracked = dict(
                track_indices=self.tracked_slots[:bs],
                track_positions=tracked_positions(prefix_lens, accepted.lengths, interval),
            )
        common = dict(
            state_indices=self.slots[:bs],
            path=accepted.path,
            lengths=accepted.lengths,
            num_nodes=num_nodes,
            **tracked,
        )
        if self.workspace is not None:
            tree_recurrent_commit(self.states, workspace=self.workspace, **common)
        tree_conv_commit(self.windows, workspace=self.conv_workspace, **common)


def tracked_positions(prefix_lens: torch.Tensor, lengths: torch.Tensor, interval: int) -> torch.Tensor:
    """Find the path position whose state the radix cache wants.

    Args:
        prefix_lens: [bs] int64, committed tokens before the step.
        lengths: [bs] int32, tokens that the step commits.
        interval: the interval in tokens.

    Returns:
        [bs] int64: the position of the last token whose number, counted from 1, is a multiple of the interval,
        or -1 if the path has none.
    """
    ends = prefix_lens + lengths
    multiple = ends // interval * interval
    return torch.where(multiple > prefix_lens, multiple - prefix_lens - 1, -1)
