"""DDTREE's worker: DFLASH's drafter and prefill, a tree instead of a chain between draft and commit."""

from __future__ import annotations

import logging

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path, commit_path
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention import ddtree_backend
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import (
    get_exec,
    get_observability,
    get_parallel,
    get_schedule,
    get_serving,
    get_spec,
)
from sglang.srt.speculative.ddtree.build import TreeBuilder
from sglang.srt.speculative.ddtree.info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree.metrics import DDTreeMetrics, DifferenceReader
from sglang.srt.speculative.ddtree.penalties import OutputPenalties
from sglang.srt.speculative.ddtree.verify import constrain, kv_buffers, target_tokens
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """Drafts F positions in one pass, verifies a tree of N rows in one target forward, commits one path of it.

    Prefill, the draft model's loading and its KV are DFLASH's (the base class of SGLang 0.5.23). A decode step:

        draft block -> candidates -> trees -> target verify -> a target token a row -> walk -> commit KV and hidden rows

    Between draft and commit nothing waits for the device, but for a grammar, whose masks are built on the host.
    """

    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        spec = get_spec()
        self.num_nodes = spec.speculative_num_draft_tokens
        self.candidates = spec.speculative_eagle_topk
        # The base class takes the width of a draft pass from here; outside, the leaf is the width of a verify.
        with spec.override(speculative_num_draft_tokens=spec.speculative_dflash_block_size):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._refuse_models()
        if self.model_runner.sliding_window_size is None:
            # Before the attention backends ask. Models that do not tell it themselves (Laguna, MiMo-V2) have it from the
            # KV pool of layers with a window, which DDTREE does without: see contract.share_slots().
            self.model_runner.sliding_window_size = ddtree_backend.widest_window(self.model_runner.model)
        self.speculative_num_draft_tokens = self.num_nodes
        self._kv = None
        self._on_cpu = torch.device(self.device).type == "cpu"
        self._row_offsets = torch.arange(self.num_nodes, device=self.device)
        # With this name the drafter embeds its ids itself, inside the captured graph. Handing it embeddings instead costs
        # a copy, and upstream's eager runner casts them to bfloat16 whatever the model's dtype.
        self.draft_model.forward_embed = self._embed_block
        if self._on_cpu:
            for layer in self.draft_model.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel

    def _refuse_models(self) -> None:
        if mambaish_config(self.model_runner.model_config) is not None:
            raise ValueError(
                "DDTREE: target model: expected attention layers only, got recurrent ones, whose state "
                "follows a chain and not a tree's path: serve it without DDTREE."
            )
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError(
                "DDTREE: drafter: expected a plain DFlash head, whose marginals do not depend on the path, "
                "got a selector, LiLiCorr or Domino head: --speculative-algorithm DFLASH runs it."
            )
        shapes = ddtree_backend.kv_shapes(self.model_runner.model)
        if len(shapes) > 1 and not self.model_runner.use_mla_backend:
            raise ValueError(
                "DDTREE: target model: expected K and V of one shape in all layers, whose slots tree rows move in, got "
                f"(heads, d_qk, d_v) {shapes}: serve it without DDTREE."
            )

    def _embed_block(self, ids: torch.Tensor) -> torch.Tensor:
        """The drafter's input: the target's embedding of the block, unless the drafter has its own."""
        embed = self.draft_model.get_input_embeddings() or self.model_runner.model.get_input_embeddings()
        return unwrap_lora_layer(embed)(ids) * self._noise_embed_scale

    def _defer_target_verify_gather(self):
        return None  # every row's logits are needed: for sampling, grammar and logprobs

    def _validate_phase1_sampling_support(self, batch) -> None:
        """Nothing to fall back from: every sampling option is honoured at every row."""

    def prewarm_sampling(self):
        # Not DFLASH's rehearsal, which has the KV pool leave room for the sampling of a whole batch: see target_tokens().
        return self.model_runner.prewarm_sampling()

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ):
        self._widen(req_to_token_pool)
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)

    def _widen(self, pool) -> None:
        """Makes the request's row of slots as long as what the scheduler writes into it.

        It reserves 2N slots beyond what is committed, in whole pages, also at the end of the context. Upstream 0.5.23 has
        room for N + 4 there at page size 1: on CUDA the rest would go into the next request's row.
        """
        table = pool.req_to_token
        width = self.model_runner.model_config.context_len + 2 * self.num_nodes + get_schedule().page_size
        if width > table.shape[1]:
            pool.req_to_token = table.new_zeros(table.shape[0], width)
            self.model_runner.init_kv_index_translator()  # which holds the table

    def init_attention_backends(self):
        super().init_attention_backends()
        kv_buffers(self.model_runner.token_to_kv_pool)  # refuses other pools now, not at the first step
        self.draft_model_runner.attn_backend = ddtree_backend.with_prefix_per_request(
            self.draft_model_runner.attn_backend, self.draft_model_runner
        )
        self.model_runner.attn_backend = ddtree_backend.with_tree_verify(
            self.model_runner.attn_backend,
            self.model_runner,
            mode=get_spec().speculative_ddtree_verify,
            rows=self.num_nodes,
        )
        lm_head = unwrap_lora_layer(getattr(self.model_runner.model, "lm_head", None))
        if lm_head is None:
            raise ValueError(
                "DDTREE: target model: expected an lm_head that the drafter can borrow, got none: serve it without DDTREE."
            )
        self.builder = TreeBuilder(
            lm_head=lm_head,
            block_size=self.block_size,
            rows=self.num_nodes,
            candidates=self.candidates,
            keep_top1_path=get_spec().speculative_ddtree_spine == "keep",
            max_bs=0 if self._on_cpu else max(get_exec().graph.cuda_graph_config.decode.bs or [0]),
            device=self.device,
        )

        self.penalties = OutputPenalties(
            requests=self.model_runner.req_to_token_pool.req_to_token.shape[0],
            vocabulary=self.model_runner.model_config.vocab_size,
            device=self.device,
        )
        self.metrics = DDTreeMetrics(
            rows=self.num_nodes,
            depth=self.block_size,
            labels={"model_name": get_serving().served_model_name},
            enabled=get_observability().enable_metrics and get_parallel().tp_rank == 0,
        )
        table = ddtree_backend.difference_table(self.model_runner.attn_backend)
        self.difference = None if table is None else DifferenceReader(table)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req, batch_size=None):
        self.metrics.count(num_correct_drafts_per_req)

    def _maybe_build_draft_sampler(self):
        return self.builder

    # ---- one step ----

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
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

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        draft_input: DFlashDraftInputV2 = batch.spec_info
        prefix_lens = batch.seq_lens  # a tensor of the previous step, maybe of another stream
        if not self._on_cpu:
            prefix_lens.record_stream(torch.get_device_module(self.device).current_stream())
        bs, rows, depth = len(prefix_lens), self.num_nodes, self.block_size

        window = prefix_lens[:, None] + self._row_offsets  # positions of the slots that this step may write
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices[:, None], window].to(torch.int64)
        host_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            write_virtual=slots.flatten(),
            read_extent=rows,
        )

        trees = self._draft(batch, draft_input, window[:, :depth], plan)
        grammar_tree = (
            GrammarTree.from_device(trees.first_child.long(), trees.next_sibling.long(), trees.tokens)
            if batch.has_grammar
            else None  # copied to the host beside the verify forward
        )

        positions = (prefix_lens[:, None] + trees.depths).flatten()
        output = self._verify(batch, draft_input, trees, positions, slots, plan)
        logits = output.logits_output.next_token_logits
        grammar_mask = (
            build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if batch.has_grammar
            else None
        )
        penalized = self.penalties.options(batch.reqs)
        if penalized is not None:
            self.penalties.apply(
                logits, penalized, batch.sampling_info, batch.req_pool_indices, trees, positions
            )
        constrain(logits, batch.sampling_info, grammar_mask, rows)
        target = target_tokens(
            logits,
            batch.sampling_info,
            self.model_runner.sampler,
            positions,
            sampled=[i for i, req in enumerate(batch.reqs) if req.sampling_params.top_k != 1],
            keep_logits=batch.return_logprob,
        )
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target)
        accepted = accept_path(trees, target.view(bs, rows), Accepted.allocate(bs, depth, self.device))
        if penalized is not None:
            self.penalties.count(batch.req_pool_indices, accepted.tokens, accepted.lengths)
        new_seq_lens = prefix_lens + accepted.lengths
        if on_publish is not None:
            on_publish(new_seq_lens)

        if batch.return_logprob:
            first_row = torch.arange(0, bs * rows, rows, device=self.device)
            compute_spec_logprobs(
                batch, output.logits_output, target, accept_index=accepted.path + first_row[:, None]
            )
        self._commit(output.logits_output.hidden_states, accepted, window[:, :depth], slots, plan)
        output.logits_output.hidden_states = None  # nothing on the host reads them

        if self.difference is not None:
            found = self.difference.step({request.kv.req_pool_idx: request.rid for request in batch.reqs})
            if found is not None:
                self.metrics.show_difference(found)

        return GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=rows,
            speculative_output_stride=depth,
            new_seq_lens=new_seq_lens,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    def _draft(self, batch, draft_input, positions: torch.Tensor, plan) -> DraftTrees:
        """One pass of the drafter over [bonus, mask, ...], and the trees of its candidates."""
        bs, width = positions.shape
        ids = torch.full((bs, width), self._mask_token_id, dtype=torch.int64, device=self.device)
        ids[:, 0] = draft_input.bonus_tokens
        seq_lens_cpu = self._host_bound(batch, draft_input, width)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids.flatten(),
            positions=positions.flatten(),
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
        plan.bind(forward_batch, self.draft_model_runner.kv_index_translator, cols=slice(0, width))
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            output = self.draft_model_runner.forward(forward_batch)
            if self._draft_sampler is not None and output.can_run_graph:
                return self.builder.trees.first(bs)  # built by the graph
            trees = DraftTrees.allocate(bs, self.num_nodes, self.device)
            self.builder.build(output.logits_output.hidden_states, ids.flatten(), trees)
            return trees

    def _verify(self, batch, draft_input, trees: DraftTrees, positions, slots, plan):
        """The target's forward over all rows of all trees."""
        bs, rows = trees.tokens.shape
        verify_input = DDTreeVerifyInput(
            draft_token=trees.tokens.flatten(),
            positions=positions,
            draft_token_num=rows,
            ancestors=trees.ancestors.view(bs * rows, -1),
            kv_loc_plan=plan,
        )
        batch.out_cache_loc = slots.flatten()
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = self._host_bound(batch, draft_input, rows)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _host_bound(self, batch, draft_input, width: int) -> torch.Tensor:
        """[bs] on the host: at least prefix + width of each request, for the buffers that backends size there."""
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu + width
        return draft_input.nxt_kv_lens_cpu

    def _commit(self, hidden: torch.Tensor, accepted: Accepted, positions, slots, plan) -> None:
        """Moves the accepted rows' KV to the front of the window, and gives the drafter their hidden states."""
        bs, depth = positions.shape
        if self._kv is None:
            self._kv = kv_buffers(
                self.model_runner.token_to_kv_pool
            )  # now: graph capture may have resized the pool
        path_hidden = hidden.new_empty(bs, depth, hidden.shape[-1])
        commit_path(accepted.path, accepted.lengths, slots, self._kv, hidden[: slots.numel()], path_hidden)
        cache_loc = self._draft_write_ids(plan).view(bs, -1)[:, :depth].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path_hidden.view(bs * depth, -1),
            cache_loc=cache_loc.flatten(),
            cache_loc_2d=cache_loc,
            positions=positions.flatten(),
            commit_lens=accepted.lengths,
        )
