"""A decode step in forwards that upstream prepares and runs, with a graph or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path, ancestor_words
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.ddtree.tree_builder import first_nodes, lone_roots
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput
from sglang.srt.speculative.spec_utils import draft_tp_context

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.ddtree.worker import DDTreeWorker
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class ForwardStep:
    """Runs one decode step of any batch: draft(), verify(), accept(), in this order.

    Args:
        worker: the worker that drafts and verifies.
        batch: a batch of bs requests. Its seq_lens are the prefix lengths: the committed tokens of each request.
        num_nodes: N of this step, at most the worker's. With 1 there is no draft.
    """

    target_out: torch.Tensor | None = (
        None  # where accept() reads the target's tokens; None: it takes any tensor
    )
    can_run_cuda_graph: bool  # whether the verify ran as a graph, as upstream reports it

    def __init__(self, worker: DDTreeWorker, batch: ScheduleBatch, num_nodes: int) -> None:
        self.worker = worker
        self.batch = batch
        self.num_nodes = num_nodes
        self.draft_input: DFlashDraftInputV2 = batch.spec_info
        self.prefix_lens = batch.seq_lens
        self.bs = len(batch.seq_lens)
        # [bs, worker's N] int64: positions of the slots that a step may write, and those slots. Before the commit,
        # node j's KV is in slot j.
        self.window = self.prefix_lens[:, None] + worker.window_offsets
        table = worker.model_runner.req_to_token_pool.req_to_token
        self.slots = table[batch.req_pool_indices[:, None], self.window].to(torch.int64)
        # A single column of the windows is not contiguous.
        self._written = self.slots if num_nodes > 1 else self.slots[:, :1].contiguous()
        self.plan = worker.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=self.prefix_lens,
            seq_lens_cpu=self._host_bound(0),
            write_virtual=self._written.flatten(),
            read_extent=self._written.shape[1],
        )

    def _host_bound(self, width: int) -> torch.Tensor:
        """Return [bs] on the host: at least prefix + width of each request. Backends size buffers by it."""
        if self.batch.seq_lens_cpu is not None:
            return self.batch.seq_lens_cpu + width
        return self.draft_input.nxt_kv_lens_cpu

    def draft(self) -> None:
        """Run the drafter once over [bonus, mask, ...], and build trees from its candidates."""
        if self.num_nodes == 1:
            words = ancestor_words(self.worker.num_nodes)
            self.trees = lone_roots(self.draft_input.bonus_tokens, words)
            return
        worker, batch, bs, width = self.worker, self.batch, self.bs, self.worker.block_size
        ids = torch.full((bs, width), worker.mask_token_id, dtype=torch.int64, device=worker.device)
        ids[:, 0] = self.draft_input.bonus_tokens
        seq_lens_cpu = self._host_bound(width)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids.flatten(),
            positions=self.window[:, :width].flatten(),
            req_pool_indices=batch.req_pool_indices,
            out_cache_loc=None,  # bound below
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            spec_info=worker.draft_block_spec_info,
            spec_algorithm=worker.draft_model_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
            global_num_token_non_padded_cpu=bs * width,
            num_token_non_padded=(
                torch.full((), bs * width, dtype=torch.int32, device=worker.device)
                if enable_num_token_non_padded()
                else None
            ),
        )
        self.plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator, cols=slice(0, width))
        if worker.step_graphs is not None:
            worker.step_graphs.stage(batch, self.draft_input.bonus_tokens, self.slots)
        if bs <= worker.builder.max_bs:
            trees = worker.builder.trees.first(bs)  # where a verify graph reads them
        else:
            trees = DraftTrees.allocate(bs, worker.num_nodes, worker.device)
        with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
            output = worker.draft_model_runner.forward(forward_batch)
            if not (worker.builds_in_graph and output.can_run_graph):
                worker.builder.build(output.logits_output.hidden_states, ids.flatten(), trees)
        self.wide_trees = trees
        self.trees = trees if self.num_nodes == worker.num_nodes else first_nodes(trees, self.num_nodes)

    def drafted(self) -> DraftTrees:
        """Return the trees that the step verifies."""
        return self.trees

    def verify(self) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Run the target over all nodes of the trees.

        Returns:
            The output, with logits [bs * N, vocabulary], and the nodes' positions: [bs * N] int64.
        """
        worker, batch, num_nodes = self.worker, self.batch, self.num_nodes
        positions = (self.prefix_lens[:, None] + self.trees.depths).flatten()
        verify_input = DDTreeVerifyInput(
            draft_token=self.trees.tokens.flatten(),
            positions=positions,
            draft_token_num=num_nodes,
            ancestors=self.trees.ancestors.flatten(0, 1),
            retrieve_next_token=self.trees.first_child,
            retrieve_next_sibling=self.trees.next_sibling,
            kv_loc_plan=self.plan,
            kv_loc_cols=None if num_nodes == self._written.shape[1] else slice(0, num_nodes),
        )
        batch.out_cache_loc = self._written[:, :num_nodes].flatten()
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = self._host_bound(num_nodes)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        # Deferred: otherwise the graph runner would copy its inputs now and again in the forward.
        forward_batch, _ = verify_input.prepare_for_verify(
            batch, worker.target_worker, defer_metadata_init=True
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        if worker.recurrent is not None:
            worker.recurrent.stage_tracking(batch)
        result = worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        self.can_run_cuda_graph = result.can_run_cuda_graph
        # The host reads no hidden states.
        self.hidden, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        return result.logits_output, positions

    def accept(self, target: torch.Tensor) -> tuple[Accepted, torch.Tensor]:
        """Follow the drafted tokens that equal the target's, and commit that path.

        Args:
            target: [bs * N] int64, the target's token at each node.

        Returns:
            What each request emits, and the new prefix lengths: [bs] int64.
        """
        worker = self.worker
        accepted = Accepted.allocate(self.bs, worker.block_size, worker.device)
        accept_path(self.trees, target.view(self.bs, self.num_nodes), accepted)
        if worker.expectation is not None and self.num_nodes > 1:
            rows = self.batch.req_pool_indices
            worker.expectation.count(self.wide_trees, accepted, rows, self.num_nodes)
        width = worker.block_size
        slots = self.slots[:, : self.num_nodes].contiguous()
        worker.commit(self.hidden, accepted, self.window[:, :width], slots, self.slots[:, :width])
        return accepted, self.prefix_lens + accepted.lengths
