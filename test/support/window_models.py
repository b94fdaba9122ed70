"""Tiny random targets some of whose layers have a sliding window and a KV pool of their own.

The drafter of support.models.write_models() fits each of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.models import VOCABULARY

if TYPE_CHECKING:
    from transformers import MiMoV2FlashForCausalLM

    from support.engine import Engine

WINDOW = 16  # tokens before the query, in layers 0 and 2
PATTERN = [1, 0, 1]  # which layers have it


def write_windowed_llama(target: str, folder: Path) -> str:
    """Write the target of write_models() with a config that gives layers 0 and 2 a KV pool for windows.

    The layers themselves have no window: see the job WindowedLlama.

    Args:
        target: folder of that target.
        folder: folder to create.

    Returns:
        The new folder.
    """
    shutil.copytree(target, folder)
    file = folder / "config.json"
    options = dict(is_hybrid_swa=True, hybrid_layer_pattern=PATTERN, sliding_window=WINDOW)
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return str(folder)


def _mimo_v2() -> MiMoV2FlashForCausalLM:
    """A random MiMo-V2 with dense layers of two KV shapes: two KV heads in layers 0 and 2, one in layer 1.

    The sinks have no weight, because SGLang's torch backend has none.
    """
    from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

    torch.manual_seed(7)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in PATTERN]
    model = MiMoV2FlashForCausalLM(
        MiMoV2FlashConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=1, head_dim=64, v_head_dim=64, sliding_window=WINDOW + 1, layer_types=kinds,
            mlp_layer_types=["dense"] * 3, max_position_embeddings=2048, rms_norm_eps=1e-6, attention_value_scale=0.7,
            rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), rope), bos_token_id=0,
            eos_token_id=1, dtype="float32",
        )
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
        else:
            weight.data.fill_(-1e9 if name.endswith("sinks") else 1.0)
    return model


def write_mimo_v2(folder: Path) -> str:
    """Write a random MiMo-V2 with dense layers of two KV shapes, in float32.

    Args:
        folder: folder to create.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    weights = {name: weight for name, weight in _mimo_v2().state_dict().items() if not name.endswith("sinks")}
    save_file(weights, folder / "model.safetensors")
    heads: dict[str, Any] = dict(num_attention_heads=4, head_dim=64, v_head_dim=64)
    # As published. Its own model type would make transformers 5.19 rewrite the rotary parameters, which SGLang 0.5.23
    # does not understand then.
    config = dict(
        architectures=["MiMoV2FlashForCausalLM"], model_type="llama", vocab_size=VOCABULARY, hidden_size=128,
        intermediate_size=256, num_hidden_layers=3, num_key_value_heads=1, **heads,
        **{f"swa_{name}": value for name, value in heads.items()}, swa_num_key_value_heads=2, hybrid_layer_pattern=PATTERN,
        sliding_window=WINDOW, sliding_window_size=WINDOW, moe_layer_freq=[0, 0, 0], n_routed_experts=4,
        num_experts_per_tok=2, layernorm_epsilon=1e-6, rms_norm_eps=1e-6, attention_value_scale=0.7,
        attention_bias=False, max_position_embeddings=2048, rope_theta=1e4, swa_rope_theta=1e4,
        partial_rotary_factor=0.5, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, hidden_act="silu",
        add_swa_attention_sink_bias=False, add_full_attention_sink_bias=False, encoder_only=False, dtype="float32",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_gemma4(
    folder: Path, *, heads: tuple[int, int] = (256, 512), dtype: torch.dtype = torch.bfloat16
) -> str:
    """Write a random Gemma 4, whose layers 0 and 1 have a window of 33 tokens.

    Its LM head is its embedding. It also has a tiny vision tower, which nothing uses.

    Args:
        folder: folder to create.
        heads: sizes of the heads with a window and of the others. Those of the real model are the default.
        dtype: the dtype of the weights.

    Returns:
        The folder.
    """
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(8)
    text: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=heads[0], global_head_dim=heads[1], sliding_window=33, max_position_embeddings=2048,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=30.0, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, dtype=dtype,
    )  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, position_embedding_size=64, dtype=dtype,
    )  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None, dtype=dtype)
    model = Gemma4ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
        elif ".post_" in name:  # else the embedding, which is also the head, would outweigh the layers
            weight.data.fill_(16.0)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def mimo_v2_choices(prompt: list[int], output: list[int]) -> list[int]:
    """Return write_mimo_v2()'s first choice at each token of the output, as transformers computes it."""
    with torch.no_grad():
        logits = _mimo_v2()(torch.tensor([[*prompt, *output[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def gemma4_choices(folder: str, prompt: list[int], output: list[int]) -> list[int]:
    """Return a Gemma 4's first choice at each token of the output, as transformers computes it.

    Args:
        folder: the folder that write_gemma4() wrote to.
        prompt, output: tokens.
    """
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *output[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


class WindowedLlama:
    """Runs a job on a Llama whose layers 0 and 2 have a window.

    See watch_window_slots(): a read of a freed slot would spread NaN.

    Args:
        job: the job to run.
        shared: layer 2 has no K and V, and reads those of layer 0, as in YOCO and Gemma 4.

    Returns:
        What the job returns, and the number of tokens whose slots have been freed.
    """

    def __init__(self, job: Callable[[Engine], Any], *, shared: bool = False) -> None:
        self.job = job
        self.shared = shared

    def before(self) -> None:
        from sglang.srt.models import llama

        shared = self.shared

        class Windowed(llama.RadixAttention):
            def __init__(self, *args: Any, layer_id: int, **options: Any) -> None:
                self.borrows = shared and layer_id == 2
                super().__init__(*args, layer_id=0 if self.borrows else layer_id, **options)
                self.sliding_window_size = WINDOW if layer_id != 1 else -1

            def forward(self, q: Any, k: Any, v: Any, forward_batch: Any, **options: Any) -> Any:
                if self.borrows:
                    k = v = None
                    options["save_kv_cache"] = False
                return super().forward(q, k, v, forward_batch, **options)

        llama.RadixAttention = Windowed

    def __call__(self, engine: Engine) -> tuple[Any, int]:
        slots = engine.scheduler.token_to_kv_pool_allocator
        freed = watch_window_slots(slots) if hasattr(slots, "swa_attn_allocator") else []
        return self.job(engine), sum(freed)


def watch_window_slots(allocator: Any) -> list[int]:
    """Make the window layers' pool give its last slots first, and fill the slots that it frees with NaN.

    Otherwise a token would have the same slot in both pools for a long time.

    Args:
        allocator: the allocator of an engine without requests.

    Returns:
        The growing list of how many slots have been freed.
    """
    windows = allocator.swa_attn_allocator
    windows.free_pages = windows.free_pages.flip(0)
    freed: list[int] = []
    page = allocator.page_size
    pool = allocator.get_kvcache().swa_kv_pool

    def poison(slots: torch.Tensor) -> None:
        freed.append(slots.numel())
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[slots] = float("nan")

    free, free_page_ids = windows.free, windows.free_page_ids

    def free_slots(slots: torch.Tensor) -> None:
        poison(slots)
        free(slots)

    def free_pages(pages: torch.Tensor) -> None:
        poison((pages[:, None] * page + pages.new_tensor(range(page))).flatten())
        free_page_ids(pages)

    windows.free, windows.free_page_ids = free_slots, free_pages
    return freed
