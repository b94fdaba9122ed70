"""What the dispatch modes of this package have in common: they see what runs and change nothing about it."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GuardMode(TorchDispatchMode):
    """A dispatch mode with a ``handle(func, args, kwargs)``, which runs ``func`` through ``call`` and returns its result.

    Compiled regions stay compiled: under a mode that doesn't ask for it torch runs them eagerly, also those that it has
    compiled already, and torch 2.13 never compiles them again. Higher-order operators pass. And a custom op whose kernel
    is Python is seen from the inside: SGLang has some that fork streams, and a handler runs with its own mode off.
    """

    supports_higher_order_operators = True

    _on: ClassVar[list[GuardMode]] = []

    @classmethod
    def on(cls) -> tuple[GuardMode, ...]:
        """The modes that are on, the outermost first."""
        return tuple(cls._on)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> GuardMode:
        self._on.append(self)
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        self._on.remove(self)
        super().__exit__(*exc)

    def capture_follows(self, stream: torch.cuda.Stream) -> None:
        """The capture that is open was ordered after what ``stream`` queued before it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # higher-order
        return self.handle(func, args, kwargs)

    def call(self, func, args: tuple, kwargs: dict) -> Any:
        """``func`` on these arguments, as its next mode or its kernel does it."""
        # The innermost handler runs the kernel; by then all these modes are off.
        if torch._C._len_torch_dispatch_stack() or (keys := _python_kernel(func, _device_of(args))) is None:
            return func(*args, **kwargs)
        with ExitStack() as again:
            for mode in GuardMode.on():
                TorchDispatchMode.__enter__(mode)
                again.push(functools.partial(TorchDispatchMode.__exit__, mode))
            return func.redispatch(keys, *args, **kwargs)


def _device_of(args: tuple) -> str | None:
    return next((a.device.type for a in args if isinstance(a, torch.Tensor)), None)


@functools.cache
def _python_kernel(func, device: str | None) -> torch._C.DispatchKeySet | None:
    """The dispatch key of ``device`` ("cuda") where ``func``'s kernel there was registered from Python."""
    if device is None:
        return None
    schema = func._schema
    name = "/".join(schema.name.split("::")) + (f".{schema.overload_name}" if schema.overload_name else "")
    key = device.upper()
    registered = getattr(torch.library, "_impls", ())
    if any(f"{name}/{k}" in registered for k in (key, "CompositeExplicitAutograd")):
        return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return None
