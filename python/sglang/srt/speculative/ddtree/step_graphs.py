"""A decode step in three graphs, without a forward that upstream prepares.

The draft graph and the verify graph start by writing their own inputs, from what identifies a request: its bonus token,
its prefix length and its row of the slot table. So the host copies three numbers per request and launches the graphs,
where upstream's path builds two forward batches, copies their inputs and prepares the attention of each. A third graph
accepts and commits.

There may be verify graphs of several widths. The draft graph builds trees of the widest one, whose first n nodes are the
tree of width n. So a step may choose its width after the draft. Width 1 needs no draft: it verifies the root alone, as
plain decoding does, and the commit gives the drafter its hidden states all the same.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, ancestor_words
from sglang.srt.layers.attention.ddtree_wrap import narrowed, prepares_in_graph
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.ddtree.commit_graphs import Commit, CommitGraphs
from sglang.srt.speculative.ddtree.tree_builder import first_nodes, lone_roots
from sglang.srt.utils import async_h2d

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ddtree.expectation import Expectation

logger = logging.getLogger(__name__)

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
        trees: the ones that the draft graph builds into, for the largest batch and the widest verify.
        mask_token_id: the token at all positions of a draft block but the first.
        block_size: F, positions of a draft block.
        commit: as for CommitGraphs.
        widths: N of every verify graph.
        expectation: as for CommitGraphs.
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
        commit: Commit,
        widths: tuple[int, ...],
        expectation: Expectation | None = None,
    ) -> None:
        self.draft_runner = draft_runner
        self.target_runner = target_runner
        self.trees = trees
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        max_bs, num_nodes = trees.tokens.shape
        # [max_bs] int64: an input, as prefix lengths and rows are
        self.bonus = trees.tokens.new_zeros(max_bs)
        self.slots = trees.tokens.new_zeros(max_bs, num_nodes)  # of each request's window
        # What images add to the positions of the tokens that follow them (models with mrope, such as Qwen3.5)
        self.mrope_deltas = trees.tokens.new_zeros(max_bs)
        self._any_delta = False
        self.commits = CommitGraphs(
            trees=trees, slots=self.slots, block_size=block_size, commit=commit, expectation=expectation
        )
        # Where the narrower verify graphs find ancestor words. A lone root is its only ancestor.
        self._ancestors = {
            width: trees.ancestors.new_ones(max_bs, width, ancestor_words(width))
            for width in widths
            if width < num_nodes
        }
        self._verifiers: dict[int, DecodeCudaGraphRunner] = {}  # by N
        self.capture_seconds, self.capture_gb = 0.0, 0.0  # of the narrower graphs
        self._offsets = torch.arange(num_nodes, device=trees.tokens.device)
        draft_runner.capture_head_hooks.append(self.write_block)
        target_runner.capture_head_hooks.append(self.write_nodes)
        target_runner.capture_tail_hooks.append(self.commits.note_hidden)

    def write_block(self, runner: Any, forward_batch: ForwardBatch) -> None:
        """Write the draft block's tokens, positions and slots. The draft graph begins with it."""
        bs, width = forward_batch.batch_size, self.block_size
        tokens = forward_batch.input_ids.view(bs, width)
        tokens.fill_(self.mask_token_id)
        tokens[:, 0].copy_(self.bonus[:bs])
        window, slots = self._write_slots(forward_batch)
        forward_batch.positions.view(bs, width).copy_(window[:, :width])
        forward_batch.out_cache_loc.view(bs, width).copy_(slots[:, :width])

    def _write_slots(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the slots of each request's window; returns positions and slots of the windows, [bs, N] each."""
        window = forward_batch.seq_lens[:, None] + self._offsets
        table = self.target_runner.req_to_token_pool.req_to_token
        slots = self.slots[: forward_batch.batch_size]
        slots.copy_(table[forward_batch.req_pool_indices[:, None], window])
        return window, slots

    def write_nodes(self, runner: Any, forward_batch: ForwardBatch) -> None:
        """Write the nodes' tokens, positions and slots. A verify graph begins with it."""
        bs = forward_batch.batch_size
        num_nodes = forward_batch.input_ids.numel() // bs
        if num_nodes == 1:
            _, slots = self._write_slots(forward_batch)
            forward_batch.input_ids.copy_(self.bonus[:bs])
            forward_batch.positions.copy_(forward_batch.seq_lens)
            forward_batch.out_cache_loc.copy_(slots[:, 0])
            self._write_mrope(forward_batch, 1)
            return
        trees, shape = self.trees.first(bs), (bs, num_nodes)
        forward_batch.input_ids.view(shape).copy_(trees.tokens[:, :num_nodes])
        positions = forward_batch.positions.view(shape)
        torch.add(forward_batch.seq_lens[:, None], trees.depths[:, :num_nodes], out=positions)
        self._write_mrope(forward_batch, num_nodes)
        forward_batch.out_cache_loc.view(shape).copy_(self.slots[:bs, :num_nodes])
        if num_nodes in self._ancestors:
            ancestors = self._ancestors[num_nodes][:bs]
            ancestors.copy_(trees.ancestors[:, :num_nodes, : ancestors.shape[2]])

    def _write_mrope(self, forward_batch: ForwardBatch, num_nodes: int) -> None:
        if self.target_runner.model_config.model_is_mrope:
            bs = forward_batch.batch_size
            mrope = forward_batch.positions.view(bs, num_nodes) + self.mrope_deltas[:bs, None]
            forward_batch.mrope_positions.view(-1, bs, num_nodes).copy_(mrope)

    def capture(self) -> None:
        """Capture the narrower verify graphs, and accept and commit for every verify graph.

        Upstream has captured a draft graph and the widest verify graph. If these cannot run a step, this captures
        nothing.
        """
        widest = self.target_runner.decode_cuda_graph_runner
        if not (self._is_complete(self.draft_runner) and self._is_complete(self.target_runner)):
            return
        self._verifiers = {self.trees.tokens.shape[1]: widest}
        if self._ancestors:
            self._capture_narrower(widest)
        self.commits.capture(self._verifiers)

    def _capture_narrower(self, widest: DecodeCudaGraphRunner) -> None:
        start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        for width, ancestors in sorted(self._ancestors.items(), reverse=True):
            self._verifiers[width] = type(widest)(
                self.target_runner,
                attn_backend=narrowed(self.target_runner.attn_backend, width, ancestors),
                speculative_num_draft_tokens=width,
            )
        self.capture_seconds = time.perf_counter() - start
        self.capture_gb = (free - torch.cuda.mem_get_info()[0]) / (1 << 30)
        logger.info(
            "DDTREE: captured verify graphs of %s nodes for %d batch sizes in %.1f s and %.2f GB.",
            ", ".join(map(str, sorted(self._ancestors))),
            len(widest.capture_bs),
            self.capture_seconds,
            self.capture_gb,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """N of every verify graph, ascending. Empty before capture(), and if the graphs cannot run a step."""
        return tuple(sorted(self._verifiers))

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes of the graphs, ascending. Each has graphs of every width."""
        return sorted(self.target_runner.decode_cuda_graph_runner.capture_bs)

    def can_run(self, bs: int) -> bool:
        """Return whether the graphs can run a step of `bs` requests."""
        runners = (self.draft_runner, self.target_runner)
        if not self._verifiers or any(runner.device_timer for runner in runners):
            return False
        return all(bs <= runner.decode_cuda_graph_runner.max_bs for runner in runners)

    def _is_complete(self, runner: ModelRunner) -> bool:
        """Return whether we give all inputs of a runner's graphs, and the host has no part in its forwards."""
        graphs = runner.decode_cuda_graph_runner
        if not isinstance(graphs, DecodeCudaGraphRunner):  # without graphs it is upstream's EagerRunner
            return False
        if graphs.attention_graph_variants is not None or graphs.require_gathered_buffer:
            return False
        if not prepares_in_graph(runner.attn_backend):
            return False
        if runner is self.draft_runner and runner.model_config.model_is_mrope:
            return False  # write_block() does not add the deltas
        if runner.lora_manager is not None:
            return False  # it prepares the adapters of each batch on the host
        watched = runner.canary_manager or runner.eplb_manager or runner.msprobe_debugger
        moe = get_exec().moe
        watched = watched or moe.expert_distribution_recorder_mode or moe.elastic_ep_backend
        return set(graphs.buffer_registry.slot_names()) <= GIVEN and not watched

    def stage(self, batch: ScheduleBatch, bonus: torch.Tensor, slots: torch.Tensor) -> None:
        """Give the graphs what they write into their inputs, for a step that upstream's path runs.

        Args:
            batch: a batch of bs requests.
            bonus: [bs] int64, each request's last token.
            slots: [bs, N] int64, the slots of each request's window.
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

    def begin(self, batch: ScheduleBatch, num_nodes: int) -> StepGraphs:
        """Begin a step of a batch that can_run(): give the graphs their inputs.

        Args:
            batch: a batch of bs requests.
            num_nodes: one of the widths.
        """
        self.bs, self.num_nodes = len(batch.seq_lens), num_nodes
        self._stage_deltas(batch)
        self._verifier = self._verifiers[num_nodes]
        inputs = {self.bonus.data_ptr(): (self.bonus, batch.spec_info.bonus_tokens, 0)}
        for graphs in (self.draft_runner.decode_cuda_graph_runner, self._verifier):
            graphs.raw_bs, graphs.bs = self.bs, graphs._pad_to_bucket(self.bs, graphs.capture_bs)
            # Upstream may give both runners the same buffers.
            seq_lens, rows = graphs.buffers.seq_lens, graphs.buffers.req_pool_indices
            inputs[seq_lens.data_ptr()] = seq_lens, batch.seq_lens, graphs.seq_len_fill_value
            # Padding: row 0 of the slot table, which belongs to no request.
            inputs[rows.data_ptr()] = rows, batch.req_pool_indices, 0
        torch._foreach_copy_(
            [buffer[: self.bs] for buffer, _, _ in inputs.values()],
            [source for _, source, _ in inputs.values()],
        )
        if self._verifier.bs > self.bs:
            for buffer, _, padding in inputs.values():
                buffer[self.bs : self._verifier.bs].fill_(padding)
        return self

    def draft(self) -> None:
        """Replay the draft graph, which builds the trees. A step of width 1 has no draft."""
        if self.num_nodes > 1:
            self._replay(self.draft_runner.decode_cuda_graph_runner)

    def drafted(self) -> DraftTrees:
        """Return the trees that the step verifies."""
        if self.num_nodes == 1:
            return lone_roots(self.bonus[: self.bs])
        trees = self.trees.first(self.bs)
        return trees if self.num_nodes == trees.tokens.shape[1] else first_nodes(trees, self.num_nodes)

    def verify(self) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Replay the verify graph.

        Returns:
            The output, with logits [bs * N, vocabulary], and the nodes' positions: [bs * N] int64.
        """
        output = self._replay(self._verifier)
        # From this mark in the graph on, upstream's scheduler may write to what the graphs read.
        self.target_runner.shared_read_done_event = self._verifier.in_graph_metadata_prep_done
        nodes = self.bs * self.num_nodes
        output = dataclasses.replace(
            output, next_token_logits=output.next_token_logits[:nodes], hidden_states=None
        )
        return output, self._verifier.buffers.positions[:nodes]

    def _replay(self, graphs: DecodeCudaGraphRunner) -> LogitsProcessorOutput:
        with graphs.backend.replay_session():
            return graphs.backend.replay(graphs._make_graph_key(graphs.bs), None)

    @property
    def target_out(self) -> torch.Tensor:
        """[bs * N] int64, where accept() finds the target's tokens."""
        return self.commits.target(self.bs, self.num_nodes).flatten()

    def accept(self, target: torch.Tensor) -> tuple[Accepted, torch.Tensor]:
        """Follow the drafted tokens that equal the target's, and commit that path.

        Args:
            target: target_out.

        Returns:
            What each request emits, and the new prefix lengths: [bs] int64.
        """
        return self.commits.replay(self.bs, self._verifier.bs, self.num_nodes)
