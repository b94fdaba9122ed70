"""Gives the device's reports of steps to the budget, and the budget's choices to the worker.

A report is read two steps late. By then the scheduler has read the answer of that step, so nothing waits. The delay is
fixed, so every rank of a tensor-parallel server has read the same reports before a choice.

With a small model the host's time is the step's time, and reading a report takes several percent of it. So not every
step is reported: all of the first ones, all after a change of width or batch size, and otherwise one in four.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.ddtree.budget import Budget, Load, Step
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.expectation import FIXED_POINT, LATE, Expectation
from sglang.srt.speculative.ddtree.trace import Trace

READ_TOTALS_EVERY = 16  # steps
# The first steps and those after a change are all reported. Of the others, one in REPORT_EVERY is.
FIRST_STEPS, CHANGED_STEPS, REPORT_EVERY = 256, 4, 4


@dataclass
class _Slot:
    """Where a step's report goes on the host.

    Attributes:
        report: [max_requests, widths + 1] float32, of Expectation.report.
        rows: the same memory, as numpy sees it.
        totals: of Expectation.totals.
        end: of the step: an event on the device, or seconds on a CPU.
    """

    report: torch.Tensor
    rows: Any
    totals: torch.Tensor
    end: Any


@dataclass
class _Pending:
    """A step whose report is not read yet."""

    number: int
    load: Load
    width: int
    slot: _Slot
    before: _Slot | None  # of the step before; None if something else ran between or the batch changed
    host_bound: bool
    has_totals: bool


class WidthControl:
    """Chooses the width of each step: choose(), then the step, then finish().

    Args:
        budget: makes the choices.
        expectation: what the kernels report.
        refines_costs: whether the steps' own times refine the costs. Not under tensor parallelism, where each rank would
            find other times and choose other widths.
        overlaps: whether the host prepares a step while the device runs the one before. If not, a step takes the times
            of both, which are learned as the device's.
        trace: records the budget's calls; None: they are not recorded.
    """

    def __init__(
        self,
        budget: Budget,
        expectation: Expectation,
        *,
        refines_costs: bool,
        overlaps: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.budget = budget
        self.expectation = expectation
        self.refines_costs = refines_costs
        self.trace = trace
        self.calibration = Calibration(*expectation.factors.shape)
        self._on_card = expectation.report.is_cuda
        self._sees_host = self._on_card and overlaps
        self._slots = [self._new_slot() for _ in range(LATE + 2)]
        self._factors = torch.empty(expectation.factors.shape, pin_memory=self._on_card)
        self._pending: deque[_Pending] = deque()
        self._steps = 0
        self._before: _Slot | None = None
        self._last = 0, 0  # requests and width of the last step
        self._same = 0  # steps since these changed
        self._context = 0

    def _new_slot(self) -> _Slot:
        def host(like: torch.Tensor) -> torch.Tensor:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_card)

        end = torch.cuda.Event(enable_timing=True) if self._on_card else 0.0
        report = host(self.expectation.report)
        return _Slot(report, report.numpy(), host(self.expectation.totals), end)

    def load(self, lens: torch.Tensor, nodes_per_call: int) -> Load:
        """Return the load of the next step. The context is counted anew every few steps; a step adds little to it.

        Args:
            lens: [bs] on the host, tokens of each request before the step.
            nodes_per_call: nodes that one call of the sampler takes; 0: all requests are greedy.
        """
        bs = lens.numel()
        if self._steps % REPORT_EVERY == 0 or bs != self._last[0]:
            self._context = int(lens.sum())
        return Load(bs, self._context, nodes_per_call)

    def choose(self, load: Load) -> int:
        """Return the width of the next step, after reading the reports that are due."""
        while self._pending and self._pending[0].number <= self._steps - LATE:
            step = self._read(self._pending.popleft())
            self.budget.observe(step)
            if self.trace is not None:
                self.trace.observe(step)
        width = self.budget.choose(load)
        if self.trace is not None:
            self.trace.choose(load, width)
        # The launches of this step come next. What the device did before is done if they are late.
        host_bound = self._sees_host and self._before is not None and self._before.end.query()
        self._next = load, width, host_bound
        return width

    def finish(self) -> None:
        """Start the copies of the step's report. Call it when accept and commit are launched."""
        load, width, host_bound = self._next
        slot = self._slots[self._steps % len(self._slots)]
        # The device waited for the host behind a step of another width, whose time is a part of what this one took.
        mixed = host_bound and width != self._last[1]
        before = self._before if load.bs == self._last[0] and not mixed else None
        self._same = self._same + 1 if (load.bs, width) == self._last else 0
        self._last = load.bs, width
        due = self._steps % REPORT_EVERY == REPORT_EVERY - 1
        if due or self._same < CHANGED_STEPS or self._steps < FIRST_STEPS:
            has_totals = self._steps % READ_TOTALS_EVERY == READ_TOTALS_EVERY - 1
            if width > 1:
                slot.report[: load.bs].copy_(self.expectation.report[: load.bs], non_blocking=True)
            if has_totals:
                slot.totals.copy_(self.expectation.totals, non_blocking=True)
            self._pending.append(_Pending(self._steps, load, width, slot, before, host_bound, has_totals))
        if self._on_card:
            slot.end.record()  # after the copies: who waits for it may read them
        else:
            slot.end = time.perf_counter()
        self._steps += 1
        self._before = slot

    def interrupt(self) -> None:
        """Note that something other than a decode step runs now."""
        self._before = None

    def _read(self, pending: _Pending) -> Step:
        slot, load = pending.slot, pending.load
        if self._on_card:
            slot.end.synchronize()
        seconds = expected = emitted = None
        if pending.before is not None and self.refines_costs:
            if self._on_card:
                seconds = pending.before.end.elapsed_time(slot.end) / 1e3
            else:
                seconds = slot.end - pending.before.end
        if pending.width > 1:
            *expected, emitted = slot.rows[: load.bs].mean(0).tolist()
            expected = tuple(expected)
        if pending.has_totals:
            self._calibrate(slot.totals)
        return Step(load, pending.width, seconds, expected, emitted, pending.host_bound)

    def _calibrate(self, totals: torch.Tensor) -> None:
        counts = totals.double()
        counts[0] /= FIXED_POINT
        factors = self.calibration.read(counts.flatten().tolist())
        self._factors.view(-1).copy_(torch.tensor(factors))
        self.expectation.factors.copy_(self._factors, non_blocking=True)
