"""Graph-versus-eager differential probe: is a captured kernel wrong, or was its input wrong already?

Inputs and outputs of the matched modules and ops are copied, on the op's own stream, into buffers that were allocated
before the capture: clones from the graph's pool would change which blocks the ops get, and can hide what is looked
for. After a replay the whole forward runs once more eagerly on the same static inputs, which gives each site's true
inputs, and each site runs once more on the inputs that were stashed in the graph, which gives its true output for
them. Only the rows of real requests are compared, since padding rows hold anything.

The eager forward stores the same keys and values to the same slots again. A model whose state is not idempotent
(Mamba) can't be probed. What an eager break runs is no part of a graph and is left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.graph_guard.dispatch import GuardMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

logger = logging.getLogger(__name__)

CAPTURED_WRONG = "captured-wrong-from-right-inputs"
INPUT_WRONG = "inputs-already-wrong"
BOTH_WRONG = "captured-wrong-from-wrong-inputs"

_ROWS_SHOWN = 8
_STASHED = object()  # stands for a tensor among a call's arguments


@dataclass(frozen=True)
class Finding:
    """A site whose captured run differs. ``rows``: the first of its wrong rows; ``difference``: the largest absolute."""

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
    """One call of a module or op in the forward of one bucket. ``inputs`` and ``outputs``: buffers, in pytree order."""

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
    """The rows of ``tensor`` that belong to the ``real`` of ``bucket`` requests (or tokens); all when it has others."""
    if tensor.ndim == 0 or tensor.shape[0] == 0 or tensor.shape[0] % bucket:
        return tensor
    return tensor[: tensor.shape[0] // bucket * real]


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> tuple[tuple[int, ...], float]:
    """(rows that differ, largest absolute difference); NaN equals NaN.

    ``tolerance`` counts units in the last place of the largest value that ``want`` holds: the same kernel runs twice,
    only its reduction order may differ.
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
        pattern: regular expression, searched in qualified module names and in op names such as ``aten::mm``.
        model: its modules are matched; may be None to match ops alone.
        tolerance: see ``difference``.
        capturing: whether the current stream is being captured; tests pass another.
    Raises:
        ValueError: ``pattern`` is no regular expression.
    """

    def __init__(
        self,
        pattern: str,
        model: torch.nn.Module | None,
        tolerance: float = 4.0,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as e:
            raise ValueError(f"--debug-graph-diff must be a regular expression, got {pattern!r}: {e}") from e
        self._modules = (
            [(n, m) for n, m in model.named_modules() if n and self._pattern.search(n)] if model else []
        )
        self._tolerance = tolerance
        self._capturing = capturing
        self._sites: dict[Hashable, dict[tuple[str, int], _Site]] = {}
        self._forwards: dict[Hashable, Callable] = {}
        self._missed: set[str] = set()
        self.findings: list[Finding] = []
        self.steps = 0

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(site.nbytes() for sites in self._sites.values() for site in sites.values())

    @contextmanager
    def warmup(self, bucket: Hashable, forward: Callable) -> Iterator[None]:
        """Around an eager warm-up: allocates the buffers of ``bucket``. ``forward`` is what will be captured."""
        first = bucket not in self._sites
        self._forwards[bucket] = forward
        sites = self._sites.setdefault(bucket, {})

        def before(key, call, args, kwargs):
            if key not in sites:
                leaves, spec = tree_flatten((args, kwargs))
                sites[key] = _Site(key[0], call, spec, [], [torch.empty_like(t) for t in tensors_of(leaves)])

        def after(key, out):
            if not sites[key].outputs:
                sites[key].outputs = [torch.empty_like(t) for t in tensors_of(out)]

        with self._observe(before, after):
            yield
        if first:
            logger.info(
                "Graph diff: %d sites match %r in bucket %s; buffers now hold %.1f MiB.",
                len(sites),
                self._pattern.pattern,
                bucket,
                self.nbytes() / 2**20,
            )

    @contextmanager
    def capture(self, bucket: Hashable) -> Iterator[None]:
        """Around the captured forward: adds copies to the buffers, no allocation and no host synchronization."""
        sites = self._sites.get(bucket, {})

        def stash(buffers, tensors, key):
            if [b.shape for b in buffers] != [t.shape for t in tensors]:
                self._missed.add(f"{key[0]} (call {key[1]}, bucket {bucket})")
                return False
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
            return True

        def before(key, call, args, kwargs):
            if not self._capturing():
                return  # in an eager break, which doesn't stash when it is replayed
            if key not in sites:
                self._missed.add(f"{key[0]} (call {key[1]}, bucket {bucket})")
                return
            leaves, sites[key].spec = tree_flatten((args, kwargs))
            # Only what isn't stashed is kept: objects such as the static ForwardBatch, whose tensors are static too.
            sites[key].leaves = [_STASHED if isinstance(x, torch.Tensor) else x for x in leaves]
            sites[key].call = call
            sites[key].captured = stash(sites[key].inputs, tensors_of(leaves), key)

        def after(key, out):
            if key in sites and sites[key].captured:
                sites[key].captured = stash(sites[key].outputs, tensors_of(out), key)

        with self._observe(before, after):
            yield
        if self._missed:
            logger.warning(
                "Graph diff: no warm-up call matches these captured ones: %s", sorted(self._missed)
            )

    @torch.no_grad()
    def check(self, bucket: Hashable, size: int, real: int) -> list[Finding]:
        """Compare the last replay of ``bucket`` with eager runs; call it before static inputs change.

        Args:
            size, real: requests (or tokens) that the graph was captured for, and that were real.
        Returns:
            Findings in execution order: the first is where it went wrong.
        """
        self.steps += 1
        sites = self._sites.get(bucket, {})
        wrong_inputs: dict[tuple[str, int], tuple[tuple[int, ...], float]] = {}

        def compare(got: list, want: list) -> tuple[tuple[int, ...], float]:
            worst = ((), 0.0)
            for g, w in zip(got, want, strict=True):
                rows, apart = difference(
                    valid_rows(g, size, real), valid_rows(w, size, real), self._tolerance
                )
                if rows and apart >= worst[1]:
                    worst = (rows, apart)
            return worst

        def before(key, call, args, kwargs):
            if key not in sites or not sites[key].captured:
                return
            # What it writes may hold anything before, so that says nothing about its inputs.
            written = {id(t) for t in call.written(args, kwargs)} if isinstance(call, _Op) else ()
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
        open_calls: list[tuple[str, int]] = []
        handles = []
        # Compare, stash and rerun are no part of the forward.
        quiet = torch.utils._python_dispatch._disable_current_modes

        def enter(name, call, args, kwargs):
            key = (name, calls.setdefault(name, 0))
            calls[name] += 1
            open_calls.append(key)
            with quiet():
                before(key, call, args, kwargs)

        def leave(out):
            with quiet():
                after(open_calls.pop(), out)

        for name, module in self._modules:

            def pre(module, args, kwargs, name=name):
                enter(name, module.forward, args, kwargs)

            def post(module, args, kwargs, out):
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

    def handle(self, func, args: tuple, kwargs: dict):
        name = func._schema.name
        if func.is_view or not self._pattern.search(name):
            return self.call(func, args, kwargs)
        op = _Op(func)
        self._enter(name, op, args, kwargs)
        out = self.call(func, args, kwargs)
        self._leave(op.results(out, args, kwargs))
        return out


class _Op:
    """A matched op as a site's call. One that returns nothing results in what it writes."""

    def __init__(self, func) -> None:
        self._func = func

    def __call__(self, *args, **kwargs):
        return self.results(self._func(*args, **kwargs), args, kwargs)

    def results(self, out: Any, args: tuple, kwargs: dict) -> Any:
        return out if self._func._schema.returns else self.written(args, kwargs)

    def written(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        given = dict(enumerate(args)) | kwargs
        arguments = enumerate(self._func._schema.arguments)
        return tensors_of(
            [
                given.get(i, given.get(a.name))
                for i, a in arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
        )
