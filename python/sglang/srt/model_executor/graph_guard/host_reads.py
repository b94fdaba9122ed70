"""Refuses reads of CUDA tensors on the host during a capture, when no values exist yet."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch._ops import OpOverload

_LENGTH = "the length of a data-dependent result"
_HOST_READS = {
    "aten::_local_scalar_dense": "a scalar of a CUDA tensor (Tensor.item(), bool(), int(), float())",
    "aten::equal": "whether two CUDA tensors are equal (torch.equal())",
    "aten::allclose": "whether two CUDA tensors are close (torch.allclose())",
    "aten::nonzero": f"{_LENGTH} (Tensor.nonzero())",
    "aten::masked_select": f"{_LENGTH} (torch.masked_select())",
    "aten::_unique2": f"{_LENGTH} (torch.unique())",
    "aten::unique_dim": f"{_LENGTH} (torch.unique())",
    "aten::unique_consecutive": f"{_LENGTH} (torch.unique_consecutive())",
    "aten::bincount": f"{_LENGTH} (torch.bincount())",
}
_COPY = "a CUDA tensor (a blocking copy to the CPU)"


class HostReadInCaptureError(RuntimeError):
    """The host tried to read a CUDA tensor during a capture."""


def caller_site(skip: tuple[str, ...] = ()) -> str:
    """``function (file:line)`` of the innermost frame outside torch, this package and ``skip``, or ""."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__), *skip)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(inside):
            return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def _read_by_conversion(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    return _COPY if to_host and owns(args[0]) and not kwargs.get("non_blocking") else None


def _read_by_copy(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    to, source, *rest = args
    waits = not (kwargs.get("non_blocking") or any(rest))
    return _COPY if waits and owns(source) and not owns(to) else None


def _read_by_index(args: tuple, kwargs: dict, owns: Callable) -> str | None:
    masks = (torch.bool, torch.uint8)
    if any(i is not None and i.dtype in masks and owns(i) for i in args[1]):
        return f"{_LENGTH} (indexing with a mask)"
    return None


_READS_BY_ARGUMENTS = {
    "aten::_to_copy": _read_by_conversion,
    "aten::copy_": _read_by_copy,
    "aten::index": _read_by_index,
}


@functools.cache
def may_read_on_host(func: OpOverload) -> bool:
    """Whether ``func`` can make the host wait for the value of a CUDA tensor."""
    return func._schema.name in _HOST_READS or func._schema.name in _READS_BY_ARGUMENTS


def refuse_host_read(
    func: OpOverload, args: tuple, kwargs: dict, owns: Callable[[torch.Tensor], bool]
) -> None:
    """Raise if ``func`` would make the host wait for the value of a CUDA tensor.

    Args:
        func, args, kwargs: a call for which may_read_on_host() is true.
        owns: tells whether a tensor is on the device.
    Raises:
        HostReadInCaptureError: names the calling function. CUDA would only report cudaErrorStreamCaptureInvalidated.
    """
    name = func._schema.name
    what, by_arguments = _HOST_READS.get(name), _READS_BY_ARGUMENTS.get(name)
    if args[0].numel() == 0:
        return  # an empty tensor has no value to wait for
    if by_arguments is not None:
        what = by_arguments(args, kwargs, owns)
    elif not owns(args[0]):
        return
    if what is None:
        return
    raise HostReadInCaptureError(
        f"{caller_site()} reads {what} on the host during CUDA graph capture. No values exist during a capture. "
        "Read it after a replay, or skip it while torch.cuda.is_current_stream_capturing()."
    )
