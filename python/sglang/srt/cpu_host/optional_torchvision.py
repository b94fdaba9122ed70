"""Lets two upstream modules import torchvision names when torchvision is not installed.

``sglang.srt.multimodal.internvl_utils`` and ``sglang.srt.configs.deepseek_ocr`` import torchvision at the top, and
every text model imports both. The patches call ``begin()`` before those import statements and ``end()`` after them. In
between, stand-ins for torchvision are in sys.modules. If they stayed there, transformers would conclude that
torchvision is installed.
"""

import sys
import types
from importlib.util import find_spec
from typing import Any, NoReturn

_NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _NeedsTorchvision:
    """Stands for a torchvision name. Any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(
            "Processing images needs torchvision, which the CPU profile leaves out. "
            "Install the build that matches this torch: pip install torchvision"
        )


def begin() -> None:
    """Put the stand-ins into sys.modules, unless torchvision is installed."""
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        return
    modules = {name: types.ModuleType(name) for name in _NAMES}
    vars(modules["torchvision"])["transforms"] = modules["torchvision.transforms"]
    vars(modules["torchvision.transforms"])["functional"] = modules["torchvision.transforms.functional"]
    for module in modules.values():
        # With __getattr__, names are also resolved after the import: torchvision.transforms is used as T.Compose.
        vars(module).update(__path__=[], __getattr__=_resolve)
    sys.modules.update(modules)


def end() -> None:
    """Remove the stand-ins from sys.modules. Names bound from them keep raising when they are used."""
    for name in _NAMES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__getattr__", None) is _resolve:
            del sys.modules[name]


def _resolve(name: str) -> _NeedsTorchvision:
    if name.startswith("__"):
        raise AttributeError(name)
    return _NeedsTorchvision()
