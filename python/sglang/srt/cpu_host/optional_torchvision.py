"""Lets two modules of upstream import torchvision names where torchvision is not installed.

`sglang.srt.multimodal.internvl_utils` and `sglang.srt.configs.deepseek_ocr` import it at the top, and both are
imported on the way to a text model. A stand-in that stays in sys.modules would make transformers believe that
torchvision is there, so it stays for those import statements alone: `begin()` before them, `end()` after.
"""

import sys
import types
from importlib.util import find_spec

_NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _NeedsTorchvision:
    """Using it in any way raises: an image processor was used without torchvision."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self()

    def __call__(self, *args, **kwargs):
        raise ImportError(
            "Processing images needs torchvision, which the CPU profile leaves out. "
            "Install the build that matches this torch: pip install torchvision"
        )


def begin() -> None:
    """Puts the stand-in into sys.modules if torchvision is not installed."""
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        return
    modules = {name: types.ModuleType(name) for name in _NAMES}
    modules["torchvision"].transforms = modules["torchvision.transforms"]
    modules["torchvision.transforms"].functional = modules["torchvision.transforms.functional"]
    for module in modules.values():
        module.__path__ = []
        # torchvision.transforms itself is used as a namespace (T.Compose), so its names resolve late, too.
        module.__getattr__ = _resolve
    sys.modules.update(modules)


def end() -> None:
    """Takes the stand-in out of sys.modules again; names bound from it raise when they are used."""
    for name in _NAMES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__getattr__", None) is _resolve:
            del sys.modules[name]


def _resolve(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _NeedsTorchvision()
