"""What is known about a model's files before any weights are read: whether they exist, and how large they are.

A model is a folder, or a repository on the hub. From a repository, only its configuration and the index of its weights
are read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang.srt.arg_groups.argument_refused import ArgumentRefused

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HUB_TIMEOUT = 10.0  # seconds
TARGET_FLAG = "--model-path"
DRAFTER_FLAG = "--speculative-draft-model-path"
REVISION_FLAGS = {TARGET_FLAG: "--revision", DRAFTER_FLAG: "--speculative-draft-model-revision"}


def refuse_missing(path: str, *, flag: str, needed: str, revision: str | None, with_weights: bool) -> None:
    """Refuse a model whose files do not exist. This asks the hub at most once, without retries.

    Args:
        path: a folder or the name of a repository, not a URL.
        flag: the argument that names the model, TARGET_FLAG or DRAFTER_FLAG.
        needed: what the argument should name.
        revision: the revision of the repository, or None.
        with_weights: whether a folder must have weights.

    Raises:
        ArgumentRefused: names the argument, the model and what is missing.
    """
    from sglang.srt.environ import envs

    found = None
    if os.path.isdir(path):
        found = _missing_in_folder(Path(path), with_weights=with_weights)
    elif os.path.exists(path) or path.endswith(".gguf"):
        kind = "a GGUF file, whose format has no DFlash head" if path.endswith(".gguf") else "a file"
        raise ArgumentRefused(f"DDTREE: {flag}: expected {needed}, got {kind}: {path}.")
    elif os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") != 1:
        found = "which does not exist"
    elif not envs.SGLANG_USE_MODELSCOPE.get():
        found = _missing_on_hub(path, revision, REVISION_FLAGS[flag])
    if found is not None:
        raise ArgumentRefused(f"DDTREE: {flag}: expected {needed}, got {path or repr(path)}, {found}.")


def is_same_file(path: str, other: str) -> bool:
    """Return whether both paths exist and are the same file or folder."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _missing_in_folder(folder: Path, *, with_weights: bool) -> str | None:
    """Return what a model's folder lacks, or None."""
    if not (folder / "config.json").is_file():
        return "which has no config.json" if any(folder.iterdir()) else "which is empty"
    if with_weights and not any(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        return f"which has no weights ({', '.join(WEIGHT_FILES)})"
    return None


def _missing_on_hub(name: str, revision: str | None, revision_flag: str) -> str | None:
    """Return why a repository's config.json is neither in the cache nor on the hub, or None if it is."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return None
        url = hf_hub_url(name, "config.json", revision=revision)
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT)
        return None
    except hub.HFValidationError:
        return "which is not a valid name of a repository"
    except hub.GatedRepoError:
        return "which is gated: accept its terms on the hub, and set HF_TOKEN to your token"
    except hub.RepositoryNotFoundError:
        return "which is neither a folder nor on the hub. If it is private, set HF_TOKEN to your token"
    except hub.RevisionNotFoundError:
        return f"which has no revision {revision!r} ({revision_flag})"
    except hub.EntryNotFoundError:
        return "which has no config.json"
    except Exception as error:  # the hub's HTTP client has errors of its own
        return (
            f"which is not in the cache, and the hub cannot be asked ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'})"
        )


def weight_bytes(path: str, revision: str | None) -> int | None:
    """Return the size of a model's weights.

    Args:
        path: a model that refuse_missing() accepts.
        revision: the revision of the repository, or None.

    Returns:
        Bytes: from the index of the safetensors files, else from the sizes of the files. None if neither is known.
    """
    if os.path.isdir(path):
        return _weight_bytes_in_folder(Path(path))
    try:
        return _weight_bytes_on_hub(path, revision)
    except Exception:  # the size is only shown, and the hub may be out of reach
        return None


def _weight_bytes_in_folder(folder: Path) -> int | None:
    if (folder / INDEX).is_file():
        return _total_size(folder / INDEX)
    sizes = [path.stat().st_size for path in folder.glob(WEIGHT_FILES[0])]
    return sum(sizes) or None


def _weight_bytes_on_hub(name: str, revision: str | None) -> int | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return get_hf_file_metadata(
            hf_hub_url(name, SINGLE_FILE, revision=revision), timeout=HUB_TIMEOUT
        ).size
    except EntryNotFoundError:
        return _total_size(Path(hf_hub_download(name, INDEX, revision=revision, etag_timeout=HUB_TIMEOUT)))


def _total_size(index: Path) -> int | None:
    """Return the size that an index of safetensors files states."""
    return json.loads(index.read_text()).get("metadata", {}).get("total_size")
