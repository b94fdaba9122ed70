"""`sgl_kernel` on a host without CUDA.

SGLang imports names from `sgl_kernel` in many modules, but calls few of them on a CPU. Those few are implemented in
`cpu_ops`. Every other name is a function that raises when called, so imports succeed and a call that needs a GPU fails
with a clear error.

Our own ops (tree verify and the draft tree) are in the subpackage `sgl_kernel.ddtree`, which the distribution
`sglang-kernel-ddtree` installs into this package, or into upstream's on a CUDA host.
"""

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel import cpu_ops
from sgl_kernel.cpu_ops import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu

__version__ = "0.4.10+cpu"
__all__ = ["DeviceOnlyError", "assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]


class DeviceOnlyError(RuntimeError):
    """A call of an `sgl_kernel` function that needs a CUDA device."""


def _device_only(qualified_name: str) -> Callable[..., NoReturn]:
    def raise_device_only(*args: object, **kwargs: object) -> NoReturn:
        raise DeviceOnlyError(
            f"{qualified_name} needs a CUDA device, and sglang-kernel {__version__} on this host has only CPU ops. "
            "Choose an option that does not call it, or run on a GPU host."
        )

    raise_device_only.__name__ = qualified_name.rpartition(".")[2]
    raise_device_only.__qualname__ = qualified_name
    return raise_device_only


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # Introspection (inspect, pickle, doctest) must see only real attributes, and `from sgl_kernel import ddtree` looks
    # for a submodule only after an AttributeError.
    if name.startswith("__") or name == "ddtree":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _device_only(f"{__name__}.{name}")


cpu_ops.register(_device_only)
