"""A decode step in three graphs, without a forward that upstream prepares.

The draft graph and the verify graph start by writing their own inputs, from what identifies a request: its bonus token,
its prefix length and its row of the slot table. So the host copies three numbers per request and launches the graphs,
where upstream's path builds two forward batches, copies their inputs and prepares the attention of each. A third graph
accepts and commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees
from sglang.srt.layers.attention.ddtree_backend import prepares_in_graph
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.ddtree.commit_graphs import CommitGraphs
from sglang.srt.utils import async_h2d

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


# Upstream's names of the inputs that the graphs write themselves, that draft() writes, or that none of them reads.
GIVEN = frozenset(
    (
        "input_ids",
        "positions",
        "out_cache_loc",
        "req_pool_indices",
        "seq_lens",
        "seq_lens_cpu",
        "global_num_tokens_gpu",
        "global_num_tokens_for_logprob_gpu",
        "mrope_positions",
    )
)


class StepGraphs:
    """Makes the graphs write their inputs, and replays a step: begin(), draft(), verify(), accept().

    Args:
        draft_runner: the drafter's, before its graphs are captured.
        target_runner: the target's, before its graphs are captured.
        trees: the ones that the draft graph builds into, for the largest batch.
        mask_token_id: the token at all positions of a draft block but the first.
        block_size: F, positions of a draft block.
        commit: as for CommitGraphs.
    """

    can_run_cuda_graph = True  # what a step reports

    def __init__(
        self,
        *,
        draft_runner: ModelRunner,
        target_runner: ModelRunner,
        trees: DraftTrees,
        mask_token_id: int,
        block_size: int,
        commit: Callable[[torch.Tensor, Accepted, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self.draft_runner = draft_runner
        self.target_runner = target_runner
        self.trees = trees
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.commits = CommitGraphs(trees=trees, block_size=block_size, commit=commit)
        max_bs, num_nodes = trees.tokens.shape
        self.bonus = trees.tokens.new_zeros(
            max_bs
        )  # [max_bs] int64: an input, as prefix lengths and rows are
        self.slots = trees.tokens.new_zeros(max_bs, num_nodes)  # of each request's window
        # What images add to the positions of the tokens that follow them (models with mrope, such as Qwen3.5)
        self.mrope_deltas = trees.tokens.new_zeros(max_bs)
        self._any_delta = False
        self._offsets = torch.arange(num_nodes, device=trees.tokens.device)
        self._complete = False
        draft_runner.capture_head_hooks.append(self.write_block)
        target_runner.capture_head_hooks.append(self.write_nodes)
        target_runner.capture_tail_hooks.append(self.commits.note_hidden)

    def write_block(self, runner: Any, forward_batch: ForwardBatch) -> None:
        """Write the draft block's tokens, positions and slots. The draft graph begins with it."""
        bs, width = forward_batch.batch_size, self.block_size
        tokens = forward_batch.input_ids.view(bs, width)
        tokens.fill_(self.mask_token_id)
        tokens[:, 0].copy_(self.bonus[:bs])
        window = forward_batch.seq_lens[:, None] + self._offsets
        table = self.target_runner.req_to_token_pool.req_to_token
        slots = self.slots[:bs]
        slots.copy_(table[forward_batch.req_pool_indices[:, None], window])
        forward_batch.positions.view(bs, width).copy_(window[:, :width])
        forward_batch.out_cache_loc.view(bs, width).copy_(slots[:, :width])

    def write_nodes(self, runner: Any, forward_batch: ForwardBatch) -> None:
        """Write the nodes' tokens, positions and slots. The verify graph begins with it."""
        bs, num_nodes = forward_batch.batch_size, self.trees.tokens.shape[1]
        forward_batch.input_ids.view(bs, num_nodes).copy_(self.trees.tokens[:bs])
        positions = forward_batch.positions.view(bs, num_nodes)
        torch.add(forward_batch.seq_lens[:, None], self.trees.depths[:bs], out=positions)
        if self.target_runner.model_config.model_is_mrope:
            mrope = positions + self.mrope_deltas[:bs, None]
            forward_batch.mrope_positions.view(-1, bs, num_nodes).copy_(mrope)
        forward_batch.out_cache_loc.view(bs, num_nodes).copy_(self.slots[:bs])

    def capture_commits(self) -> None:
        """Captures what follows a verify, if the graphs of draft and verify can run a step. They are there."""
        self._complete = self._is_complete(self.draft_runner) and self._is_complete(self.target_runner)
        if self._complete:
            self.commits.capture(self.target_runner.decode_cuda_graph_runner)

    def can_run(self, bs: int) -> bool:
        """Return whether the graphs hold `bs` requests and need no more than what draft() gives them."""
        runners = (self.draft_runner, self.target_runner)
        if not self._complete or any(runner.device_timer for runner in runners):
            return False
        return all(bs <= runner.decode_cuda_graph_runner.max_bs for runner in runners)

    def _is_complete(self, runner: ModelRunner) -> bool:
        """Whether a runner's graphs have no other inputs, and nothing on the host wants to see its forwards."""
        graphs = runner.decode_cuda_graph_runner
        if not isinstance(graphs, DecodeCudaGraphRunner):  # without graphs it is upstream's EagerRunner
            return False
        if graphs.attention_graph_variants is not None or graphs.require_gathered_buffer:
            return False
        if not prepares_in_graph(runner.attn_backend):
            return False
        if runner is self.draft_runner and runner.model_config.model_is_mrope:
            return False  # write_block() knows no deltas
        watched = runner.canary_manager or runner.eplb_manager or runner.msprobe_debugger
        moe = get_exec().moe
        watched = watched or moe.expert_distribution_recorder_mode or moe.elastic_ep_backend
        return set(graphs.buffer_registry.slot_names()) <= GIVEN and not watched

    def stage(self, batch: ScheduleBatch, bonus: torch.Tensor, slots: torch.Tensor) -> None:
        """Give the graphs what they write into their inputs, for a step that upstream's path runs.

        Args:
            batch: of bs requests.
            bonus: [bs] int64, each request's last token.
            slots: [bs, N] int64 of each request's window.
        """
        bs = bonus.numel()
        if bs <= self.bonus.numel():
            self.bonus[:bs].copy_(bonus)
            self.slots[:bs].copy_(slots)
            self.slots[bs:].zero_()  # a verify graph may have padding where the drafter ran without a graph
            self._stage_deltas(batch)

    def _stage_deltas(self, batch: ScheduleBatch) -> None:
        """Give the verify graph what each request's images add to its positions."""
        images = batch.multimodal_inputs or ()
        deltas = [0 if image is None else int(image.mrope_position_delta) for image in images]
        if any(deltas) or self._any_delta:
            self.mrope_deltas.zero_()
            self.mrope_deltas[: len(deltas)].copy_(
                async_h2d(deltas, dtype=torch.int64, device=self.mrope_deltas.device)
            )
            self._any_delta = any(deltas)

    def begin(self, batch: ScheduleBatch) -> StepGraphs:
        """Begins a step of a batch that can_run()."""
        self._batch = batch
        self._stage_deltas(batch)
        return self

    def draft(self) -> DraftTrees:
        """Replays the draft graph; returns the trees that it has built."""
        batch, bs = self._batch, len(self._batch.seq_lens)
        draft, target = (
            self.draft_runner.decode_cuda_graph_runner,
            self.target_runner.decode_cuda_graph_runner,
        )
        inputs = {self.bonus.data_ptr(): (self.bonus, batch.spec_info.bonus_tokens, 0)}
        for graphs in (draft, target):  # upstream may give both the same buffers
            graphs.raw_bs, graphs.bs = bs, graphs._pad_to_bucket(bs, graphs.capture_bs)
            seq_lens, rows = graphs.buffers.seq_lens, graphs.buffers.req_pool_indices
            inputs[seq_lens.data_ptr()] = seq_lens, batch.seq_lens, graphs.seq_len_fill_value
            # Padding: row 0 of the slot table, whose slots are nobody's.
            inputs[rows.data_ptr()] = rows, batch.req_pool_indices, 0
        torch._foreach_copy_(
            [buffer[:bs] for buffer, _, _ in inputs.values()], [source for _, source, _ in inputs.values()]
        )
        if target.bs > bs:
            for buffer, _, padding in inputs.values():
                buffer[bs : target.bs].fill_(padding)
        self._replay(draft)
        return self.trees.first(bs)

    def verify(self) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Replays the verify graph of the trees that draft() has built.

        Returns:
            The output, with logits [bs * N, vocabulary], and the nodes' positions: [bs * N] int64.
        """
        target = self.target_runner.decode_cuda_graph_runner
        output = self._replay(target)
        # From this mark in the graph on, upstream's scheduler may write to what the graphs read.
        self.target_runner.shared_read_done_event = target.in_graph_metadata_prep_done
        nodes = target.raw_bs * self.trees.tokens.shape[1]
        output = dataclasses.replace(
            output, next_token_logits=output.next_token_logits[:nodes], hidden_states=None
        )
        return output, target.buffers.positions[:nodes]

    def _replay(self, graphs: DecodeCudaGraphRunner) -> LogitsProcessorOutput:
        with graphs.backend.replay_session():
            return graphs.backend.replay(graphs._make_graph_key(graphs.bs), None)

    @property
    def target_out(self) -> torch.Tensor:
        """[bs * N] int64, where accept() finds the target's tokens."""
        return self.commits.target[: self.target_runner.decode_cuda_graph_runner.raw_bs].flatten()

    def accept(self, target: torch.Tensor) -> tuple[Accepted, torch.Tensor]:
        """Follows the drafted tokens that equal the target's, and commits that path.

        Args:
            target: target_out.

        Returns:
            What each request emits, and the new prefix lengths: [bs] int64.
        """
        graphs = self.target_runner.decode_cuda_graph_runner
        return self.commits.replay(graphs.raw_bs, graphs.bs)
