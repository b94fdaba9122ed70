"""Which drafters DDTREE refuses, before any weights are read.

refuse_path() looks for the drafter's files, and drafter_faults() compares its configuration with the target's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import model_config_of

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

FLAG = "--speculative-draft-model-path"
NEEDED = "a folder with a DFlash drafter, or the name of such a repository on the hub"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
HUB_TIMEOUT = 10.0  # seconds


def refuse_path(args: ServerArgs) -> None:
    """Refuse a drafter whose files are not there. It asks the hub at most once, without retries.

    Args:
        args: the server's arguments as the user gave them, with a drafter.

    Raises:
        ValueError: names the drafter and what is missing.
    """
    from sglang.srt.environ import envs
    from sglang.srt.utils.common import is_remote_url

    path = args.speculative_draft_model_path
    if is_remote_url(path):
        return
    if path == args.model_path or _is_same_file(path, args.model_path):
        raise ValueError(f"DDTREE: {FLAG}: expected {NEEDED}, got the target itself: {path}.")
    if os.path.isdir(path):
        load_format = args.speculative_draft_load_format or args.load_format
        _refuse_folder(Path(path), with_weights=load_format in ("auto", "safetensors"))
    elif os.path.exists(path) or path.endswith(".gguf"):
        kind = "a GGUF file, whose format has no DFlash head" if path.endswith(".gguf") else "a file"
        raise ValueError(f"DDTREE: {FLAG}: expected {NEEDED}, got {kind}: {path}.")
    elif os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(f"DDTREE: {FLAG}: expected {NEEDED}, got {path}, which does not exist.")
    elif not envs.SGLANG_USE_MODELSCOPE.get():
        _refuse_repository(path, args.speculative_draft_model_revision)


def _is_same_file(path: str, other: str) -> bool:
    """Return whether both paths exist and are the same file or folder."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _refuse_folder(folder: Path, *, with_weights: bool) -> None:
    """Raise ValueError for a folder without a configuration or without weights."""
    if not (folder / "config.json").is_file():
        found = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ValueError(f"DDTREE: {FLAG}: expected {NEEDED}, got {folder}, which {found}.")
    if with_weights and not any(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        raise ValueError(
            f"DDTREE: {FLAG}: expected {NEEDED}, got {folder}, which has no weights "
            f"({', '.join(WEIGHT_FILES)})."
        )


def _refuse_repository(name: str, revision: str | None) -> None:
    """Raise ValueError for a repository whose config.json is neither in the cache nor on the hub."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        url = hf_hub_url(name, "config.json", revision=revision)
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT)
        return
    except hub.HFValidationError:
        found = "which is no name of a repository"
    except hub.GatedRepoError:
        found = "which is gated: accept its terms on the hub, and set HF_TOKEN to your token"
    except hub.RepositoryNotFoundError:
        found = "which is neither a folder nor on the hub. If it is private, set HF_TOKEN to your token"
    except hub.RevisionNotFoundError:
        found = f"which has no revision {revision!r} (--speculative-draft-model-revision)"
    except hub.EntryNotFoundError:
        found = "which has no config.json"
    except Exception as error:  # the hub's HTTP client has errors of its own
        found = (
            f"which is not in the cache, and the hub cannot be asked ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'})"
        )
    raise ValueError(f"DDTREE: {FLAG}: expected {NEEDED}, got {name}, {found}.")


def refuse_drafter(args: ServerArgs) -> None:
    """Refuse a drafter whose configuration does not fit the target's.

    Args:
        args: the server's arguments, after refuse_path().

    Raises:
        ValueError: names the drafter, the key of its config.json, what was expected and what came.
    """
    for fault in drafter_faults(drafter_config(args), model_config_of(args).hf_text_config):
        raise ValueError(f"DDTREE: {FLAG}: {args.speculative_draft_model_path}: config.json: {fault}")


def drafter_config(args: ServerArgs) -> PretrainedConfig:
    """Read the drafter's configuration.

    Args:
        args: the server's arguments.

    Returns:
        The configuration, with --json-model-override-args applied, as upstream does.

    Raises:
        ValueError: it cannot be read.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = args.speculative_draft_model_path
    try:
        return get_config(
            path,
            trust_remote_code=args.trust_remote_code,
            revision=args.speculative_draft_model_revision,
            model_override_args=json.loads(args.json_model_override_args),
        )
    except Exception as error:  # a file that is not JSON, a model_type that nobody knows
        raise ValueError(
            f"DDTREE: {FLAG}: {path}: config.json: expected the configuration of a DFlash drafter, got one "
            f"that cannot be read: {error}"
        ) from error


def drafter_faults(drafter: PretrainedConfig, target: PretrainedConfig) -> Iterator[str]:
    """Compare a drafter's configuration with its target's.

    Args:
        drafter: configuration of the drafter.
        target: text configuration of the target.

    Yields:
        For each key that does not fit: its name, what was expected and what came.
    """
    from sglang.srt.speculative.ddtree.heads import DRAFT_MODELS, head_faults
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    architectures = list(getattr(drafter, "architectures", None) or [])
    if not set(architectures).intersection(DRAFT_MODELS):
        yield f"architectures: expected one of {list(DRAFT_MODELS)}, got {architectures}. {_advice(architectures)}"
        return  # the other keys mean something else there
    try:
        parsed = parse_dflash_draft_config(draft_hf_config=drafter)
    except (ValueError, TypeError) as error:
        yield f"expected the keys of a DFlash drafter, got one with a wrong value: {error}"
        return
    yield from head_faults(drafter, target.vocab_size)
    num_layers = target.num_hidden_layers * getattr(target, "num_loops", 1)  # upstream numbers loops through
    yield from _layer_faults(parsed.target_layer_ids, num_layers)
    if drafter.hidden_size != target.hidden_size:
        yield (
            f"hidden_size: expected {target.hidden_size}, the target's, got {drafter.hidden_size}. The drafter "
            "was trained for another model."
        )
    vocab_size = getattr(drafter, "vocab_size", None)
    if vocab_size is not None and vocab_size > target.vocab_size:
        yield (
            f"vocab_size: expected at most {target.vocab_size}, the target's, got {vocab_size}. The drafter was "
            "trained for another vocabulary."
        )
    mask = parsed.mask_token_id
    if mask is not None and mask >= target.vocab_size:
        yield (
            f"dflash_config.mask_token_id: expected a token below {target.vocab_size}, the target's vocab_size, "
            f"got {mask}."
        )


def _layer_faults(ids: list[int] | None, num_layers: int) -> Iterator[str]:
    """Yield what is wrong with the ids of the target layers that the drafter reads.

    Args:
        ids: from the drafter's configuration. Upstream would guess missing ones.
        num_layers: of the target.
    """
    if ids is None:
        yield "dflash_config.target_layer_ids: expected the target layers that the drafter reads, got none."
    elif len(set(ids)) < len(ids) or not all(0 <= layer < num_layers for layer in ids):
        yield (
            f"dflash_config.target_layer_ids: expected different layers of the target, 0 to {num_layers - 1}, "
            f"got {ids}."
        )


def _advice(architectures: list[str]) -> str:
    """Return what to do with a drafter of another kind."""
    names = " ".join(architectures).lower()
    if "eagle" in names:
        return "--speculative-algorithm EAGLE or EAGLE3 runs EAGLE heads."
    return "It is not a DFlash drafter."
