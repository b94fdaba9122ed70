"""Base classes of test cases that compare DDTREE with plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.test.test_utils import CustomTestCase

from support.cuda import CUDA
from support.models import write_models_for


class DDTreeCase(CustomTestCase):
    """A test case with tiny models and the engine arguments of both kinds of decoding.

    Attributes:
        target: folder of the target.
        plain: arguments of an engine that decodes plainly.
        tree: arguments of an engine that runs DDTREE.
        context: most tokens of a request.
    """

    target: str
    plain: dict[str, Any]
    tree: dict[str, Any]
    context = 2048

    @classmethod
    def setUpClass(cls) -> None:
        _, cls.target, drafter = write_models_for(cls, context=cls.context)
        cls.plain = {"model_path": cls.target}
        cls.tree = cls.plain | {
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": drafter,
        }


class CudaCase(DDTreeCase):
    """Engines on CUDA. All weights are bfloat16 numbers, so a definition in float32 is of the same model."""

    @classmethod
    def setUpClass(cls) -> None:
        from safetensors.torch import load_file, save_file

        super().setUpClass()
        file = Path(cls.target) / "model.safetensors"
        weights = {name: weight.bfloat16().float() for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        cls.plain |= CUDA
        cls.tree |= CUDA
