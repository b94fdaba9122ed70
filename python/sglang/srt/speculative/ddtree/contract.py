"""What DDTREE tells the scheduler, what it makes of the server's arguments, and what it refuses."""

from __future__ import annotations

import json
import logging

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    model_config_of,
    post_capture_kv_sizing_planned,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

logger = logging.getLogger(__name__)

MAX_NODES = 256  # rows of one tree, the root included: sgl-kernel/csrc/tree_verify/params.h
MAX_DEPTH = 32  # nodes below the root on one path
MAX_CANDIDATES = 32  # candidates a draft position
DEFAULT_ROWS = 32
DEFAULT_CANDIDATES = 8
DEFAULT_BLOCK = 16
DEFAULT_MAX_RUNNING_REQUESTS = 48  # DFLASH's own default in 0.5.23
CPU_DRAFT_BACKEND = "ddtree"
VERIFY_MODES = ("native", "triton", "validate")
BASE_BACKENDS = {"cuda": "triton", "cpu": "torch_native"}  # under the tree ops; its metadata has the slots
PREFILL_BACKENDS = {
    "cuda": ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla", "flashmla", "torch_native"),
    "cpu": ("torch_native",),
}
DRAFT_BACKENDS = {"cuda": "triton", "cpu": CPU_DRAFT_BACKEND}
# Why some of SGLang's others cannot prefill for DDTREE; the rest are for other devices.
SPARSE = "it keeps more of a token than K and V, which would not move with the accepted rows"
NOT_SPECULATIVE = "SGLang does not run it beside speculative decoding"
DECODES_ONLY = "it only decodes; trtllm_mla prefills for it"
UNFIT_BACKENDS = {
    **dict.fromkeys(("dsa", "nsa", "qsa", "dsv4", "compressed", "minicpm_flashattn", "minicpm_flashinfer"), SPARSE),
    **dict.fromkeys(("flex_attention", "hpc_ops"), NOT_SPECULATIVE),
    **dict.fromkeys(("cutedsl_mla", "tokenspeed_mla"), DECODES_ONLY),
    "llada2_cfg_flashinfer": "it serves diffusion language models",
}  # fmt: skip


class DDTreeAlgorithm(CustomSpecAlgo):
    """DDTREE as the scheduler sees it: DFLASH, but for the width of a target verify.

    Vocabulary of the arguments: --speculative-num-draft-tokens is N, the rows of the verify tree (root included);
    --speculative-dflash-block-size is F, the positions of one draft pass; --speculative-eagle-topk is K, the candidates
    taken at each of them.
    """

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
        """False: the drafter writes one block, never a KV chain a candidate, so no page a candidate is reserved."""
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False
    ):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request of one TARGET_VERIFY forward: the draft block for the drafter, the tree for the target."""
        return get_spec().speculative_dflash_block_size if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args) -> None:
        refuse_server_args(server_args)
        choose_attention_backends(server_args)
        resolve_widths(server_args)
        share_slots(server_args)
        if server_args.device == "cpu":
            # Upstream's overlap scheduling needs device streams.
            server_args.disable_overlap_schedule = True
        server_args.speculative_draft_attention_backend = DRAFT_BACKENDS[server_args.device.split(":")[0]]
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        reserve_verify_memory(server_args)


def share_slots(args) -> None:
    """Gives layers with a sliding window no KV pool of their own: it has other slots, and tree rows move in one slot of all
    layers. The one pool keeps the whole context for each layer.
    """
    if model_config_of(args).is_hybrid_swa:
        logger.warning(
            "DDTREE: --disable-hybrid-swa-memory is on: layers with a sliding window keep the KV of the whole context, so "
            "the pool holds fewer tokens than without DDTREE."
        )
    args.disable_hybrid_swa_memory = True


def choose_attention_backends(args) -> None:
    """Gives prefill to the backend that the user named, and the rest to the base that tree verify is laid over.

    Upstream calls the rest decoding; under speculation it is the target's verify. What a backend asks of the server (page
    size, graphs) upstream has derived from the arguments already. Where the user names none, prefill is the base's, too.

    Raises:
        ValueError: a backend that cannot prefill for DDTREE, or one for decoding other than the base.
    """
    device = args.device.split(":")[0]
    base, fit = BASE_BACKENDS[device], PREFILL_BACKENDS[device]
    asked = args._raw_input
    decode = asked["decode_attention_backend"]
    if decode not in (None, base):
        raise ValueError(
            f"DDTREE: --decode-attention-backend: expected {base!r} on {device}, got {decode!r}: tree verify reads the KV "
            "metadata that it builds. Prefill can run on another: --prefill-attention-backend."
        )
    flag = "prefill_attention_backend" if asked["prefill_attention_backend"] else "attention_backend"
    named = asked[flag]
    prefill, _ = attention_backends_of(args)  # as upstream has resolved it
    if named is None and prefill not in UNFIT_BACKENDS:  # else the model can do with no other
        prefill = base
    for value in (named or prefill, prefill):
        if value not in fit:
            raise ValueError(
                f"DDTREE: --{flag.replace('_', '-')}: expected one of {list(fit)} on {device}, got {value!r}: "
                f"{UNFIT_BACKENDS.get(value, 'not for this device, or not tried')}. Left out, {base} prefills."
            )
    args.attention_backend = args.prefill_attention_backend = prefill
    args.decode_attention_backend = base
    args.speculative_attention_mode = "decode"  # verify with the decoding backend, not with prefill's
    drafter = DRAFT_BACKENDS[device]
    logger.info("DDTREE: prefill on %s, verify in front of %s, the drafter on %s.", prefill, base, drafter)


def refuse_server_args(args) -> None:
    """Refuses what DDTREE cannot serve, before anything is loaded.

    Args:
        args: the server's arguments (fields of ServerArgs).

    Raises:
        ValueError: names the argument, what DDTREE supports and what came.
    """
    device = args.device.split(":")[0]
    if device not in BASE_BACKENDS:
        raise ValueError(
            f"DDTREE: --device: expected one of {sorted(BASE_BACKENDS)}, got {args.device!r}: the tree ops are built for "
            "these."
        )
    if args.speculative_draft_model_path is None:
        raise ValueError(
            "DDTREE: --speculative-draft-model-path: expected the path of a DFlash drafter, got none: DDTREE has no "
            "drafter of its own."
        )
    for flag, value, only, reason in (
        ("--pp-size", args.pp_size, 1, "the drafter reads target layers of every stage"),
        ("--attn-cp-size", args.attn_cp_size, 1, "tree rows are not split over context-parallel ranks"),
        ("--dcp-size", args.dcp_size, 1, "tree rows are not split over context-parallel ranks"),
        ("--enable-dp-attention", args.enable_dp_attention, False, "idle ranks would need empty trees"),
        (
            "--enable-two-batch-overlap",
            args.enable_two_batch_overlap,
            False,
            "a split batch has no tree of its own",
        ),
        ("--enable-pdmux", args.enable_pdmux, False, "the verify graph is captured for one stream"),
        (
            "--enable-unified-memory",
            args.enable_unified_memory,
            False,
            "its pool moves whole pages, not tree rows",
        ),
        (
            "--enable-watermark",
            args.enable_watermark,
            False,
            "a watermark hashes a chain, not a tree's paths",
        ),
        (
            "--enable-return-routed-experts",
            args.enable_return_routed_experts,
            False,
            "they are kept by slot and do not move with the accepted rows",
        ),
        (
            "--enable-return-indexer-topk",
            args.enable_return_indexer_topk,
            False,
            "it is kept by slot and does not move with the accepted rows",
        ),
        *(
            (f"--speculative-accept-threshold-{kind}", threshold, 1.0, "DDTREE is lossless")
            for kind, threshold in (
                ("single", args.speculative_accept_threshold_single),
                ("acc", args.speculative_accept_threshold_acc),
            )
        ),
        (
            "--speculative-use-rejection-sampling",
            args.speculative_use_rejection_sampling,
            False,
            "the target draws at every row, and no draft probability enters",
        ),
        (
            "--speculative-num-steps",
            args.speculative_num_steps or 1,
            1,
            "one pass drafts all depths, as many as --speculative-dflash-block-size says",
        ),
        ("--speculative-token-map", args.speculative_token_map, None, "drafts are of the whole vocabulary"),
        ("--speculative-adaptive", args.speculative_adaptive, False, "the verify graphs have one width"),
        (
            "--speculative-draft-window-size",
            args.speculative_draft_window_size,
            None,
            "the drafter shares slots",
        ),
        ("--disaggregation-mode", args.disaggregation_mode, "null", "the drafter's KV is not transferred"),
        (
            "--enable-deterministic-inference",
            args.enable_deterministic_inference,
            False,
            "tree verify is not invariant",
        ),
    ):
        if value != only:
            raise ValueError(
                f"DDTREE: {flag}: expected {only!r}, got {value!r}: {reason}. Leave it out, or serve without DDTREE."
            )
    if args.grammar_backend == "outlines":
        raise ValueError(
            "DDTREE: --grammar-backend: expected one whose grammars step back, from node to node of a tree (xgrammar, "
            "llguidance), got 'outlines'."
        )
    draft_backend = args.speculative_draft_attention_backend
    if draft_backend not in (None, DRAFT_BACKENDS[device]):
        # Others take --speculative-eagle-topk above 1 to mean that the draft block is a tree.
        raise ValueError(
            f"DDTREE: --speculative-draft-attention-backend: expected {DRAFT_BACKENDS[device]!r} on {device}, got "
            f"{draft_backend!r}, which reads its block otherwise: leave it out."
        )
    if device == "cpu" and args.speculative_ddtree_verify != "native":
        raise ValueError(
            "DDTREE: --speculative-ddtree-verify: expected 'native' on a CPU, where Triton is not, got "
            f"{args.speculative_ddtree_verify!r}: leave it out."
        )


def resolve_widths(args) -> None:
    """Fills N, F and K (see DDTreeAlgorithm) from the arguments, the drafter's config and the defaults.

    F is at most N: the request's reserve of 2N slots then holds a committed path (F) and the next tree (N).

    Raises:
        ValueError: a width outside the limits of the tree ops.
    """
    block = args.speculative_dflash_block_size or _drafter_block_size(args)
    rows = args.speculative_num_draft_tokens or max(DEFAULT_ROWS, block)
    candidates = args.speculative_eagle_topk or DEFAULT_CANDIDATES
    for flag, value, low, high in (
        ("--speculative-num-draft-tokens", rows, 2, MAX_NODES),
        ("--speculative-dflash-block-size", block, 2, MAX_DEPTH + 1),
        ("--speculative-eagle-topk", candidates, 1, MAX_CANDIDATES),
    ):
        if not low <= value <= high:
            raise ValueError(
                f"DDTREE: {flag}: expected {low} to {high}, got {value}: the tree ops hold no more."
            )
    if block > rows:
        logger.warning(
            "DDTREE: a tree of %d rows is at most %d deep: drafting %d positions, not %d.",
            rows,
            rows - 1,
            rows,
            block,
        )
        block = rows
    prefixes = sum(candidates**depth for depth in range(1, block))
    if prefixes + 1 < rows:
        logger.warning(
            "DDTREE: %d candidates at each of %d positions make %d nodes: verifying %d rows, not %d.",
            candidates,
            block - 1,
            prefixes,
            prefixes + 1,
            rows,
        )
        rows = prefixes + 1
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = candidates
    args.speculative_dflash_block_size = block
    args.speculative_num_draft_tokens = rows


def reserve_verify_memory(args) -> None:
    """Lowers the default of --mem-fraction-static by what a verify takes and upstream leaves no room for.

    Upstream (0.5.23) reserves 1.5 MB a token of a prefill chunk, for activations, and little for a decoding graph. A verify
    has b * N tokens, and logits at each of them: in float32, what the graphs write into, and before in the model's
    dtype. A fraction that the user named stays, and so does one where the KV pool is sized after capture, as then all
    of it is there to be measured.

    Raises:
        ValueError: it takes more than upstream leaves for weights and KV cache.
    """
    from sglang.srt.utils.common import get_device_memory_capacity

    if args.device.split(":")[0] != "cuda" or args._raw_input["mem_fraction_static"] is not None:
        return
    capacity = get_device_memory_capacity(args.device)
    if capacity is None or post_capture_kv_sizing_planned(args):
        return
    tokens = args.max_running_requests * args.speculative_num_draft_tokens
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else args.max_prefill_tokens
    needed = tokens * model_config_of(args).vocab_size * 6 / (1 << 20) + 1.5 * max(
        0, tokens - max(chunk, 2048)
    )
    fraction = round(args.mem_fraction_static - needed / capacity, 3)
    if fraction <= 0:
        raise ValueError(
            "DDTREE: --max-running-requests x --speculative-num-draft-tokens: expected a verify that leaves room for the "
            f"model, got {args.max_running_requests} x {args.speculative_num_draft_tokens}, {needed:.0f} MB of "
            f"{capacity:.0f}: lower one of them, or name --mem-fraction-static."
        )
    logger.info(
        "DDTREE: --mem-fraction-static %.3f instead of %.3f: the verify of %d rows takes %.0f MB.",
        fraction,
        args.mem_fraction_static,
        tokens,
        needed,
    )
    args.mem_fraction_static = fraction


def _drafter_block_size(args) -> int:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    return parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=DEFAULT_BLOCK)


def refuse_request(req) -> str | None:
    """The reason why DDTREE cannot answer a request exactly, or None; always None when another algorithm serves."""
    if get_spec().speculative_algorithm != "DDTREE":
        return None
    if req.custom_logit_processor is not None:
        # Upstream runs one prefill of what is refused; in it, a processor that fails would end the server.
        req.custom_logit_processor = None
        return "DDTREE does not support custom_logit_processor: it sees a request, not a tree node's history."
    if req.return_sampling_mask:
        return "DDTREE does not support return_sampling_mask: it samples at every node of a tree."
    if req.return_hidden_states:
        return "DDTREE does not support return_hidden_states: tree rows are not in the order of the output."
    return None
