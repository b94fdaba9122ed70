"""DDTREE's worker: DFLASH's drafter and prefill, with a tree instead of a chain between draft and commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel.ddtree import Accepted
from sglang.srt import runtime_context
from sglang.srt.layers.attention.ddtree_wrap import (
    difference_table,
    with_block_attention,
    with_tree_verify,
)
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.models.dflash_speculators import SpeculatorsMixin
from sglang.srt.speculative.ddtree.budget import Budget, StepCosts, widths_up_to
from sglang.srt.speculative.ddtree.coverage import verify_layers, widest_window
from sglang.srt.speculative.ddtree.disaggregation import take_arrived
from sglang.srt.speculative.ddtree.expectation import Expectation
from sglang.srt.speculative.ddtree.forward_step import ForwardStep
from sglang.srt.speculative.ddtree.heads import HeadParts, make_head
from sglang.srt.speculative.ddtree.kv_pool import KVGroup, commit_kv, describe_pools, kv_groups, refuse_layers
from sglang.srt.speculative.ddtree.logit_processors import LogitProcessors, NodeStates, process
from sglang.srt.speculative.ddtree.metrics import DDTreeMetrics, DifferenceReader, PhaseTimer
from sglang.srt.speculative.ddtree.penalties import Options, OutputPenalties
from sglang.srt.speculative.ddtree.recurrent_state import RecurrentStates, recurrent_gaps
from sglang.srt.speculative.ddtree.sampling import constrain, nodes_per_call, target_tokens
from sglang.srt.speculative.ddtree.seeds import follow_seeds, seeded
from sglang.srt.speculative.ddtree.server_args import AUTO_BUDGET
from sglang.srt.speculative.ddtree.sessions import repair_sessions
from sglang.srt.speculative.ddtree.step_costs import step_costs
from sglang.srt.speculative.ddtree.step_graphs import StepGraphs
from sglang.srt.speculative.ddtree.target import input_embedding, offer_capture
from sglang.srt.speculative.ddtree.trace import Trace
from sglang.srt.speculative.ddtree.tree_builder import TreeBuilder
from sglang.srt.speculative.ddtree.weights import refuse_updates
from sglang.srt.speculative.ddtree.width_control import WidthControl
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (1, 16, 17)  # Triton compiles separately for 1, for multiples of 16, and for the rest


class DDTreeWorker(DFlashWorkerV2):
    """Drafts F positions in one pass, verifies a tree of N nodes in one forward, and commits one path of it.

    Prefill, the draft model's loading and its KV are DFLASH's (the base class, of SGLang 0.5.23). A decode
    step, _decode(), does this:

        draft    one pass of the drafter, whose candidates become trees
        verify   one forward of the target over all nodes
        accept   the target's token at each node, and the path along which the drafted tokens equal them
        commit   the path's KV moves to the front of the window, and its hidden states go to the drafter

    Between draft and commit only two things wait for the device, because they run on the host: grammars, and custom
    logit processors that read their request.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        spec = runtime_context.get_spec()
        self.num_nodes = spec.speculative_num_draft_tokens
        self.num_candidates = spec.speculative_eagle_topk
        self.widths: tuple[int, ...] = (self.num_nodes,)
        if spec.speculative_ddtree_budget == AUTO_BUDGET:
            self.widths = widths_up_to(self.num_nodes, spec.speculative_dflash_block_size)
        self.control: WidthControl | None = None
        self.trace: Trace | None = None
        self.draft_window = spec.speculative_draft_window_size
        # The base class reads the width of a draft pass from the first field. For others it is a verify's width. With the
        # second, it would give the drafter a slot table of its own, and copy the window there in every step.
        with spec.override(
            speculative_num_draft_tokens=spec.speculative_dflash_block_size,
            speculative_draft_window_size=None,
        ):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._refuse_models()
        refuse_updates(self.draft_model)
        follow_seeds(self.model_runner.sampler)
        repair_sessions()
        offer_capture(self.model_runner.model)
        self.recurrent = RecurrentStates.of(self.model_runner, self.num_nodes)
        if self.model_runner.sliding_window_size is None:
            # The attention backends read it next. Some models (Laguna, MiMo-V2) do not set it, and upstream then
            # knows it only if the layers with a window get a KV pool of their own.
            self.model_runner.sliding_window_size = widest_window(self.model_runner.model)
        self.speculative_num_draft_tokens = self.num_nodes
        self._kv: list[KVGroup] | None = None
        self._on_cpu = torch.device(self.device).type == "cpu"
        self.window_offsets = torch.arange(self.num_nodes, device=self.device)
        # With a method of this name, the drafter embeds its ids itself, inside the captured graph. Passing
        # embeddings costs a copy, and upstream's eager runner casts them to bfloat16 whatever the model's
        # dtype is.
        self.draft_model.forward_embed = self._embed_block
        if self._on_cpu:
            for layer in self.draft_model.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel

    def _refuse_models(self) -> None:
        """Raise ValueError for a target or a drafter that DDTREE cannot serve."""
        if gaps := "; ".join(recurrent_gaps(self.model_runner, self.num_nodes)):
            raise ValueError(
                f"DDTREE: target model: expected recurrent layers that the tree ops cover, got {gaps}: serve it "
                "without DDTREE."
            )

    @property
    def _is_domino(self) -> bool:
        """False: the base class never drafts a chain with Domino, for which it would need CUDA and bfloat16."""
        return False

    @_is_domino.setter
    def _is_domino(self, value: bool) -> None:
        """Ignore what the base class finds in the drafter's configuration: head_class() decides."""

    def _embed_block(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed the draft block: with the drafter's own embedding if it has one, else with the target's."""
        embed = self.draft_model.get_input_embeddings() or input_embedding(self.model_runner.model)
        embed = unwrap_lora_layer(embed)
        if isinstance(
            self.draft_model, SpeculatorsMixin
        ):  # trained on the embedding's weights, without a scale
            return embed(ids) / getattr(embed, "embed_scale", 1.0)
        return embed(ids) * self._noise_embed_scale

    # ---- what replaces the base class's setup ----

    def _defer_target_verify_gather(self) -> None:
        return None  # the logits of every node are needed: for sampling, grammar and logprobs

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Accept every batch: DDTREE applies each sampling option at each node."""

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
        """Make a request's row of the slot table as wide as what the scheduler writes into it.

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
        self._refuse_or_describe_pools()
        self.expectation = self._make_expectation()
        self.builder = self._make_builder()
        self._draft_sampler = self.builder  # upstream gives it the anchors, without graphs as well
        self._wrap_backends()
        self.step_graphs = None if self._on_cpu else self._make_step_graphs()
        self.processors = LogitProcessors()
        self.penalties = OutputPenalties(
            max_requests=self._max_rows,
            vocab_size=self.model_runner.model_config.vocab_size,
            device=self.device,
        )
        self.metrics = DDTreeMetrics(
            num_nodes=self.num_nodes,
            block_size=self.block_size,
            labels={"model_name": runtime_context.get_serving().served_model_name},
            enabled=runtime_context.get_observability().enable_metrics
            and runtime_context.get_parallel().tp_rank == 0,
        )
        self.phases = PhaseTimer(not self._on_cpu)
        table = difference_table(self.model_runner.attn_backend)
        self.difference = None if table is None else DifferenceReader(table)

    @property
    def _max_rows(self) -> int:
        """Rows of the slot table: one per request, and the padding's."""
        return self.model_runner.req_to_token_pool.req_to_token.shape[0]

    def _make_expectation(self) -> Expectation | None:
        """Return what predicts the tokens of a step; None if neither a budget nor a trace asks for it."""
        if len(self.widths) == 1 and runtime_context.get_spec().speculative_ddtree_trace is None:
            return None
        return Expectation(
            widths=self.widths,
            max_requests=self._max_rows,
            block_size=self.block_size,
            num_candidates=self.num_candidates,
            device=self.device,
        )

    def _wrap_backends(self) -> None:
        """Let target and drafter attend by trees."""
        self.model_runner.attn_backend = with_tree_verify(
            self.model_runner.attn_backend,
            self.model_runner,
            mode=runtime_context.get_spec().speculative_ddtree_verify,
            num_nodes=self.num_nodes,
            recurrent=self.recurrent,
            graph_ancestors=self.builder.trees.ancestors,
        )
        if self.recurrent is not None:
            self.recurrent.log_memory()
        self.draft_model_runner.attn_backend = with_block_attention(
            self.draft_model_runner.attn_backend,
            self.draft_model_runner,
            block_size=self.block_size,
            draft_window=self.draft_window,
        )

    def _make_step_graphs(self) -> StepGraphs:
        return StepGraphs(
            draft_runner=self.draft_model_runner,
            target_runner=self.model_runner,
            trees=self.builder.trees,
            mask_token_id=self.mask_token_id,
            block_size=self.block_size,
            commit=self.commit,
            widths=self.widths,
            expectation=self.expectation,
        )

    def _refuse_or_describe_pools(self) -> None:
        """Refuse KV pools that DDTREE cannot serve, now and not at the first step. Log what window pools gain."""
        pool = self.model_runner.token_to_kv_pool
        groups = kv_groups(pool)
        refuse_layers(pool, verify_layers(self.model_runner.model))
        description = describe_pools(
            groups, sum(self.draft_model_runner.token_to_kv_pool.get_kv_size_bytes())
        )
        if description is not None:
            logger.info("DDTREE: %s", description)

    def _make_builder(self) -> TreeBuilder:
        lm_head = unwrap_lora_layer(getattr(self.model_runner.model, "lm_head", None))
        if lm_head is None:
            raise ValueError(
                "DDTREE: target model: expected an lm_head that the drafter can share, got none: serve it "
                "without DDTREE."
            )
        parts = HeadParts(
            drafter=self.draft_model,
            lm_head=lm_head,
            embed=unwrap_lora_layer(input_embedding(self.model_runner.model)),
            num_candidates=self.num_candidates,
            max_requests=self._max_rows,
        )
        return TreeBuilder(
            head=make_head(self.draft_model.config, parts),
            block_size=self.block_size,
            num_nodes=self.num_nodes,
            keep_top1_path=runtime_context.get_spec().speculative_ddtree_top1_path == "keep",
            max_bs=0
            if self._on_cpu
            else max(runtime_context.get_exec().graph.cuda_graph_config.decode.bs or [0]),
            device=self.device,
            expectation=self.expectation,
        )

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        if not self._on_cpu:
            self._capture()
        if self.expectation is None:
            return
        costs = self._step_costs() if len(self.widths) > 1 else None
        path = runtime_context.get_spec().speculative_ddtree_trace
        if path is not None and runtime_context.get_parallel().tp_rank == 0:
            self.trace = Trace(path, self.block_size, self.expectation, costs)
        if costs is not None:
            # Under tensor parallelism each rank would find other times and choose other widths.
            self.control = WidthControl(
                Budget(costs),
                self.expectation,
                refines_costs=runtime_context.get_parallel().tp_size == 1,
                overlaps=not runtime_context.get_schedule().disable_overlap_schedule,
                trace=self.trace,
            )

    def _step_costs(self) -> StepCosts | None:
        """Return what steps cost; None if the server has graphs but they cannot run steps of several widths."""
        graphs = self.step_graphs
        if graphs is not None and graphs.widths:
            return step_costs(graphs)
        if isinstance(self.model_runner.decode_cuda_graph_runner, DecodeCudaGraphRunner):
            logger.warning(
                "DDTREE: --speculative-ddtree-budget auto has no effect: every step verifies %d nodes, because the graphs of "
                "this server cannot compute all of their inputs themselves.",
                self.num_nodes,
            )
            return None
        requests = self.model_runner.max_running_requests
        return StepCosts(self.widths, [1 << i for i in range((requests - 1).bit_length() + 1)])

    def _capture(self) -> None:
        """Capture the graphs that upstream does not, and keep what they write to."""
        self._warm_up()
        assert self.step_graphs is not None
        self.step_graphs.capture()
        if self._fused_kv_helper is not None:
            # The graphs write to its buffers, which it replaces when a prefill needs larger ones.
            self._captured_buffers = [
                value for value in vars(self._fused_kv_helper).values() if isinstance(value, torch.Tensor)
            ]

    def _warm_up(self) -> None:
        """Compile the Triton kernels that are in no graph and that a plain server does not run.

        Otherwise a request would wait for the compiler. The request that a server sends itself before it is ready
        compiles upstream's kernels of a prefill.
        """
        self._warm_up_draft_kv()
        self._warm_up_reservations()

    def _warm_up_reservations(self) -> None:
        """Run upstream's kernel that reserves slots, on batches of dummy requests that need none.

        Triton compiles it separately for each power of two of the batch size, and for slots that do not start at a
        multiple of 16 bytes. Real ones may not, because they are a part of the list of free slots.
        """
        table = self.model_runner.req_to_token_pool.req_to_token
        for bits in range((self.model_runner.max_running_requests - 1).bit_length() + 1):
            rows = torch.zeros(1 << bits, dtype=torch.int64, device=self.device)
            lens = torch.zeros(1 << bits, dtype=torch.int32, device=self.device)
            for slots in (rows.new_zeros(2), rows.new_zeros(2)[1:]):
                assign_req_to_token_pool_func(rows, table, lens, lens, slots, len(rows))

    def _warm_up_draft_kv(self) -> None:
        """Write the drafter's KV of dummy prefills to the padding's slot."""
        fc = self.draft_model.fc
        width = fc.input_size if hasattr(fc, "input_size") else fc.in_features
        for tokens in WARM_UP_TOKENS:
            zeros = torch.zeros(tokens, dtype=torch.int64, device=self.device)
            hidden = torch.zeros(tokens, width, dtype=self.model_runner.dtype, device=self.device)
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=hidden, cache_loc=zeros, positions=zeros
            )

    # ---- what a ForwardStep asks for ----

    @property
    def mask_token_id(self) -> int:
        """The token at all positions of a draft block but the first."""
        return self._mask_token_id

    @property
    def draft_block_spec_info(self) -> Any:
        """Upstream's description of a draft block, for a forward of it."""
        return self._draft_block_spec_info

    @property
    def builds_in_graph(self) -> bool:
        """Whether the drafter's graphs build the trees."""
        return not self._on_cpu

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
        self.builder.head.begin(batch.req_pool_indices)
        is_decode = not (
            batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle()
        )
        if is_decode:
            if arrived := take_arrived(batch.reqs):
                self._resume(batch, arrived)
            with seeded(batch):
                return self._decode(batch, on_publish, grammar_barrier)
        if self.control is not None:
            self.control.interrupt()
        if grammar_barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # Upstream masks the logits of an extend by the grammars as they are. Those of running requests lag behind
            # until the last step's tokens are accepted.
            grammar_barrier()
        penalized = self.penalties.begin(batch)
        self.processors.prefill(batch)
        with seeded(batch):
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        if penalized is not None:
            self.penalties.count(batch.req_pool_indices, result.next_token_ids[:, None].long())
        self.processors.remember(batch, result.next_token_ids)
        return result

    def _resume(self, batch: ScheduleBatch, arrived: list[tuple[int, Req]]) -> None:
        """Set what a prefill would have set for the requests of a batch that have had none on this server."""
        self.penalties.resume(batch, arrived)
        rows = [request.kv.req_pool_idx for _, request in arrived]
        self.builder.head.forget(async_h2d(rows, dtype=torch.int64, device=self.device))

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
    ) -> GenerationBatchResult:
        if not self._on_cpu:
            # The previous step may have made it on another stream.
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        num_nodes = self._choose_width(batch)
        self._count_step(num_nodes)
        step = self._begin(batch, num_nodes)
        step.draft()
        self.phases.mark()
        states = self.processors.states(batch, step.drafted)
        grammar_tree = None
        if batch.has_grammar:  # the copy to the host overlaps the verify forward
            trees = step.drafted()
            grammar_tree = GrammarTree.from_device(
                trees.first_child.long(), trees.next_sibling.long(), trees.tokens
            )
        output, positions = step.verify()
        self.phases.mark()
        grammar_mask = self._grammar_mask(batch, grammar_tree, grammar_barrier)
        penalized = self.penalties.options(batch.reqs)
        target = self._sample(
            batch, step, output.next_token_logits, positions, grammar_mask, penalized, states
        )
        self.phases.mark()
        accepted, new_seq_lens = step.accept(target)
        self.phases.mark()
        if on_publish is not None:
            on_publish(new_seq_lens)
        if self.control is not None:
            self.control.finish()
        if self.trace is not None:
            self.trace.step(step.drafted(), accepted, [req.rid for req in batch.reqs])
        if penalized is not None:
            self.penalties.count(batch.req_pool_indices, accepted.tokens, accepted.lengths)
        self.processors.remember(batch, accepted.tokens, accepted.lengths)
        if batch.return_logprob:
            roots = torch.arange(0, target.numel(), num_nodes, device=self.device)
            compute_spec_logprobs(batch, output, target, accept_index=accepted.path + roots[:, None])
        self._report_difference(batch)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=step.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.num_nodes,
            speculative_output_stride=self.block_size,
            new_seq_lens=new_seq_lens,
        )

    def _sample(
        self,
        batch: ScheduleBatch,
        step: StepGraphs | ForwardStep,
        logits: torch.Tensor,
        positions: torch.Tensor,
        grammar_mask: GrammarMask | None,
        penalized: Options | None,
        states: NodeStates | None,
    ) -> torch.Tensor:
        """Pick the target's token at each node.

        Args:
            batch: a batch of bs requests.
            step: the step of the batch, after its verify.
            logits: [bs * N, vocabulary], changed in place.
            positions: [bs * N] int64, the positions of the nodes.
            grammar_mask: the tokens that grammars allow; None allows all.
            penalized: the penalties that the requests ask for, or None.
            states: what custom logit processors see; None if no request has one.

        Returns:
            [bs * N] int64.
        """
        info = batch.sampling_info
        if penalized is not None:
            self.penalties.apply(logits, penalized, info, batch.req_pool_indices, step.drafted(), positions)
        constrain(logits, info, grammar_mask, step.num_nodes)
        if states is not None:
            process(logits, batch, states)
        target = target_tokens(
            logits,
            info,
            self.model_runner.sampler,
            positions,
            sampled=[i for i, req in enumerate(batch.reqs) if req.sampling_params.top_k != 1],
            keep_logits=batch.return_logprob,
            out=step.target_out,
        )
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target)
        return target

    def _choose_width(self, batch: ScheduleBatch) -> int:
        """Return N of the step."""
        if self.control is None:
            return self.num_nodes
        lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        of_call = 0
        if any(req.sampling_params.top_k != 1 for req in batch.reqs):
            vocabulary = self.model_runner.model_config.vocab_size
            of_call = nodes_per_call(batch.sampling_info, vocabulary, batch.return_logprob)
        return self.control.choose(self.control.load(lens, of_call))

    def _count_step(self, num_nodes: int) -> None:
        """Count a step that begins, and report what was timed of an earlier one."""
        if self.metrics.enabled:
            self.metrics.count_step(
                num_nodes, None if self.control is None else self.control.budget.calibration_error
            )
            if (seconds := self.phases.begin()) is not None:
                self.metrics.time_phases(seconds)

    def _begin(self, batch: ScheduleBatch, num_nodes: int) -> StepGraphs | ForwardStep:
        """Return what can run a step of this batch with this N."""
        if self.step_graphs is not None and self.step_graphs.can_run(len(batch.seq_lens)):
            if self.recurrent is not None:
                self.recurrent.prepare_tracking(batch)
            return self.step_graphs.begin(batch, num_nodes)
        return ForwardStep(self, batch, num_nodes)

    def _grammar_mask(
        self, batch: ScheduleBatch, tree: GrammarTree | None, barrier: Any
    ) -> GrammarMask | None:
        """Build the mask of the tokens that grammars allow at each node. It waits for the trees' copy.

        Args:
            batch: the batch of the step.
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

    def commit(
        self,
        hidden: torch.Tensor,
        accepted: Accepted,
        positions: torch.Tensor,
        slots: torch.Tensor,
        draft_slots: torch.Tensor,
    ) -> None:
        """Move the accepted KV to the front of the window, and give the drafter the path's hidden states.

        Recurrent states and convolution windows move to the end of the path.

        A graph captures this.

        Args:
            hidden: [bs * N or more, hidden], hidden states of the target.
            accepted: the accepted paths of bs requests.
            positions: [bs, F] int64, the first of the window.
            slots: [bs, N] int64, the slots of the nodes, which are the first of the window.
            draft_slots: [bs, F] int64, the first of the window. The drafter's pool has the same slots.
        """
        bs, width = positions.shape
        if self._kv is None:
            self._kv = kv_groups(self.model_runner.token_to_kv_pool)
        path_hidden = hidden.new_empty(bs, width, hidden.shape[-1])
        commit_kv(self._kv, accepted, slots, hidden[: slots.numel()], path_hidden)
        cache_loc = draft_slots.contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path_hidden.flatten(0, 1),
            cache_loc=cache_loc.flatten(),
            cache_loc_2d=cache_loc,
            positions=positions.flatten(),
            commit_lens=accepted.lengths,
        )
        if self.recurrent is not None:
            self.recurrent.commit(positions[:, 0], accepted, slots.shape[1])

    def _report_difference(self, batch: ScheduleBatch) -> None:
        """Report from time to time what a validating verify has found."""
        if self.difference is None:
            return
        found = self.difference.step({request.kv.req_pool_idx: request.rid for request in batch.reqs})
        if found is not None:
            self.metrics.show_difference(found)
