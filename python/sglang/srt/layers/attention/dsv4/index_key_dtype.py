"""--dsv4-index-k-dtype: the argument, what it refuses, and the size of a key. Its imports are cheap.

DeepSeek-V4's C4 layers select the compressed tokens that they attend to by index keys. Upstream stores these keys in fp8
or fp4. With bf16 they are stored and read by bf16_index_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from sglang.srt.arg_groups.arg_utils import A
from sglang.srt.arg_groups.argument_refused import (
    ArgumentRefused,
    refuse_others,
    show_refusals_without_traceback,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

IndexKeyDtype = A[
    Literal["auto", "bf16"],
    "DeepSeek-V4 on CUDA only. Data type of the C4 layers' index keys. 'auto' stores what SGLang stores: fp8, or fp4 "
    "with --enable-deepseek-v4-fp4-indexer. 'bf16' stores them unquantized, in 256 instead of 132 bytes per key.",
]

FLAG = "--dsv4-index-k-dtype bf16"
ENTRY_POINT = "dsv4_index_keys"
ARCHITECTURE = "DeepseekV4ForCausalLM"
C4 = 4  # the compression ratio of the layers that have an indexer with these keys
# Each: a field of ServerArgs, the value that is served, and why no other is.
REFUSALS = (
    ("device", "cuda", "the kernels of DeepSeek-V4's indexer run on CUDA only"),
    ("enable_deepseek_v4_fp4_indexer", False, "it stores the same keys in fp4"),
    ("enable_hisparse", False, "it moves selected keys to the host in SGLang's own layout"),
    ("disaggregation_mode", "null", "a peer may keep its keys in another data type"),
    ("hicache_storage_backend", None, "stored pages may hold keys of another data type"),
)

_registered = False


def register() -> None:
    """Entry point `sglang.srt.plugins`: check the argument, and let it choose the attention backend."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention import attention_registry

    show_refusals_without_traceback()

    # The first step that knows the device and reads the model's configuration.
    @register_resolution_hook("handle_model_specific_adjustments")
    def check_args(args: ServerArgs, step: Callable[[ServerArgs], None]) -> None:
        from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

        if args.dsv4_index_k_dtype == "bf16":
            refuse_server_args(resolving_view(args), model_config_of(args).hf_config)
        step(args)

    create = attention_registry.ATTENTION_BACKENDS["dsv4"]

    @attention_registry.register_attention_backend("dsv4")
    def backend(runner: ModelRunner) -> Any:
        created = create(runner)
        if not stores_bf16():
            return created
        from sglang.srt.layers.attention.dsv4.bf16_index_keys import with_bf16_index_keys

        return with_bf16_index_keys(created)

    global _registered
    _registered = True


def refuse_server_args(args: ServerArgs, hf_config: Any) -> None:
    """Refuse what bf16 index keys cannot be served with.

    Args:
        args: the arguments, with the device resolved.
        hf_config: the model's configuration.

    Raises:
        ArgumentRefused: names the argument, what was expected and what was given.
    """
    import torch

    refuse_others(FLAG, args, REFUSALS)
    if torch.version.hip:
        raise ArgumentRefused(f"{FLAG}: expected a CUDA build of torch, got ROCm {torch.version.hip}.")
    architectures = getattr(hf_config, "architectures", None) or []
    if ARCHITECTURE not in architectures:
        raise ArgumentRefused(f"{FLAG}: --model-path: expected a {ARCHITECTURE}, got {architectures}.")
    ratios = sorted(set(getattr(hf_config, "compress_ratios", ())))
    if C4 not in ratios:
        raise ArgumentRefused(
            f"{FLAG}: --model-path: expected layers of compress ratio {C4}, got ratios {ratios}."
        )


def stores_bf16() -> bool:
    """Whether this server stores its index keys in bfloat16. False where no server's arguments are known."""
    from sglang.srt.runtime_context import get_exec

    try:
        kernel = get_exec().kernel
    except ValueError:  # upstream sizes pools outside servers, too
        return False
    return kernel.dsv4_index_k_dtype == "bf16"


def index_key_bytes(index_head_dim: int, use_fp4_indexer: bool) -> int | None:
    """Return the bytes of one index key in the pool.

    Args:
        index_head_dim: elements of a key.
        use_fp4_indexer: whether this pool stores fp4. The pools of ratio 1 and 2 always do.

    Returns:
        The bytes of a bfloat16 key. None if the pool keeps upstream's layout.

    Raises:
        ValueError: bf16 was asked for, and the plug-in that would write and read such keys is not loaded.
    """
    if use_fp4_indexer or not stores_bf16():
        return None
    if not _registered:
        from sglang.srt.environ import envs

        raise ValueError(
            f"{FLAG}: expected SGLANG_PLUGINS to contain {ENTRY_POINT!r} or to be unset, got "
            f"{envs.SGLANG_PLUGINS.get()!r}: the plug-in that reads such keys is not loaded."
        )
    return 2 * index_head_dim
