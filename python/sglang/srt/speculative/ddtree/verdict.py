"""The verdict on a target and a drafter, from their configurations alone. check.py is its command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.runtime_context import override_platform
from sglang.srt.speculative.ddtree.budget import widths_up_to
from sglang.srt.speculative.ddtree.checkpoint import (
    TARGET_FLAG,
    refuse_missing,
    weight_bytes,
)
from sglang.srt.speculative.ddtree.coverage import (
    attention_gaps,
    block_gaps,
    draft_window_fault,
    torch_prefill_fault,
    torch_prefill_gaps,
)
from sglang.srt.speculative.ddtree.server_args import AUTO_BUDGET
from sglang.srt.speculative.ddtree.target import kv_layers, refuse_target, state_bytes, target_faults

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

FLOAT8 = dict(fp8_e4m3=torch.float8_e4m3fn, fp8_e5m2=torch.float8_e5m2)  # names of --kv-cache-dtype
H200 = dict(is_cuda=True, is_hopper_with_cuda_12_3=True)  # for override_platform()
NEEDED = "a folder with a model, or the name of such a repository on the hub"


class Verdict(NamedTuple):
    """What check() found.

    Attributes:
        refusals: a sentence for each reason why DDTREE does not serve the models; empty if it does.
        choices: lines that say what it chooses; empty if it refuses them.
    """

    refusals: list[str]
    choices: list[str]

    def show(self, target: str, drafter: str) -> int:
        """Print the verdict on two models, and return the exit status."""
        if self.refusals:
            print(f"DDTREE does not serve {target} with {drafter}:")
        else:
            print(f"DDTREE serves {target} with {drafter}.")
        for line in self.refusals or self.choices:
            print(f"  {line}")
        return 1 if self.refusals else 0


def check(target: str, drafter: str, arguments: list[str] | None = None) -> Verdict:
    """Check a target and a drafter by their configurations.

    Args:
        target: folder or repository.
        drafter: folder or repository.
        arguments: further arguments of launch_server.

    Returns:
        The verdict.

    Raises:
        SystemExit: launch_server knows no such argument.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    asked = ["--model-path", target, "--speculative-algorithm", "DDTREE"]
    asked += ["--speculative-draft-model-path", drafter, "--log-level", "error", *(arguments or [])]
    try:
        args = prepare_server_args(asked)
    except Exception as error:
        return Verdict(_sentences(error), [])
    return check_args(args)


def check_args(args: ServerArgs) -> Verdict:
    """Check the models that a server's arguments name.

    Args:
        args: the arguments as the user gave them. Here they are resolved.

    Returns:
        The verdict.
    """
    try:
        _refuse_missing_target(args.model_path, args.revision)
        with _platform(args.device or ""):
            refuse_target(args)
            args.resolve_once()
            models = Models.of(args)
            refusals = list(_refusals(models))
    except Exception as error:  # of transformers or SGLang, such as for a configuration that is not JSON
        refusals = _sentences(error)
    return Verdict(refusals, [] if refusals else list(_choices(models)))


def _sentences(error: Exception) -> list[str]:
    """Return the reasons in DDTREE's own error, or one line for any other error."""
    lines = str(error).splitlines() or ["no message"]
    if isinstance(error, ArgumentRefused):
        return lines
    return [f"SGLang refuses it with {type(error).__name__}: {lines[0]}"]


def answer(args: ServerArgs) -> int:
    """Answer --check-drafter.

    Args:
        args: the server's arguments as the user gave them. They stay as they are.

    Returns:
        The exit status.
    """
    given = {field.name: getattr(args, field.name) for field in record_fields(type(args))}
    own = dict(check_drafter=False, speculative_algorithm="DDTREE", log_level="error")
    verdict = check_args(type(args)(**given | own))
    return verdict.show(args.model_path, args.speculative_draft_model_path or "no drafter")


def _refuse_missing_target(target: str, revision: str | None) -> None:
    """Raise ArgumentRefused for a missing target, before upstream asks the hub for it again and again."""
    from sglang.srt.utils.common import is_remote_url

    if not is_remote_url(target) and not target.endswith(".gguf"):
        refuse_missing(target, flag=TARGET_FLAG, needed=NEEDED, revision=revision, with_weights=False)


def _platform(device: str) -> AbstractContextManager[Any]:
    """Let SGLang resolve arguments for an H200 if the device is CUDA and this host has no GPU."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return nullcontext()
    return override_platform(**H200)


class Models(NamedTuple):
    """Both models, and the resolved arguments of their server.

    Attributes:
        args: the arguments, resolved. Read-only.
        device: the type of the device.
        target, drafter: upstream's configurations.
        kv_dtype: the dtype of both KV pools.
    """

    args: Any
    device: str
    target: ModelConfig
    drafter: ModelConfig
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, args: ServerArgs) -> Models:
        """Read the configurations that resolved arguments name."""
        from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
        from sglang.srt.configs.model_config import ModelConfig

        view, target = resolved_view(args), model_config_of(args)
        drafter = ModelConfig.from_server_args(
            args,
            model_path=view.speculative_draft_model_path,
            model_revision=view.speculative_draft_model_revision,
            is_draft_model=True,
        )
        name = view.kv_cache_dtype
        kv_dtype = FLOAT8.get(name) or getattr(torch, "bfloat16" if name == "bf16" else name, target.dtype)
        return cls(view, view.device.split(":")[0], target, drafter, kv_dtype)

    def target_gaps(self) -> list[str]:
        """Name the parts of the target's attention that the tree ops do not cover."""
        return self._gaps(self.target)

    def drafter_gaps(self) -> list[str]:
        """Name the parts of the drafter's attention that the tree ops do not cover."""
        from sglang.srt.models.dflash import _get_dflash_layer_attention_params

        config = self.drafter.hf_config
        layers = [_get_dflash_layer_attention_params(config, i) for i in range(config.num_hidden_layers)]
        described = [SimpleNamespace(sliding_window_size=window, attn_type=kind) for window, kind in layers]
        return self._gaps(self.drafter) + block_gaps(described)

    def _gaps(self, config: ModelConfig) -> list[str]:
        shapes = [group.shape for group in kv_layers(config, self.args.tp_size)]
        return attention_gaps(
            shapes, dtype=self.target.dtype, kv_cache_dtype=self.kv_dtype, device=self.device
        )


def _refusals(models: Models) -> Iterator[str]:
    """Say what the worker would refuse once the models are loaded."""
    args = models.args
    prefix = f"DDTREE: {TARGET_FLAG}: {args.model_path}"
    for fault in target_faults(
        models.target, device=models.device, num_nodes=args.speculative_num_draft_tokens
    ):
        yield f"{prefix}: {fault}"
    prefill, _ = attention_backends_of(args)
    mla = models.target.attention_arch == AttentionArch.MLA
    gaps = torch_prefill_gaps(mla=mla, sinks=models.target.has_attention_sinks)
    if prefill == "torch_native" and gaps:
        yield torch_prefill_fault(gaps)
    if models.device == "cpu" and (gaps := models.target_gaps()):
        yield f"{prefix}: expected attention that the tree ops cover, got {'; '.join(gaps)}."
    if args.speculative_draft_window_size is not None and (gaps := models.drafter_gaps()):
        yield draft_window_fault(gaps)


def _choices(models: Models) -> Iterator[str]:
    """Say what the server would use."""
    args = models.args
    prefill, base = attention_backends_of(args)
    num_nodes, block_size = args.speculative_num_draft_tokens, args.speculative_dflash_block_size
    nodes = f"{num_nodes} nodes"
    gaps = models.target_gaps() + models.drafter_gaps()
    if args.speculative_ddtree_budget == AUTO_BUDGET and not gaps:  # Triton's graphs have one width
        nodes = f"{', '.join(map(str, widths_up_to(num_nodes, block_size)))} nodes, as each step chooses"
    yield (
        f"widths: N = {nodes}, F = {block_size} positions per draft pass, K = {args.speculative_eagle_topk} candidates "
        "per position"
    )
    yield f"prefill: {prefill}"
    yield f"verify: {_runs_on(base, models.target_gaps(), args.speculative_ddtree_verify)}"
    yield f"drafter: {_runs_on(base, models.drafter_gaps(), 'native')}"
    yield from _memory(models)
    if models.device == "cuda" and not torch.cuda.is_available():
        yield "note: there is no GPU here. These are the choices for an H200 of unknown memory."


def _runs_on(base: str, gaps: list[str], mode: str) -> str:
    """Say what runs the attention of a verify or of a draft block."""
    if gaps:
        return f"{base}, because the tree ops do not cover {'; '.join(gaps)}"
    return f"the tree ops around {base}" if mode == "native" else f"{mode} around {base}"


def _memory(models: Models) -> Iterator[str]:
    """Say what the models and a verify take on each rank."""
    from sglang.srt.speculative.ddtree.server_args import verify_memory
    from sglang.srt.speculative.dflash_utils import dflash_draft_cell_size_per_token

    args, tp_size = models.args, models.args.tp_size
    sizes = (
        ("target", weight_bytes(args.model_path, args.revision)),
        ("drafter", weight_bytes(args.speculative_draft_model_path, args.speculative_draft_model_revision)),
    )
    yield "weights of all ranks: " + ", ".join(
        f"{name} {'unknown' if size is None else f'{size / 1e9:.3f} GB'}" for name, size in sizes
    )
    pools = [
        f"target {group.bytes_per_token(models.kv_dtype)} bytes per token{' in windows' if group.windowed else ''}"
        for group in kv_layers(models.target, tp_size)
    ]
    own = dflash_draft_cell_size_per_token(
        draft_model_config=models.drafter,
        draft_num_layers=models.drafter.num_hidden_layers,
        draft_kv_cache_dtype=models.kv_dtype,
        tp_size=tp_size,
    )
    yield f"KV per rank: {', '.join([*pools, f'drafter {own} bytes per token'])}"
    if states := state_bytes(models.target, tp_size):
        yield f"recurrent states per rank: {states / 1e6:.1f} MB per request"
    yield (
        f"memory of a verify: {verify_memory(args) / 1e3:.3f} GB of logits and activations for {args.max_running_requests} "
        "requests"
    )
