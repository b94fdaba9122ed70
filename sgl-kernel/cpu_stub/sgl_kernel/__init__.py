"""`sgl_kernel` on a host without CUDA.

SGLang imports names from `sgl_kernel` in many modules and calls few of them when it runs on a CPU. Here the ones
that it calls there are real (`cpu_ops`); every other name is a function that raises when called, so that importing
a module costs nothing and using what a CPU does not have says so.

Our own ops (tree verify and the draft tree) live in the subpackage `sgl_kernel.ddtree`, from the distribution
`sglang-kernel-ddtree`: beside this file here, beside upstream's files on a CUDA host.
"""

from sgl_kernel import cpu_ops
from sgl_kernel.cpu_ops import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu

__version__ = "0.4.10+cpu"
__all__ = ["DeviceOnlyError", "assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]


class DeviceOnlyError(RuntimeError):
    """Raised by a call of an `sgl_kernel` function that this host has no kernel for."""


def _device_only(qualified_name: str):
    def raise_device_only(*args, **kwargs):
        raise DeviceOnlyError(
            f"{qualified_name} needs a CUDA device: this host has sglang-kernel {__version__}, "
            "which holds only the CPU ops. Choose an option that does not call it, or run on a GPU host."
        )

    raise_device_only.__name__ = qualified_name.rpartition(".")[2]
    raise_device_only.__qualname__ = qualified_name
    return raise_device_only


def __getattr__(name: str):
    # Introspection (inspect, pickle, doctest) must see what is really here, and `from sgl_kernel import ddtree` looks
    # for a submodule only after an AttributeError.
    if name.startswith("__") or name == "ddtree":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _device_only(f"{__name__}.{name}")


cpu_ops.register(_device_only)
