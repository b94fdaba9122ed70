"""Stands in for a drafter and a target: what a tree was expected to emit, and what was accepted of it, from a trace.

A model with random weights accepts nothing. But the time of its steps is that of a real model. So a measurement of such a
model takes acceptance from a trace of the demo model: each request follows the steps of a recorded one. The calibration is
the server's own, and learns from these steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.trace import read_trace
from sglang.srt.speculative.ddtree.width_control import READ_TOTALS_EVERY

OWN = Path("own")


class Acceptance:
    """Recorded steps, which requests take in turn.

    The first n nodes of a recorded tree are the tree of width n. It accepts the recorded path up to its first node that is
    not among them. Width 1 drafts nothing and emits one token.

    Args:
        trace: of record_trace.py.
        widths: N of every verify, ascending.
        seed: decides which recorded request a request follows.
    """

    def __init__(self, trace: Path, widths: Sequence[int], seed: int = 0) -> None:
        self.widths = tuple(widths)
        steps = [
            (request["id"], request)
            for line in read_trace(trace)
            for request in line.get("requests", ())
            if len(request["parents"]) > 1
        ]
        count, nodes = len(steps), max(len(request["parents"]) for _, request in steps)
        self._parents = np.zeros((count, nodes), dtype=np.int64)
        self._probabilities = np.zeros((count, nodes))
        depths, ranks = np.zeros((count, nodes), dtype=np.int64), np.zeros((count, nodes), dtype=np.int64)
        self._accepted = np.zeros((count, nodes), dtype=bool)
        self.chain = np.zeros(count)  # tokens that the drafter's first choices would emit
        self._streams: dict[str, list[int]] = {}
        for i, (name, request) in enumerate(steps):
            self._streams.setdefault(name, []).append(i)
            size = len(request["parents"])
            self._parents[i, 1:size] = request["parents"][1:]
            self._probabilities[i, 1:size] = request["probabilities"][1:]
            self._accepted[i, request["path"]] = True
            of_parent: dict[int, list[int]] = {}
            for node in range(1, size):
                depths[i, node] = depths[i, request["parents"][node]] + 1
                of_parent.setdefault(request["parents"][node], []).append(node)
            for children in of_parent.values():
                for rank, node in enumerate(sorted(children, key=lambda n: -request["probabilities"][n])):
                    ranks[i, node] = rank
            self.chain[i] = 1 + next(
                (at for at, node in enumerate(request["path"][1:]) if ranks[i, node] > 0),
                len(request["path"]) - 1,
            )
        self._num_candidates = int(ranks.max()) + 1
        self._max_depth = int(depths.max())
        self._cells = np.maximum(depths - 1, 0) * self._num_candidates + ranks
        drafted = self._probabilities > 0
        self._tested = drafted & np.take_along_axis(self._accepted, self._parents, axis=1)
        columns = np.asarray(self.widths) - 1
        self.emitted = self._accepted.cumsum(axis=1)[:, np.minimum(columns, nodes - 1)].astype(float)
        self._columns = np.minimum(columns, nodes - 1)
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Forget what calibration has learned, and where the requests are."""
        self._random = random.Random(seed)
        self._calibration = Calibration(self._max_depth, self._num_candidates)
        self._is_frozen = False
        self._totals = np.zeros((2, self._max_depth * self._num_candidates))
        self._steps = 0
        self._calibrate(np.ones(self._totals.shape[1]))
        self._slots: list[tuple[list[int], int]] = []

    def freeze(self, bs: int = 32, steps: int = 256) -> None:
        """Let calibration learn from steps of the greatest width, and no more from then on: it takes milliseconds."""
        for _ in range(steps):
            self.step(bs, self.widths[-1])
        self._is_frozen = True

    def _calibrate(self, factors: np.ndarray) -> None:
        """Compute the expected tokens of all recorded trees, by width."""
        share = np.clip(self._probabilities * factors[self._cells], 0.0, 1.0)
        share[:, 0] = 1.0
        rows = np.arange(len(share))
        for node in range(1, share.shape[1]):
            share[:, node] *= share[rows, self._parents[:, node]]
        self._expected = share.cumsum(axis=1)[:, self._columns]
        self._shares = share

    def tokens(self, width: int) -> float:
        """Return the mean of the tokens that a recorded step emits at a width."""
        if width == 1:
            return 1.0
        return float(self.emitted[:, self.widths.index(width)].mean())

    def gain_of_sharing(self, bs: int, width: int, batches: int = 400) -> float:
        """Return the tokens that bs * width nodes emit if they go to the most probable nodes of the whole batch.

        Args:
            bs: requests, whose steps are drawn anew for each batch.
            width: N of each request without sharing.
            batches: to draw.

        Returns:
            Over the tokens that the same number of nodes emits if each request has `width` of them.
        """
        nodes = self._shares.shape[1]
        scores = np.where(self._probabilities > 0, self._shares, -1.0)
        scores[:, 0] = 2.0  # a request always has its root
        apart = shared = 0
        for _ in range(batches):
            chosen = self._random.choices(range(len(scores)), k=bs)
            accepted = self._accepted[chosen]
            apart += accepted[:, :width].sum()
            best = np.argpartition(-scores[chosen].ravel(), bs * width - 1)[: bs * width]
            shared += accepted[best // nodes, best % nodes].sum()
        return float(shared / apart)

    def step(self, bs: int, width: int) -> tuple[tuple[float, ...] | None, float]:
        """Take the next step of each request.

        Args:
            bs: requests.
            width: N of the step.

        Returns:
            Means over the requests: expected tokens by width, None at width 1; emitted tokens.
        """
        self._steps += 1
        while len(self._slots) < bs:
            self._slots.append(([], 0))
        names = list(self._streams)
        chosen = []
        for slot in range(bs):
            stream, at = self._slots[slot]
            if at == len(stream):
                stream, at = self._streams[self._random.choice(names)], 0
            chosen.append(stream[at])
            # A step of width 1 passes one of the tokens that the recorded step emitted.
            passed = width > 1 or self._random.random() * self.emitted[stream[at], -1] < 1.0
            self._slots[slot] = stream, at + passed
        if width == 1:
            return None, 1.0
        expected = self._expected[chosen].mean(axis=0)
        if not self._is_frozen:
            self._learn(chosen, width)
        return tuple(expected.tolist()), float(self.emitted[chosen, self.widths.index(width)].mean())

    def _learn(self, chosen: list[int], width: int) -> None:
        """Count the accepted and the expected nodes of these steps, and calibrate every few steps."""
        tested = self._tested[chosen, :width]
        cells = self._cells[chosen, :width][tested]
        np.add.at(self._totals[0], cells, np.minimum(self._probabilities[chosen, :width][tested], 1.0))
        np.add.at(self._totals[1], cells, self._accepted[chosen, :width][tested])
        if self._steps % READ_TOTALS_EVERY == 0:
            self._calibrate(np.asarray(self._calibration.read(self._totals.flatten().tolist())))


class StandIn:
    """Takes the tokens per step of an engine from traces.

    Args:
        engine: support.engine.Engine.
        traces: temperature -> trace of record_trace.py. OWN in its place: the model's own acceptance.
        teaches: whether an engine that chooses widths learns from the recorded acceptance. If not, it learns from the
            model's own. The steps' times stay its own in any case.
    """

    def __init__(self, engine: Any, traces: dict[float, Path], *, teaches: bool) -> None:
        self._algorithm = engine.args.speculative_algorithm
        self._width = engine.args.speculative_num_draft_tokens
        control = getattr(engine.scheduler.draft_worker, "control", None)
        widths = control.budget.widths if control is not None else (1, self._width or 1)
        self._traces = {
            temperature: Acceptance(trace, widths) for temperature, trace in traces.items() if trace != OWN
        }
        self.begin(min(traces))
        if control is not None and teaches:
            for acceptance in self._traces.values():
                acceptance.freeze()
            read = control._read

            def read_recorded(pending: Any) -> Any:
                if self._trace is None:
                    return read(pending)
                expected, emitted = self._trace.step(pending.load.bs, pending.width)
                return read(pending)._replace(
                    expected=expected, emitted=None if expected is None else emitted
                )

            control._read = read_recorded

    def begin(self, temperature: float) -> None:
        """Take acceptance from the trace of this temperature."""
        self._trace = self._traces.get(temperature)

    @property
    def is_active(self) -> bool:
        """Whether acceptance comes from a trace at present."""
        return self._trace is not None

    def tokens_per_step(self, steps: dict[int, int] | None) -> float:
        """Return the tokens per step and request.

        Args:
            steps: by width, of an engine that chooses widths. The mean of all recorded steps of a width varies less than
                the tokens of these steps.
        """
        if steps is not None:
            return sum(self._trace.tokens(width) * count for width, count in steps.items()) / sum(
                steps.values()
            )
        if self._algorithm is None:
            return 1.0
        return (
            float(self._trace.chain.mean())
            if self._algorithm == "DFLASH"
            else self._trace.tokens(self._width)
        )
