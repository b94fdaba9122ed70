"""Graph-versus-eager differential probe: tells whether a captured kernel is wrong, or only received wrong inputs.

The captured graph copies the inputs and outputs of the matched modules and ops into buffers, on the stream of each op.
The buffers are allocated before the capture. Clones from the graph's pool would change which blocks the ops receive,
and could hide the fault.

After a replay the probe does two things. It runs the whole forward eagerly on the same static inputs, which gives the
true inputs of each site. It also reruns each site on the inputs that the graph copied, which gives the true outputs for
those inputs. Only the rows of real requests are compared. Padding rows may hold anything.

The eager forward stores the same keys and values to the same slots again. Models whose state is not idempotent (Mamba)
can't be probed. Eager breaks are not part of a graph and are skipped.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.arguments import diff_pattern
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

logger = logging.getLogger(__name__)

CAPTURED_WRONG = "captured-wrong-from-right-inputs"
INPUT_WRONG = "inputs-already-wrong"
BOTH_WRONG = "captured-wrong-from-wrong-inputs"

_ROWS_SHOWN = 8
_Key = tuple[str, int]  # the name of a module or op, and the number of this call of it in the forward
_STASHED = object()  # replaces a tensor among the arguments of a call


@dataclass(frozen=True)
class Finding:
    """A site whose captured run differs from the eager one.

    Args:
        rows: the first wrong rows.
        difference: the largest absolute difference.
    """

    verdict: str
    site: str
    bucket: Hashable
    step: int
    rows: tuple[int, ...]
    difference: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, bucket {self.bucket}, {self.site}: {self.verdict}, rows {list(self.rows)}, "
            f"largest difference {self.difference:.3g}"
        )


@dataclass
class _Site:
    """One call of a module or op in the forward of one bucket. ``inputs`` and ``outputs`` are in pytree order."""

    name: str
    call: Callable
    spec: Any
    leaves: list
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    captured: bool = False

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.inputs + self.outputs)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def valid_rows(tensor: torch.Tensor, bucket: int, real: int) -> torch.Tensor:
    """The rows of ``tensor`` that belong to real requests (or tokens).

    Args:
        bucket: requests (or tokens) that the graph was captured for.
        real: how many of them are real.
    Returns:
        All of ``tensor`` if its rows do not correspond to requests.
    """
    if tensor.ndim == 0 or tensor.shape[0] == 0 or tensor.shape[0] % bucket:
        return tensor
    return tensor[: tensor.shape[0] // bucket * real]


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> tuple[tuple[int, ...], float]:
    """Compare two runs of the same kernel, which may differ only in the order of reductions. NaN equals NaN.

    Args:
        tolerance: the largest difference that is allowed, in units in the last place of the largest value of ``want``.
    Returns:
        (the first rows that differ, the largest absolute difference).
    """
    if got.shape != want.shape:
        return tuple(range(min(got.shape[0] if got.ndim else 1, _ROWS_SHOWN))), float("inf")
    if not got.is_floating_point() or got.element_size() == 1:
        unequal = got.view(torch.uint8) != want.view(torch.uint8) if got.is_floating_point() else got != want
        apart = (got.float() - want.float()).abs()
    else:
        a, b = got.double(), want.double()
        apart = (a - b).abs()
        finite = b[b.isfinite()]
        bound = tolerance * torch.finfo(want.dtype).eps * (finite.abs().max() if finite.numel() else 1.0)
        unequal = ~((apart <= bound) | (a == b) | (a.isnan() & b.isnan()))
    if not bool(unequal.any()):
        return (), 0.0
    by_row = unequal.reshape(unequal.shape[0], -1).any(1) if unequal.ndim else unequal.reshape(1)
    largest = apart[unequal].nan_to_num(nan=float("inf")).max().item()
    return tuple(by_row.nonzero().flatten()[:_ROWS_SHOWN].tolist()), largest


class GraphDiff:
    """The probe of one model.

    Args:
        pattern: regular expression. It is searched in qualified module names and in op names such as ``aten::mm``.
        model: the model whose modules are matched. None matches ops only.
        tolerance: see ``difference``.
        capturing: tells whether the current stream is being captured. Tests replace it.
    Raises:
        ArgumentRefused: ``pattern`` is not a valid regular expression.
    """

    def __init__(
        self,
        pattern: str,
        model: torch.nn.Module | None,
        tolerance: float = 4.0,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._pattern = diff_pattern(pattern)
        self._modules = (
            [(n, m) for n, m in model.named_modules() if n and self._pattern.search(n)] if model else []
        )
        self._tolerance = tolerance
        self._capturing = capturing
        self._sites: dict[Hashable, dict[_Key, _Site]] = {}
        self._forwards: dict[Hashable, Callable] = {}
        self._missed: set[str] = set()
        self.findings: list[Finding] = []
        self.steps = 0

    def nbytes(self) -> int:
        """The size of all buffers in bytes."""
        return sum(site.nbytes() for sites in self._sites.values() for site in sites.values())

    @contextmanager
    def warmup(self, bucket: Hashable, forward: Callable) -> Iterator[None]:
        """Wrap an eager warm-up of ``forward`` and allocate the buffers of ``bucket``.

        Args:
            forward: the function that will be captured. ``check`` runs it again.
        """
        first = bucket not in self._sites
        self._forwards[bucket] = forward
        sites = self._sites.setdefault(bucket, {})

        def before(key: _Key, call: Callable, args: tuple, kwargs: dict) -> None:
            if key not in sites:
                leaves, spec = tree_flatten((args, kwargs))
                sites[key] = _Site(key[0], call, spec, [], [torch.empty_like(t) for t in tensors_of(leaves)])

        def after(key: _Key, out: Any) -> None:
            if not sites[key].outputs:
                sites[key].outputs = [torch.empty_like(t) for t in tensors_of(out)]

        with self._observe(before, after):
            yield
        if first:
            logger.info(
                "Graph diff: %d sites match %r in bucket %s. All buffers together hold %.1f MiB.",
                len(sites),
                self._pattern.pattern,
                bucket,
                self.nbytes() / 2**20,
            )

    @contextmanager
    def capture(self, bucket: Hashable) -> Iterator[None]:
        """Wrap the captured forward. Adds copies into the buffers, but no allocation and no host synchronization."""
        sites = self._sites.get(bucket, {})

        def stash(buffers: list[torch.Tensor], tensors: list[torch.Tensor], key: _Key) -> bool:
            if [b.shape for b in buffers] != [t.shape for t in tensors]:
                self._missed.add(f"{key[0]} (call {key[1]}, bucket {bucket})")
                return False
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
            return True

        def before(key: _Key, call: Callable, args: tuple, kwargs: dict) -> None:
            if not self._capturing():
                return  # in an eager break, whose replays would not copy anything
            if key not in sites:
                self._missed.add(f"{key[0]} (call {key[1]}, bucket {bucket})")
                return
            leaves, sites[key].spec = tree_flatten((args, kwargs))
            # Keep the arguments that are not tensors, such as the static ForwardBatch. Its tensors are static as well.
            sites[key].leaves = [_STASHED if isinstance(x, torch.Tensor) else x for x in leaves]
            sites[key].call = call
            sites[key].captured = stash(sites[key].inputs, tensors_of(leaves), key)

        def after(key: _Key, out: Any) -> None:
            if key in sites and sites[key].captured:
                sites[key].captured = stash(sites[key].outputs, tensors_of(out), key)

        with self._observe(before, after):
            yield
        if self._missed:
            logger.warning(
                "Graph diff: skipped captured calls that differ from the warm-up: %s", sorted(self._missed)
            )

    @torch.no_grad()
    def check(self, bucket: Hashable, size: int, real: int) -> list[Finding]:
        """Compare the last replay of ``bucket`` with eager runs. Call it before the static inputs change.

        Args:
            size: requests (or tokens) that the graph was captured for.
            real: how many of them were real.
        Returns:
            The findings in execution order. The first one is where the fault began.
        """
        self.steps += 1
        sites = self._sites.get(bucket, {})
        wrong_inputs: dict[_Key, tuple[tuple[int, ...], float]] = {}

        def compare(got: list[torch.Tensor], want: list[torch.Tensor]) -> tuple[tuple[int, ...], float]:
            worst: tuple[tuple[int, ...], float] = ((), 0.0)
            for g, w in zip(got, want, strict=True):
                rows, apart = difference(
                    valid_rows(g, size, real), valid_rows(w, size, real), self._tolerance
                )
                if rows and apart >= worst[1]:
                    worst = (rows, apart)
            return worst

        def before(key: _Key, call: Callable, args: tuple, kwargs: dict) -> None:
            if key not in sites or not sites[key].captured:
                return
            # An argument that the op writes may hold anything before the call, so it does not count as an input.
            written = {id(t) for t in call.written(args, kwargs)} if isinstance(call, _Op) else set()
            tensors = zip(sites[key].inputs, tensors_of((args, kwargs)), strict=True)
            read = [(stashed, t) for stashed, t in tensors if id(t) not in written]
            wrong_inputs[key] = compare([stashed for stashed, _ in read], [t for _, t in read])

        with self._observe(before, lambda key, out: None):
            self._forwards[bucket]()
        found = []
        for key, site in sites.items():
            if not site.captured:
                continue
            stashed = iter([t.clone() for t in site.inputs])
            leaves = [next(stashed) if x is _STASHED else x for x in site.leaves]
            args, kwargs = tree_unflatten(leaves, site.spec)
            rows, apart = compare(site.outputs, tensors_of(site.call(*args, **kwargs)))
            input_rows, input_apart = wrong_inputs.get(key, ((), 0.0))
            if rows:
                verdict = BOTH_WRONG if input_rows else CAPTURED_WRONG
            elif input_rows:
                verdict, rows, apart = INPUT_WRONG, input_rows, input_apart
            else:
                continue
            found.append(Finding(verdict, site.name, bucket, self.steps, rows, apart))
        for finding in found:
            logger.error("Graph diff: %s", finding)
        self.findings += found
        return found

    @contextmanager
    def _observe(self, before: Callable, after: Callable) -> Iterator[None]:
        calls: dict[str, int] = {}
        open_calls: list[_Key] = []
        handles = []
        # The probe's own operations must not be observed as part of the forward.
        quiet = torch.utils._python_dispatch._disable_current_modes

        def enter(name: str, call: Callable, args: tuple, kwargs: dict) -> None:
            key = (name, calls.setdefault(name, 0))
            calls[name] += 1
            open_calls.append(key)
            with quiet():
                before(key, call, args, kwargs)

        def leave(out: Any) -> None:
            with quiet():
                after(open_calls.pop(), out)

        for name, module in self._modules:

            def pre(module: torch.nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                enter(name, module.forward, args, kwargs)

            def post(module: torch.nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
                leave(out)

            handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
            handles.append(module.register_forward_hook(post, with_kwargs=True))
        try:
            with _MatchedOps(self._pattern, enter, leave):
                yield
        finally:
            for handle in handles:
                handle.remove()


class _MatchedOps(GuardMode):
    def __init__(self, pattern: re.Pattern, enter: Callable, leave: Callable) -> None:
        super().__init__()
        self._pattern, self._enter, self._leave = pattern, enter, leave

    def handle(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name
        if func.is_view or not self._pattern.search(name):
            return self.call(func, args, kwargs)
        op = _Op(func)
        self._enter(name, op, args, kwargs)
        out = self.call(func, args, kwargs)
        self._leave(op.results(out, args, kwargs))
        return out


class _Op:
    """A matched op as the call of a site. The results of an op that returns nothing are the arguments it writes."""

    def __init__(self, func: OpOverload) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.results(self._func(*args, **kwargs), args, kwargs)

    def results(self, out: Any, args: tuple, kwargs: dict) -> Any:
        return out if self._func._schema.returns else self.written(args, kwargs)

    def written(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        arguments = enumerate(self._func._schema.arguments)
        return tensors_of(
            [
                given.get(i, given.get(a.name))
                for i, a in arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
        )
