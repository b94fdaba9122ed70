"""A small target and a small drafter on disk, for tests that resolve a server's arguments."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.test.test_utils import CustomTestCase

load_plugins()

MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=128, intermediate_size=256,
    num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=16,
    max_position_embeddings=512, dtype="float32",
)  # fmt: skip
DRAFTER = MODEL | dict(
    architectures=["DFlashDraftModel"], model_type="qwen3", block_size=8,
    dflash_config=dict(target_layer_ids=[0, 2], mask_token_id=1),
)  # fmt: skip


class ArgumentsCase(CustomTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model, self.drafter = Path(folder.name, "model"), Path(folder.name, "drafter")
        for path, config in ((self.model, MODEL), (self.drafter, DRAFTER)):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            (path / "model.safetensors").touch()  # nothing is loaded

    def resolve(self, **arguments: Any) -> ServerArgs:
        """Return the resolved arguments of a CPU server with DDTREE."""
        args = ServerArgs(
            **dict(
                model_path=str(self.model), speculative_algorithm="DDTREE", device="cpu",
                speculative_draft_model_path=str(self.drafter), attention_backend="torch_native",
                skip_tokenizer_init=True,
            ) | arguments
        )  # fmt: skip
        args.resolve_once()
        return args
