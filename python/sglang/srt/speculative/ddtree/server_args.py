"""Which server arguments DDTREE refuses, and how it fills in the rest.

Upstream calls refuse_asked_args(), refuse_server_args() and resolve_server_args(), in this order, while it
resolves the arguments and before it loads anything. The first one is called before upstream's own checks, so
that an argument is refused for DDTREE's reason and not for a consequence. The widths are N
(--speculative-num-draft-tokens, the nodes of the verify tree), F (--speculative-dflash-block-size, the positions of
one draft pass) and K (--speculative-eagle-topk, the candidates per draft position).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.arg_groups.argument_refused import ArgumentRefused, flag_of, refuse_file
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    model_config_of,
    post_capture_kv_sizing_planned,
)
from sglang.srt.speculative.ddtree.drafter import drafter_config, refuse_path

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

DEFAULT_NUM_NODES = 32
DEFAULT_AUTO_NODES = 64  # the widest tree of --speculative-ddtree-budget auto
DEFAULT_NUM_CANDIDATES = 8
DEFAULT_MAX_RUNNING_REQUESTS = 48  # DFLASH's own default in 0.5.23

AUTO_BUDGET = "auto"
OWN_DEFAULTS = {
    "speculative_ddtree_verify": "native",
    "speculative_ddtree_top1_path": "auto",
    "speculative_ddtree_budget": None,
    "speculative_ddtree_trace": None,
}
CPU_DRAFT_BACKEND = "ddtree"
BASE_BACKENDS = {"cuda": "triton", "cpu": "torch_native"}  # what tree verify wraps
DRAFT_BACKENDS = {"cuda": "triton", "cpu": CPU_DRAFT_BACKEND}
PREFILL_BACKENDS = {
    "cuda": ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla", "flashmla", "torch_native"),
    "cpu": ("torch_native",),
}
# Why some other backends cannot prefill for DDTREE. Backends that are in neither table are for other devices.
SPARSE = "it keeps more than K and V per token, and the rest would not move with the accepted KV"
NOT_SPECULATIVE = "SGLang does not support it with speculative decoding"
DECODES_ONLY = "it only decodes, and trtllm_mla prefills for it"
UNFIT_BACKENDS = {
    **dict.fromkeys(("dsa", "nsa", "qsa", "dsv4", "compressed", "minicpm_flashattn", "minicpm_flashinfer"), SPARSE),
    **dict.fromkeys(("flex_attention", "hpc_ops"), NOT_SPECULATIVE),
    **dict.fromkeys(("cutedsl_mla", "tokenspeed_mla"), DECODES_ONLY),
    "llada2_cfg_flashinfer": "it serves diffusion language models",
}  # fmt: skip

IDLE_RANKS = (
    "DDTREE has no verify for a rank without requests, which must still take part in the others' collectives"
)


class Refusal(NamedTuple):
    """An argument for which DDTREE serves only some values.

    Attributes:
        field: the field of ServerArgs. The flag has the same name.
        served: the values that DDTREE serves. None means that the argument is not given.
        reason: why DDTREE does not serve the others.
    """

    field: str
    served: tuple[object, ...]
    reason: str

    def check(self, args: ServerArgs) -> None:
        """Raise ArgumentRefused if the argument has another value."""
        value = getattr(args, self.field)
        if value in self.served:
            return
        expected = " or ".join(repr(served) for served in self.served if served is not None) or "no value"
        raise ArgumentRefused(
            f"DDTREE: {flag_of(self.field)}: expected {expected}, got {value!r}: {self.reason}. Leave it out, "
            "or serve without DDTREE."
        )


REFUSALS = (
    Refusal("pp_size", (1,), "the drafter reads target layers of every pipeline stage"),
    Refusal("attn_cp_size", (1,), "a tree is not split over context-parallel ranks"),
    Refusal("dcp_size", (1,), "a tree is not split over context-parallel ranks"),
    Refusal("attn_dp_size", (1,), IDLE_RANKS),
    Refusal("enable_dp_attention", (False,), IDLE_RANKS),
    Refusal("enable_two_batch_overlap", (False,), "trees are not split with their batch"),
    Refusal("enable_pdmux", (False,), "the verify graph is captured for one stream"),
    Refusal("enable_unified_memory", (False,), "its pool moves whole pages, not single slots"),
    Refusal("enable_watermark", (False,), "a watermark hashes one chain of tokens, not the paths of a tree"),
    Refusal("enable_return_routed_experts", (False,), "they do not move with the accepted KV"),
    Refusal("enable_return_indexer_topk", (False,), "it does not move with the accepted KV"),
    Refusal("speculative_accept_threshold_single", (1.0,), "DDTREE is lossless"),
    Refusal("speculative_accept_threshold_acc", (1.0,), "DDTREE is lossless"),
    Refusal("speculative_use_rejection_sampling", (False,), "DDTREE does not use draft probabilities to accept tokens"),
    Refusal("speculative_num_steps", (1, None), "one pass drafts --speculative-dflash-block-size positions"),
    Refusal("speculative_token_map", (None,), "the drafter proposes from the whole vocabulary"),
    Refusal("speculative_adaptive", (False,), "--speculative-ddtree-budget auto adapts DDTREE's trees"),
    Refusal("speculative_draft_sink_size", (None, 0), "the drafter sees only the end of the prefix"),
    Refusal("disaggregation_decode_enable_offload_kvcache", (False,), "it offloads the target's KV, but not the drafter's"),
    Refusal("enable_linear_replayssm", (False,), "recurrent states are committed by path, not by decoding step"),
    Refusal("enable_linear_replayssm_spec", (False,), "it replays one chain of tokens, not the path of a tree"),
    Refusal("enable_deterministic_inference", (False,), "tree verify is not batch-invariant"),
)  # fmt: skip
DEVICE_REFUSALS = {
    "cuda": (
        Refusal("speculative_draft_attention_backend", ("triton", None), "other backends would read the draft block as a tree"),
    ),
    "cpu": (
        Refusal("speculative_draft_attention_backend", (CPU_DRAFT_BACKEND, None), "no other backend runs on a CPU"),
        Refusal("speculative_ddtree_verify", ("native",), "Triton does not run on a CPU"),
        Refusal("enable_hierarchical_cache", (False,), "SGLang registers the host's memory with CUDA"),
        Refusal("hicache_storage_backend", (None,), "it stores what the hierarchical cache keeps, which needs CUDA"),
        Refusal("disaggregation_decode_retraction_backup", ("cpu_tensor", "none", None), "SGLang registers the host's memory with CUDA"),
    ),
}  # fmt: skip


def refuse_asked_args(args: ServerArgs) -> None:
    """Refuse arguments of the user that DDTREE cannot serve. This changes nothing.

    Args:
        args: the server's arguments as the user gave them. Defaults are not filled in yet.

    Raises:
        ArgumentRefused: names the argument, what DDTREE supports and what was given.
    """
    if (args.speculative_algorithm or "").upper() != "DDTREE":
        refuse_own_args(args)
        return
    refuse_missing_ops()
    if args.speculative_draft_model_path is None:
        raise ArgumentRefused(
            "DDTREE: --speculative-draft-model-path: expected the path of a DFlash drafter, got none: DDTREE "
            "has no drafter of its own."
        )
    for refusal in REFUSALS:
        refusal.check(args)
    if args.page_size is not None and args.page_size < 1:
        raise ArgumentRefused(f"DDTREE: --page-size: expected 1 or more tokens, got {args.page_size}.")
    asked_nodes(args)
    if args.speculative_ddtree_trace is not None:
        refuse_trace(args.speculative_ddtree_trace, args.dp_size)
    if args.speculative_ddtree_budget == AUTO_BUDGET and args.speculative_ddtree_verify != "native":
        raise ArgumentRefused(
            "DDTREE: --speculative-ddtree-verify: expected 'native' with --speculative-ddtree-budget auto, got "
            f"{args.speculative_ddtree_verify!r}: the other modes verify trees of one width."
        )
    refuse_path(args)


def refuse_missing_ops() -> None:
    """Refuse DDTREE where the wheel of the tree ops is not installed. Upstream's dependencies do not include it.

    Raises:
        ArgumentRefused: says how to install it.
    """
    try:
        import sgl_kernel.ddtree  # noqa: F401
    except ModuleNotFoundError as error:
        raise ArgumentRefused(
            "DDTREE: --speculative-algorithm: expected an environment with the package sglang-kernel-ddtree, got one without "
            f"it ({error}): build it as sgl-kernel/README.md says (pip install --no-build-isolation ./sgl-kernel)."
        ) from error


def asked_nodes(args: ServerArgs) -> int | None:
    """Return the N that the user asked for, by --speculative-num-draft-tokens or --speculative-ddtree-budget.

    Args:
        args: the server's arguments.

    Returns:
        N, or None if it has its default.

    Raises:
        ArgumentRefused: the budget is neither 'auto' nor a number, or the two arguments differ.
    """
    budget, num_nodes = args.speculative_ddtree_budget, args.speculative_num_draft_tokens
    if budget in (None, AUTO_BUDGET):
        return num_nodes
    if not str(budget).isdecimal():
        raise ArgumentRefused(
            f"DDTREE: --speculative-ddtree-budget: expected 'auto' or a number of nodes, got {budget!r}."
        )
    if num_nodes not in (None, int(budget)):
        raise ArgumentRefused(
            f"DDTREE: --speculative-ddtree-budget: expected 'auto' or {num_nodes}, as --speculative-num-draft-tokens, got "
            f"{budget}: both set the nodes of a verify tree."
        )
    return int(budget)


def refuse_trace(path: str, dp_size: int) -> None:
    """Refuse a trace file that cannot be written, or that several replicas would write.

    Args:
        path: the path of the file.
        dp_size: the number of replicas of the server.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    argument = "DDTREE: --speculative-ddtree-trace"
    refuse_file(argument, path)
    if dp_size > 1:
        raise ArgumentRefused(
            f"{argument}: expected --dp-size 1, got {dp_size}: every replica would write the same file."
        )


@contextmanager
def without_window_warning() -> Iterator[None]:
    """Hide upstream's warning that --speculative-draft-window-size has no effect. With DDTREE it has one."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("--speculative-draft-window-size has no effect")

    upstream = logging.getLogger("sglang.srt.arg_groups.speculative_hook")
    upstream.addFilter(is_other)
    try:
        yield
    finally:
        upstream.removeFilter(is_other)


def refuse_own_args(args: ServerArgs) -> None:
    """Refuse DDTREE's own arguments for a server without DDTREE, where they would have no effect.

    Args:
        args: the arguments of a server without DDTREE.

    Raises:
        ArgumentRefused: names the argument.
    """
    for field, default in OWN_DEFAULTS.items():
        value = getattr(args, field)
        if value != default:
            raise ArgumentRefused(
                f"DDTREE: {flag_of(field)} {value!r}: expected --speculative-algorithm DDTREE, got "
                f"{args.speculative_algorithm!r}: the argument has no effect without DDTREE."
            )


def refuse_server_args(args: ServerArgs) -> None:
    """Refuse resolved arguments that DDTREE cannot serve. This changes nothing.

    Args:
        args: the server's arguments.

    Raises:
        ArgumentRefused: names the argument, what DDTREE supports and what was given.
    """
    device = _device(args)
    if device not in BASE_BACKENDS:
        raise ArgumentRefused(
            f"DDTREE: --device: expected one of {sorted(BASE_BACKENDS)}, got {args.device!r}: the tree ops "
            "have no other build."
        )
    if args.grammar_backend == "outlines":
        raise ArgumentRefused(
            "DDTREE: --grammar-backend: expected a backend whose grammars can step back from one tree node "
            "to another (xgrammar, llguidance), got 'outlines'."
        )
    for refusal in (*REFUSALS, *DEVICE_REFUSALS[device]):
        refusal.check(args)
    chunk = args.chunked_prefill_size or 0  # 0 or less: prompts are not split
    if chunk > 0 and chunk % args.page_size:
        raise ArgumentRefused(
            f"DDTREE: --page-size: expected a divisor of --chunked-prefill-size, which is {chunk}, got "
            f"{args.page_size}: SGLang splits a prompt at page boundaries only."
        )


def resolve_server_args(args: ServerArgs) -> None:
    """Fill in the arguments that DDTREE decides.

    Args:
        args: the server's arguments, after refuse_server_args().

    Raises:
        ArgumentRefused: a width, an attention backend or a memory need that DDTREE cannot serve.
    """
    choose_attention_backends(args)
    resolve_widths(args)
    if args.device == "cpu":
        # Upstream's overlap scheduling needs device streams.
        args.disable_overlap_schedule = True
        if args.disaggregation_mode == "decode" and args.disaggregation_decode_retraction_backup is None:
            args.disaggregation_decode_retraction_backup = "cpu_tensor"  # see DEVICE_REFUSALS
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
    if args.enable_memory_saver:
        # After a release, an update brings back the target's weights alone: see updated_models().
        args.enable_draft_weights_cpu_backup = True
    reserve_verify_memory(args)


def choose_attention_backends(args: ServerArgs) -> None:
    """Keep the prefill backend that the user or upstream chose. Give verify and drafter the backends that they need.

    Upstream calls everything except prefill "decode". Under speculation, that is the target's verify. Upstream has
    already derived what the backend needs (page size, graphs). If the user named no backend and DDTREE does not know
    the one that upstream chose, the base backend prefills.

    Args:
        args: the server's arguments.

    Raises:
        ArgumentRefused: a backend that cannot prefill for DDTREE, or a decoding backend other than the base.
    """
    device = _device(args)
    base, fit = BASE_BACKENDS[device], PREFILL_BACKENDS[device]
    asked = args._raw_input
    decode = asked["decode_attention_backend"]
    if decode not in (None, base):
        raise ArgumentRefused(
            f"DDTREE: --decode-attention-backend: expected {base!r} on {device}, got {decode!r}: tree verify "
            f"reads the KV metadata of {base}. Only prefill can use another backend: "
            "--prefill-attention-backend."
        )
    field = "prefill_attention_backend" if asked["prefill_attention_backend"] else "attention_backend"
    named = asked[field]
    prefill, _ = attention_backends_of(args)  # as upstream has resolved it
    # Upstream chooses an unfit one only if the model supports no other. That is refused below.
    if named is None and prefill not in (*fit, *UNFIT_BACKENDS):
        prefill = base
    for value in (named or prefill, prefill):
        if value not in fit:
            raise ArgumentRefused(
                f"DDTREE: {flag_of(field)}: expected one of {list(fit)} on {device}, got {value!r}: "
                f"{UNFIT_BACKENDS.get(value, 'it is for another device or was never tried')}. Leave the "
                f"argument out, or name {base}."
            )
    drafter = DRAFT_BACKENDS[device]
    args.attention_backend = args.prefill_attention_backend = prefill
    args.decode_attention_backend = base
    args.speculative_attention_mode = "decode"  # sends the verify to the decoding backend, not to prefill's
    args.speculative_draft_attention_backend = drafter
    logger.info(
        "DDTREE: attention backends: prefill %s; verify %s and drafter %s, both wrapped for trees.",
        prefill,
        base,
        drafter,
    )


class Widths(NamedTuple):
    """The sizes of a draft.

    Attributes:
        num_nodes: N.
        block_size: F.
        num_candidates: K.
    """

    num_nodes: int
    block_size: int
    num_candidates: int


def resolve_widths(args: ServerArgs) -> None:
    """Fill in N, F and K from the arguments, the drafter's config and the defaults.

    F is at most N. The 2N slots that the scheduler reserves for a request then hold a committed path (F) and
    the next tree (N).

    Args:
        args: the server's arguments.

    Raises:
        ArgumentRefused: a width outside the limits of the tree ops or of the drafter's head.
    """
    # Here and not above: the plug-in is imported by every process, and this import loads the op libraries.
    from sglang.srt.speculative.ddtree.heads import head_class

    config = drafter_config(args)
    widths = _widths_or_defaults(args, config)
    _refuse_widths(args, widths)
    head_class(config).refuse_widths(config, widths.block_size, widths.num_candidates)
    widths = _without_excess(widths)
    logger.info(
        "DDTREE: trees of up to %d nodes (N); a draft pass has %d positions (F) with %d candidates each (K).",
        *widths,
    )
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = widths.num_candidates
    args.speculative_dflash_block_size = widths.block_size
    args.speculative_num_draft_tokens = widths.num_nodes


def _widths_or_defaults(args: ServerArgs, config: PretrainedConfig) -> Widths:
    """Return the widths that the user asked for, and defaults for the others. `config` is the drafter's."""
    from sglang.srt.speculative.ddtree.heads import head_class, trained_block_size

    block_size = args.speculative_dflash_block_size
    if block_size is None:
        block_size = trained_block_size(config)
    num_nodes = asked_nodes(args)
    if num_nodes is None:
        auto = args.speculative_ddtree_budget == AUTO_BUDGET
        num_nodes = max(DEFAULT_AUTO_NODES if auto else DEFAULT_NUM_NODES, block_size)
    num_candidates = args.speculative_eagle_topk
    if num_candidates is None:
        num_candidates = head_class(config).trained_candidates(config) or DEFAULT_NUM_CANDIDATES
    return Widths(num_nodes, block_size, num_candidates)


def _refuse_widths(args: ServerArgs, widths: Widths) -> None:
    """Refuse widths outside the limits of the tree ops."""
    from sgl_kernel.ddtree import MAX_CANDIDATES, MAX_DEPTH, MAX_NODES, MAX_RECURRENT_NODES
    from sglang.srt.configs.hybrid_arch import mambaish_config

    recurrent = mambaish_config(model_config_of(args)) is not None
    max_nodes = MAX_RECURRENT_NODES if recurrent and _device(args) == "cuda" else MAX_NODES
    named = args.speculative_ddtree_budget not in (None, AUTO_BUDGET)
    for flag, value, low, high in (
        (f"--speculative-{'ddtree-budget' if named else 'num-draft-tokens'}", widths.num_nodes, 2, max_nodes),
        ("--speculative-dflash-block-size", widths.block_size, 2, MAX_DEPTH + 1),
        ("--speculative-eagle-topk", widths.num_candidates, 1, MAX_CANDIDATES),
    ):
        if not low <= value <= high:
            limit = (
                "; with recurrent layers, the tree ops support no more" if high == MAX_RECURRENT_NODES else ""
            )
            raise ArgumentRefused(f"DDTREE: {flag}: expected {low} to {high}, got {value}{limit}.")


def _without_excess(widths: Widths) -> Widths:
    """Cut positions that no tree can reach, and nodes that no candidates can fill. Log what is cut."""
    num_nodes, block_size, num_candidates = widths
    if block_size > num_nodes:
        logger.warning(
            "DDTREE: a tree of %d nodes is at most %d deep: the drafter drafts %d positions instead of %d.",
            num_nodes,
            num_nodes - 1,
            num_nodes,
            block_size,
        )
        block_size = num_nodes
    prefixes = sum(num_candidates**depth for depth in range(1, block_size))
    if prefixes + 1 < num_nodes:
        logger.warning(
            "DDTREE: %d candidates at each of %d positions give %d nodes and the root: the verify tree has "
            "%d nodes instead of %d.",
            num_candidates,
            block_size - 1,
            prefixes,
            prefixes + 1,
            num_nodes,
        )
        num_nodes = prefixes + 1
    return Widths(num_nodes, block_size, num_candidates)


def reserve_verify_memory(args: ServerArgs) -> None:
    """Lower the default of --mem-fraction-static by what a verify needs beyond upstream's reserve.

    A fraction that the user named stays. It also stays if the server only prefills, and if the KV pool is sized after
    graph capture, because the measurement then includes all of this.

    Args:
        args: the server's arguments, with widths and --max-running-requests resolved.

    Raises:
        ArgumentRefused: the verify needs more than upstream leaves for weights and KV cache.
    """
    from sglang.srt.utils.common import get_device_memory_capacity

    if _device(args) != "cuda" or args._raw_input["mem_fraction_static"] is not None:
        return
    if args.disaggregation_mode == "prefill":
        return
    capacity = get_device_memory_capacity(args.device)  # MB
    if capacity is None or post_capture_kv_sizing_planned(args):
        return
    tokens = args.max_running_requests * args.speculative_num_draft_tokens
    needed = verify_memory(args)
    fraction = round(args.mem_fraction_static - needed / capacity, 3)
    if fraction <= 0:
        raise ArgumentRefused(
            "DDTREE: --max-running-requests x --speculative-num-draft-tokens: expected a verify that leaves "
            f"room for the model, got {args.max_running_requests} x {args.speculative_num_draft_tokens}, "
            f"which needs {needed:.0f} of {capacity:.0f} MB: lower one of them, or set --mem-fraction-static."
        )
    logger.info(
        "DDTREE: --mem-fraction-static is %.3f instead of %.3f: the verify of %d nodes needs %.0f MB.",
        fraction,
        args.mem_fraction_static,
        tokens,
        needed,
    )
    args.mem_fraction_static = fraction


def verify_memory(args: ServerArgs) -> float:
    """Return what a verify needs beyond upstream's reserve, in MB.

    Upstream (0.5.23) reserves 1.5 MB of activations per token of a prefill chunk, and little for a decoding graph.
    A verify has bs * N tokens and needs their logits twice: in the model's dtype, and in float32 where the graphs write
    them.

    Args:
        args: the server's arguments, with widths and --max-running-requests resolved.
    """
    tokens = args.max_running_requests * args.speculative_num_draft_tokens
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else args.max_prefill_tokens
    logits = tokens * model_config_of(args).vocab_size * (4 + 2) / (1 << 20)
    return logits + 1.5 * max(0, tokens - max(chunk, 2048))


def _device(args: ServerArgs) -> str:
    """Return the type of the device, without an index."""
    return args.device.split(":")[0]
