"""DDTREE's worker: DFLASH's drafter and prefill, with a tree instead of a chain between draft and commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, KVBuffers, accept_path, commit_path
from sglang.srt.layers.attention.ddtree_backend import (
    difference_table,
    with_per_request_graph_buffers,
    with_tree_verify,
)
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel, get_serving, get_spec
from sglang.srt.speculative.ddtree.coverage import kv_shapes, widest_window
from sglang.srt.speculative.ddtree.kv_pool import kv_buffers
from sglang.srt.speculative.ddtree.metrics import DDTreeMetrics, DifferenceReader
from sglang.srt.speculative.ddtree.penalties import OutputPenalties
from sglang.srt.speculative.ddtree.recurrent_state import RecurrentStates, recurrent_gaps
from sglang.srt.speculative.ddtree.sampling import constrain, target_tokens
from sglang.srt.speculative.ddtree.tree_builder import TreeBuilder
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A decode step's batch, and where it may write.

    Attributes:
        batch: of the step.
        draft_input: what the previous step left for this one.
        prefix_lens: [bs] int64, committed tokens of each request. The previous step wrote it, maybe on
            another stream.
        window: [bs, N] int64, positions of the slots that this step may write.
        slots: [bs, N] int64, those slots. Before the commit, node j's KV is in slot j.
        plan: upstream's translation of the slots.
    """

    batch: ScheduleBatch
    draft_input: DFlashDraftInputV2
    prefix_lens: torch.Tensor
    window: torch.Tensor
    slots: torch.Tensor
    plan: KVLocPlan

    def host_bound(self, width: int) -> torch.Tensor:
        """Returns [bs] on the host: at least prefix + width of each request. Backends size buffers by it."""
        if self.batch.seq_lens_cpu is not None:
            return self.batch.seq_lens_cpu + width
        return self.draft_input.nxt_kv_lens_cpu


class DDTreeWorker(DFlashWorkerV2):
    """Drafts F positions in one pass, verifies a tree of N nodes in one forward, and commits one path of it.

    Prefill, the draft model's loading and its KV are DFLASH's (the base class, of SGLang 0.5.23). A decode
    step, _decode(), does this:

        draft    one pass of the drafter, whose candidates become trees
        verify   one forward of the target over all nodes
        accept   the target's token at each node, and the path along which the drafted tokens equal them
        commit   the path's KV moves to the front of the window, and its hidden states go to the drafter

    Between draft and commit only grammars wait for the device, because their masks are built on the host.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        spec = get_spec()
        self.num_nodes = spec.speculative_num_draft_tokens
        self.num_candidates = spec.speculative_eagle_topk
        # The base class reads the width of a draft pass from this field. For others it is a verify's width.
        with spec.override(speculative_num_draft_tokens=spec.speculative_dflash_block_size):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._refuse_models()
        self.recurrent = RecurrentStates.of(self.model_runner, self.num_nodes)
        if self.model_runner.sliding_window_size is None:
            # The attention backends read it next. Some models (Laguna, MiMo-V2) do not set it: upstream takes
            # it from the KV pool of the layers with a window, which DDTREE does not make
            # (force_single_kv_pool()).
            self.model_runner.sliding_window_size = widest_window(self.model_runner.model)
        self.speculative_num_draft_tokens = self.num_nodes
        self._kv: KVBuffers | None = None
        self._on_cpu = torch.device(self.device).type == "cpu"
        self._window_offsets = torch.arange(self.num_nodes, device=self.device)
        # With a method of this name, the drafter embeds its ids itself, inside the captured graph. Passing
        # embeddings costs a copy, and upstream's eager runner casts them to bfloat16 whatever the model's
        # dtype is.
        self.draft_model.forward_embed = self._embed_block
        if self._on_cpu:
            for layer in self.draft_model.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel

    def _refuse_models(self) -> None:
        """Raises ValueError for a target or a drafter that DDTREE cannot serve."""
        if gaps := "; ".join(recurrent_gaps(self.model_runner, self.num_nodes)):
            raise ValueError(
                f"DDTREE: target model: expected recurrent layers that the tree ops cover, got {gaps}: serve it "
                "without DDTREE."
            )
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError(
                "DDTREE: drafter: expected a plain DFlash head, whose distribution at a position does not "
                "depend on the path, got a selector, LiLiCorr or Domino head: --speculative-algorithm DFLASH "
                "runs it."
            )
        shapes = kv_shapes(self.model_runner.model)
        if len(shapes) > 1 and not self.model_runner.use_mla_backend:
            raise ValueError(
                "DDTREE: target model: expected the same KV shape in every layer (accepted KV is moved by "
                f"slot), got (h_kv, d_qk, d_v) = {shapes}: serve it without DDTREE."
            )

    def _embed_block(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds the draft block: with the drafter's own embedding if it has one, else with the target's."""
        embed = self.draft_model.get_input_embeddings() or self.model_runner.model.get_input_embeddings()
        return unwrap_lora_layer(embed)(ids) * self._noise_embed_scale

    # ---- what replaces the base class's setup ----

    def _defer_target_verify_gather(self) -> None:
        return None  # the logits of every node are needed: for sampling, grammar and logprobs

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Accepts every batch: DDTREE applies each sampling option at each node."""

    def prewarm_sampling(self) -> Any:
        # DFLASH's rehearsal would make the KV pool leave room to sample a whole batch. See target_tokens().
        return self.model_runner.prewarm_sampling()

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None = None,
    ) -> None:
        self._widen(req_to_token_pool)
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)

    def _widen(self, pool: ReqToTokenPool) -> None:
        """Makes a request's row of the slot table as wide as what the scheduler writes into it.

        The scheduler reserves 2N slots beyond the committed ones, in whole pages, also at the end of the
        context. At page size 1, upstream 0.5.23 has room for N + 4. On CUDA the rest would overwrite the next
        request's row.
        """
        table = pool.req_to_token
        width = self.model_runner.model_config.context_len + 2 * self.num_nodes + self.page_size
        if width > table.shape[1]:
            pool.req_to_token = table.new_zeros(table.shape[0], width)
            self.model_runner.init_kv_index_translator()  # it holds the table

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        kv_buffers(self.model_runner.token_to_kv_pool)  # refuses other pools now, not at the first step
        self.draft_model_runner.attn_backend = with_per_request_graph_buffers(
            self.draft_model_runner.attn_backend, self.draft_model_runner
        )
        self.model_runner.attn_backend = with_tree_verify(
            self.model_runner.attn_backend,
            self.model_runner,
            mode=get_spec().speculative_ddtree_verify,
            num_nodes=self.num_nodes,
            recurrent=self.recurrent,
        )
        if self.recurrent is not None:
            self.recurrent.log_memory()
        self.builder = self._make_builder()
        self.penalties = OutputPenalties(
            max_requests=self.model_runner.req_to_token_pool.req_to_token.shape[0],
            vocab_size=self.model_runner.model_config.vocab_size,
            device=self.device,
        )
        self.metrics = DDTreeMetrics(
            num_nodes=self.num_nodes,
            block_size=self.block_size,
            labels={"model_name": get_serving().served_model_name},
            enabled=get_observability().enable_metrics and get_parallel().tp_rank == 0,
        )
        table = difference_table(self.model_runner.attn_backend)
        self.difference = None if table is None else DifferenceReader(table)

    def _make_builder(self) -> TreeBuilder:
        lm_head = unwrap_lora_layer(getattr(self.model_runner.model, "lm_head", None))
        if lm_head is None:
            raise ValueError(
                "DDTREE: target model: expected an lm_head that the drafter can share, got none: serve it "
                "without DDTREE."
            )
        return TreeBuilder(
            lm_head=lm_head,
            block_size=self.block_size,
            num_nodes=self.num_nodes,
            num_candidates=self.num_candidates,
            keep_top1_path=get_spec().speculative_ddtree_top1_path == "keep",
            max_bs=0 if self._on_cpu else max(get_exec().graph.cuda_graph_config.decode.bs or [0]),
            device=self.device,
        )

    def _maybe_build_draft_sampler(self) -> TreeBuilder:
        return self.builder

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self.metrics.count(num_correct_drafts_per_req)

    # ---- one step ----

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        is_decode = not (
            batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle()
        )
        if is_decode:
            return self._decode(batch, on_publish, grammar_barrier)
        penalized = self.penalties.begin(batch)
        result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        if penalized is not None:
            self.penalties.count(batch.req_pool_indices, result.next_token_ids[:, None].long())
        return result

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
    ) -> GenerationBatchResult:
        step = self._begin(batch)
        trees = self._draft(step)
        grammar_tree = None
        if batch.has_grammar:  # the copy to the host overlaps the verify forward
            grammar_tree = GrammarTree.from_device(
                trees.first_child.long(), trees.next_sibling.long(), trees.tokens
            )
        positions = (step.prefix_lens[:, None] + trees.depths).flatten()
        output = self._verify(step, trees, positions)
        logits_output = output.logits_output
        target, accepted = self._accept(
            step, trees, positions, logits_output.next_token_logits, grammar_tree, grammar_barrier
        )
        new_seq_lens = step.prefix_lens + accepted.lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            roots = torch.arange(0, target.numel(), self.num_nodes, device=self.device)
            compute_spec_logprobs(batch, logits_output, target, accept_index=accepted.path + roots[:, None])
        self._commit(step, logits_output.hidden_states, accepted)
        logits_output.hidden_states = None  # nothing on the host reads them
        self._report_difference(batch)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.num_nodes,
            speculative_output_stride=self.block_size,
            new_seq_lens=new_seq_lens,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    def _begin(self, batch: ScheduleBatch) -> Step:
        """Finds the slots that a decode step may write."""
        draft_input: DFlashDraftInputV2 = batch.spec_info
        prefix_lens = batch.seq_lens
        if not self._on_cpu:
            # The previous step may have made it on another stream.
            prefix_lens.record_stream(torch.get_device_module(self.device).current_stream())
        window = prefix_lens[:, None] + self._window_offsets
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices[:, None], window].to(torch.int64)
        host_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            write_virtual=slots.flatten(),
            read_extent=self.num_nodes,
        )
        return Step(batch, draft_input, prefix_lens, window, slots, plan)

    def _draft(self, step: Step) -> DraftTrees:
        """Runs the drafter once over [bonus, mask, ...], and builds trees from its candidates."""
        batch, bs, width = step.batch, len(step.prefix_lens), self.block_size
        ids = torch.full((bs, width), self._mask_token_id, dtype=torch.int64, device=self.device)
        ids[:, 0] = step.draft_input.bonus_tokens
        seq_lens_cpu = step.host_bound(width)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids.flatten(),
            positions=step.window[:, :width].flatten(),
            req_pool_indices=batch.req_pool_indices,
            out_cache_loc=None,  # bound below
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            spec_info=self._draft_block_spec_info,
            spec_algorithm=self.draft_model_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
            global_num_token_non_padded_cpu=bs * width,
            num_token_non_padded=(
                torch.full((), bs * width, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
        )
        step.plan.bind(forward_batch, self.draft_model_runner.kv_index_translator, cols=slice(0, width))
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            output = self.draft_model_runner.forward(forward_batch)
            if self._draft_sampler is not None and output.can_run_graph:
                return self.builder.trees.first(bs)  # the graph has built them
            trees = DraftTrees.allocate(bs, self.num_nodes, self.device)
            self.builder.build(output.logits_output.hidden_states, ids.flatten(), trees)
            return trees

    def _verify(self, step: Step, trees: DraftTrees, positions: torch.Tensor) -> GenerationBatchResult:
        """Runs the target over all nodes of all trees.

        Args:
            step: of the batch.
            trees: of bs requests.
            positions: [bs * N] int64, of the nodes.

        Returns:
            Logits [bs * N, vocabulary] and hidden states [bs * N, hidden]; a padded graph gives more rows.
        """
        batch, num_nodes = step.batch, self.num_nodes
        verify_input = DDTreeVerifyInput(
            draft_token=trees.tokens.flatten(),
            positions=positions,
            draft_token_num=num_nodes,
            ancestors=trees.ancestors.flatten(0, 1),
            kv_loc_plan=step.plan,
        )
        batch.out_cache_loc = step.slots.flatten()
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = step.host_bound(num_nodes)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _accept(
        self,
        step: Step,
        trees: DraftTrees,
        positions: torch.Tensor,
        logits: torch.Tensor,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Any,
    ) -> tuple[torch.Tensor, Accepted]:
        """Picks the target's token at each node, and follows the drafted tokens that equal it.

        Args:
            step, trees, positions: as in _verify().
            logits: [bs * N, vocabulary] of the target. Penalties and masks are applied in place.
            grammar_tree, grammar_barrier: as in _grammar_mask().

        Returns:
            The target's tokens, [bs * N] int64, and what each request emits.
        """
        batch, info, pool_rows = step.batch, step.batch.sampling_info, step.batch.req_pool_indices
        grammar_mask = self._grammar_mask(batch, grammar_tree, grammar_barrier)
        penalized = self.penalties.options(batch.reqs)
        if penalized is not None:
            self.penalties.apply(logits, penalized, info, pool_rows, trees, positions)
        constrain(logits, info, grammar_mask, self.num_nodes)
        target = target_tokens(
            logits,
            info,
            self.model_runner.sampler,
            positions,
            sampled=[i for i, req in enumerate(batch.reqs) if req.sampling_params.top_k != 1],
            keep_logits=batch.return_logprob,
        )
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target)
        bs = len(step.prefix_lens)
        accepted = Accepted.allocate(bs, self.block_size, self.device)
        accept_path(trees, target.view(bs, self.num_nodes), accepted)
        if penalized is not None:
            self.penalties.count(pool_rows, accepted.tokens, accepted.lengths)
        return target, accepted

    def _grammar_mask(
        self, batch: ScheduleBatch, tree: GrammarTree | None, barrier: Any
    ) -> GrammarMask | None:
        """Builds the mask of the tokens that grammars allow at each node. It waits for the trees' copy.

        Args:
            batch: of the step.
            tree: the trees on the host, or None if no request has a grammar.
            barrier: upstream's. Grammars wait for it until the previous step's tokens are accepted.

        Returns:
            The mask, or None without a tree.
        """
        if tree is None:
            return None
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=self.device,
            barrier=barrier,
        )

    def _commit(self, step: Step, hidden: torch.Tensor, accepted: Accepted) -> None:
        """Moves the accepted KV to the front of the window, and gives the drafter the path's hidden states.

        The target's recurrent layers, if any, move on to the end of the path.

        Args:
            step: of the batch.
            hidden: [bs * N or more, hidden] of the target.
            accepted: of bs requests.
        """
        bs, width = accepted.path.shape
        if self._kv is None:  # not earlier: graph capture may resize the pool
            self._kv = kv_buffers(self.model_runner.token_to_kv_pool)
        path_hidden = hidden.new_empty(bs, width, hidden.shape[-1])
        commit_path(
            accepted.path, accepted.lengths, step.slots, self._kv, hidden[: step.slots.numel()], path_hidden
        )
        if self.recurrent is not None:
            self.recurrent.commit(step.batch, step.prefix_lens, accepted)
        cache_loc = self._draft_write_ids(step.plan).view(bs, -1)[:, :width].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path_hidden.flatten(0, 1),
            cache_loc=cache_loc.flatten(),
            cache_loc_2d=cache_loc,
            positions=step.window[:, :width].flatten(),
            commit_lens=accepted.lengths,
        )

    def _report_difference(self, batch: ScheduleBatch) -> None:
        """Reports what a validating verify has found, now and then."""
        if self.difference is None:
            return
        found = self.difference.step({request.kv.req_pool_idx: request.rid for request in batch.reqs})
        if found is not None:
            self.metrics.show_difference(found)
