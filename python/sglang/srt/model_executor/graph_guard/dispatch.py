"""The dispatch mode that the guard and its instruments share. It observes operations and does not change them."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class GuardMode(TorchDispatchMode):
    """A dispatch mode whose subclasses implement ``handle``.

    Three things differ from a plain ``TorchDispatchMode``:

    - Compiled regions stay compiled. Under a plain mode torch runs them eagerly, even those that it compiled before,
      and torch 2.13 never compiles them again.
    - Higher-order operators pass through.
    - The mode sees the operations inside a custom op that is written in Python. A handler runs with its own mode off,
      so they would be invisible, and some of SGLang's custom ops fork streams inside.
    """

    supports_higher_order_operators = True

    _on: ClassVar[list[GuardMode]] = []

    @classmethod
    def on(cls) -> tuple[GuardMode, ...]:
        """The active modes, outermost first."""
        return tuple(cls._on)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> GuardMode:
        self._on.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._on.remove(self)
        super().__exit__(*exc)

    def handle(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run ``func`` through ``call`` and return its result."""
        raise NotImplementedError

    def capture_follows(self, stream: torch.cuda.Stream) -> None:
        """Called when the open capture has been ordered after the earlier work of ``stream``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # higher-order
        return self.handle(func, args, kwargs)

    def call(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run ``func`` in the next active mode, or its kernel when there is none."""
        # Only the innermost handler runs the kernel. By then all guard modes are off.
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
def _python_kernel(func: OpOverload, device: str | None) -> Any:
    """The dispatch keys of ``device`` (such as "cuda") if ``func``'s kernel there is written in Python, else None."""
    if device is None:
        return None
    schema = func._schema
    name = "/".join(schema.name.split("::")) + (f".{schema.overload_name}" if schema.overload_name else "")
    key = device.upper()
    registered = getattr(torch.library, "_impls", ())
    if any(f"{name}/{k}" in registered for k in (key, "CompositeExplicitAutograd")):
        return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return None
