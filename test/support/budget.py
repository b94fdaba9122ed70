"""Jobs on engines whose budget is auto."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from support.engine import Engine


class Auto:
    """Runs a job on an engine with the budget auto.

    Args:
        job: the job to run.
        cycle: whether each step takes another width than the step before, in place of the budget's choices.
    """

    def __init__(self, job: Callable[..., Any], cycle: bool = True) -> None:
        self.job, self.cycle = job, cycle

    def __call__(self, engine: Engine, *args: Any) -> tuple[Any, list[int]]:
        """Run the job; return its result, and the width of every step."""
        budget = engine.scheduler.draft_worker.control.budget
        widths: list[int] = []
        turn, choose = itertools.cycle(budget.widths), budget.choose

        def watched(load: Any) -> int:
            widths.append(next(turn) if self.cycle else choose(load))
            return widths[-1]

        budget.choose = watched
        return self.job(engine, *args), widths


class AutoGreedy(Auto):
    """The same, for a job whose result is a tuple that starts with a Greedy. So does this one's; the widths come last."""

    def __call__(self, engine: Engine, *args: Any) -> Any:
        result, widths = super().__call__(engine, *args)
        return (*result, widths)
