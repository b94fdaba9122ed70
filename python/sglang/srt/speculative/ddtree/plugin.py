"""Entry point `sglang.srt.plugins`: registers DDTREE with upstream's registries. Its imports are cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

ALGORITHM = "DDTREE"
ENTRY_POINT = "ddtree"


def register() -> None:
    """Add the algorithm DDTREE, its checks, the backend that its drafter uses on a CPU, and a layout of drafters."""
    # Imports are in the functions so that register_on_demand() can report one that fails.
    from sglang.srt.arg_groups.argument_refused import show_refusals_without_traceback

    show_refusals_without_traceback()
    _register_drafter_parts()
    _register_checks()
    _register_algorithm()  # last: once its name is known, the whole plug-in is in place


def _register_drafter_parts() -> None:
    """Add the drafter's attention backend on a CPU, and the layout of the Speculators library."""
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.speculative.ddtree.server_args import CPU_DRAFT_BACKEND
    from sglang.srt.speculative.ddtree.speculators import reading_speculators
    from sglang.srt.utils.hf_transformers.config import HfModelConfigParser

    @register_attention_backend(CPU_DRAFT_BACKEND)
    def draft_backend(runner: ModelRunner) -> AttentionBackend:
        from sglang.srt.layers.attention.ddtree_wrap import create_draft_backend

        return create_draft_backend(runner)

    add_draft_attention_backend_choices([CPU_DRAFT_BACKEND])
    HfModelConfigParser.parse = reading_speculators(HfModelConfigParser.parse)


def _register_checks() -> None:
    """Check the arguments before upstream does, and the models as soon as their configurations are known."""
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.speculative.ddtree.drafter import refuse_drafter
    from sglang.srt.speculative.ddtree.lora import checking_as_dflash
    from sglang.srt.speculative.ddtree.server_args import refuse_asked_args, without_window_warning

    lora_hook.check_lora_speculative_compatibility = checking_as_dflash(
        lora_hook.check_lora_speculative_compatibility
    )

    # Upstream's first step.
    @register_resolution_hook("handle_deprecated_dp_attention")
    def check_asked_args(args: ServerArgs, step: Callable[[ServerArgs], None]) -> None:
        if args.check_drafter:
            from sglang.srt.speculative.ddtree.verdict import answer  # imports SGLang's layers

            raise SystemExit(answer(args))
        refuse_asked_args(args)
        step(args)

    # The first step that reads the drafter's configuration.
    @register_resolution_hook("handle_speculative_decoding")
    def check_models(args: ServerArgs, step: Callable[[ServerArgs], None]) -> None:
        if (args.speculative_algorithm or "").upper() != ALGORITHM:
            step(args)
            return
        from sglang.srt.speculative.ddtree.target import refuse_target  # imports SGLang's layers

        refuse_target(resolving_view(args))
        refuse_drafter(resolving_view(args))
        with without_window_warning():
            step(args)


def _register_algorithm() -> None:
    """Add the algorithm's name, its behavior in the scheduler, and its worker."""
    from sglang.srt.speculative.ddtree.algorithm import DDTreeAlgorithm
    from sglang.srt.speculative.ddtree.server_args import refuse_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=refuse_server_args,
        spec_class=DDTreeAlgorithm,
    )
    def worker_class(server_args: ServerArgs) -> type:
        from sglang.srt.speculative.ddtree.worker import DDTreeWorker

        return DDTreeWorker


def register_on_demand(name: str) -> CustomSpecAlgo | None:
    """Register DDTREE if a process asks for it by name and does not know it yet.

    Upstream loads the plug-ins in some of its processes. Others, such as the tokenizer workers, read the algorithm's
    name from the server's arguments without having loaded any.

    Args:
        name: an algorithm that is not registered, in capitals.

    Returns:
        The algorithm. None if `name` is not DDTREE.

    Raises:
        ArgumentRefused: SGLANG_PLUGINS excludes the plug-in.
        ValueError: the plug-in failed. The text says why.
    """
    if name != ALGORITHM:
        return None
    from sglang.srt.arg_groups.argument_refused import ArgumentRefused, show_refusals_without_traceback
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_registry import get_spec

    allowed = envs.SGLANG_PLUGINS.get()
    if allowed and ENTRY_POINT not in (plugin.strip() for plugin in allowed.split(",")):
        show_refusals_without_traceback()  # register() did not run
        raise ArgumentRefused(
            f"--speculative-algorithm {ALGORITHM}: expected SGLANG_PLUGINS to contain {ENTRY_POINT!r} or to be unset, got "
            f"{allowed!r}, which excludes the plug-in"
        )
    try:
        register()
    except Exception as error:
        raise ValueError(
            f"--speculative-algorithm {ALGORITHM}: the plug-in failed with {type(error).__name__}: {error}"
        ) from error
    return get_spec(name)
