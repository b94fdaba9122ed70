"""Chooses how many nodes the next step verifies: the number that emits the most tokens per second.

It divides the tokens that a step of each width should emit by the time that it should take:

    time      the device's, by batch size, width and context, or the host's if that is longer. The device's is measured at
              startup. The times of real steps correct both
    tokens    the sum of the drafter's probabilities of the nodes. calibration.py corrects each of them by how often the
              target accepted such nodes. The error that remains in the sum is corrected here

Nothing here waits for the device, reads a clock or is random: the same calls give the same choices. So a recorded trace
can be replayed, and all ranks of a tensor-parallel server choose the same widths without exchanging anything.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STANDARD_WIDTHS = (1, 4, 8, 16, 24, 32, 48, 64)

DECIDE_EVERY = 4  # steps of one kind: with a small model, a decision takes a part of the step's time
HYSTERESIS = 0.02  # the width changes only if another one should emit this much more per second
# Weights of a new value in a running mean.
RATE_OF_COSTS = 0.2
RATE_OF_TOKENS = 0.02  # per request, of up to four
RATE_OF_CORRECTION = 0.02  # accept lengths vary more from step to step than probabilities do
OUTLIER = 1.5  # a single time that is this many times as long as expected does not count: something else ran in between
FEW = 3  # the mean of fewer times says little
SURPRISE = 0.15  # if a time is this far from the expected one, the other times of its kind may be wrong too
# While the device takes longer than the host, the host's time cannot be seen, and the host may have become faster. So
# each report multiplies the estimate by the first factor, but not below the second one. In the end the budget tries a
# narrower width, which shows the host's time.
HOST_DECAY, LEAST_DECAY = 0.98, 0.5
FEW_UNSEEN = 20  # when a batch size comes back, its host time counts as unseen for at least this many reports
# Weights of a new time of the host. Many things make a step late, such as a request that ends. Nothing makes it early.
RATE_IF_FASTER, RATE_IF_SLOWER = 0.3, 0.1
PLAIN_HOST = 0.6  # a step without a draft takes at least this part of the host's time for a step with one
# Each call of the sampler after the first one adds this part of the host's time: usually, and at most.
CALL_HOST, MOST_CALL_HOST = 0.15, 0.3
# A probe is a step of another width than the present one. It shows what that width costs.
FIRST_WAIT, LAST_WAIT = 8, 1024  # steps before the first probe of a width; each later wait is twice as long
FIRST_WAIT_IF_MEASURED = 40  # the first wait, as long as the measured times hold
# The worse a width seems, the longer its probes wait: up to 1 + PRICE times as long for one that would emit nothing,
# and longer still if its steps take longer than the present ones, but at most MOST_PRICE times as long.
PRICE, MOST_PRICE = 40.0, 100.0
# While the width is 1, nothing is drafted, and a single report says little. So a probe with a draft has several steps.
PROBE_STEPS = 4


def widths_up_to(num_nodes: int, block_size: int) -> tuple[int, ...]:
    """Return the widths that a server of N nodes has verify graphs for.

    Args:
        num_nodes: N, the widest.
        block_size: F.

    Returns:
        Ascending: 1, F, the standard ones and N.
    """
    return tuple(sorted({n for n in (*STANDARD_WIDTHS, block_size) if n < num_nodes} | {num_nodes}))


class Load(NamedTuple):
    """What a step has to do, apart from its width.

    Attributes:
        bs: requests.
        context: tokens before the step, of all requests together.
        nodes_per_call: nodes that one call of the sampler takes, whose time grows with the width; 0: all requests are
            greedy.
    """

    bs: int
    context: int
    nodes_per_call: int

    def calls(self, width: int) -> int:
        """Return how many times a step of this width calls the sampler. 0: it has no draft."""
        if width == 1:
            return 0
        return -(-self.bs * width // self.nodes_per_call) if self.nodes_per_call else 1


class Step(NamedTuple):
    """A step as the device reports it.

    Attributes:
        load: of the step.
        width: its N.
        seconds: from the end of the step before it to its own end; None if something else ran in between, or if the batch
            changed, which gives the host other work.
        host_bound: whether the device was idle before the step, because the host was late.
        expected: by width, tokens per request according to the drafter's probabilities, bonus token included; None if
            the step had no draft.
        emitted: tokens per request; None if the step had no draft.
    """

    load: Load
    width: int
    seconds: float | None
    expected: tuple[float, ...] | None = None
    emitted: float | None = None
    host_bound: bool = False


class _Mean:
    """A running mean of times. A single time that is much too long does not count.

    Attributes:
        value: the mean.
        count: how many times are in it.
    """

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0
        self._was_late = False

    def add(self, new: float, expected: float, *, doubtful: bool = False) -> bool:
        """Add a time.

        Args:
            new: the time.
            expected: the time that was expected.
            doubtful: whether the expectation is a guess. Then no time is too long.

        Returns:
            Whether the time was a surprise.
        """
        late = new > expected * OUTLIER and not doubtful
        # The expectation may be wrong while there are few times, and it is wrong if a time is much too short.
        if (late and self.count < FEW) or (new < expected / OUTLIER and not doubtful):
            self.value, self.count = new, self.count + 1
            return True
        if late and not self._was_late:
            self._was_late = True
            return False  # a single late step says nothing about the next one
        self._was_late = late
        if late:
            new = expected * OUTLIER
        self.value += max(RATE_OF_COSTS, 1.0 / (self.count + 1)) * (new - self.value)
        self.count += 1
        return abs(new / expected - 1.0) > SURPRISE


class StepCosts:
    """Seconds per step.

    Host and device work at the same time, so a step takes as long as the slower of the two. The host's time does not
    depend on the width, with two exceptions: it is shorter without a draft, and longer if the step calls the sampler
    several times. So the host's time of one width tells that of the other widths of its kind.

    Args:
        widths: N of every verify graph, ascending.
        batch_sizes: of the graphs, ascending. A batch runs in the smallest one that holds it.
        table: (batch size, width) -> the device's seconds without context, and seconds per token of context. If it is
            None, times are guessed, and the first steps correct them.
    """

    def __init__(
        self,
        widths: Sequence[int],
        batch_sizes: Sequence[int],
        table: dict[tuple[int, int], tuple[float, float]] | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self.batch_sizes = tuple(batch_sizes)
        self.measured = table is not None
        self.table = table or {
            (bs, width): (1e-3 * (1.0 + (width > 1) * 0.3 + 0.01 * bs * width), 0.0)
            for bs in batch_sizes
            for width in widths
        }
        # (kind, width) -> the device's time, divided by the table's
        self._ratios: dict[tuple[Any, int], _Mean] = {}
        # kind -> calls of the sampler -> the host's seconds
        self._hosts: dict[Any, dict[int, float]] = {}
        self._unseen: dict[Any, int] = {}  # by kind: reports since the host last bound a step
        self._latest_host: Any = None  # the latest kind whose host's seconds were seen
        self._latest_kind: Any = None
        self._was_late = False  # whether the host bound the latest step
        self._timed: set[tuple[Any, int]] = set()

    def kind(self, load: Load) -> tuple[int, int]:
        """Return the kind of a load. Steps of one kind run the same graphs and the same sampler, and share their times."""
        at = bisect.bisect_left(self.batch_sizes, load.bs)
        return self.batch_sizes[min(at, len(self.batch_sizes) - 1)], load.nodes_per_call

    def seconds(self, load: Load, width: int) -> float:
        """Return the expected time of a step."""
        return self.seconds_by_width(load)[self.widths.index(width)]

    def seconds_by_width(self, load: Load) -> list[float]:
        """Return the expected times of steps of all widths."""
        kind, of_others = self.kind(load), 0.0
        found = []
        hosts: dict[int, float] = {}  # by calls
        for width in self.widths:
            if (kind, width) in self._ratios:
                ratio = self._ratios[kind, width].value
            else:
                ratio = of_others = of_others or self._ratio_of_others(kind)
            calls = load.calls(width)
            if calls not in hosts:
                hosts[calls] = self._host(kind, calls)
            found.append(max(self._from_table(load, kind[0], width) * ratio, hosts[calls]))
        return found

    def _from_table(self, load: Load, bs: int, width: int) -> float:
        fixed, per_token = self.table[bs, width]
        # Above the largest graph, time grows in proportion to the batch.
        return max(1.0, load.bs / bs) * fixed + load.context * per_token

    def _ratio_of_others(self, kind: tuple[int, int]) -> float:
        """Return the ratio of a width without times: the mean of its kind, or of all kinds, which share the device."""
        of_kind = [mean.value for (other, _), mean in self._ratios.items() if other == kind]
        known = of_kind or [mean.value for mean in self._ratios.values()]
        return sum(known) / len(known) if known else 1.0

    def _host(self, kind: tuple[int, int], calls: int) -> float:
        """Return the host's seconds, or those of the most similar steps if they were never seen. At first this is 0."""
        if kind not in self._hosts:
            kind = self._latest_host
        of_kind = self._hosts.get(kind)
        if not of_kind:
            return 0.0
        nearest = min(of_kind, key=lambda seen: abs(seen - calls))
        work, seen = (1.0 + CALL_HOST * (max(each, 1) - 1) for each in (calls, nearest))
        decay = max(LEAST_DECAY, HOST_DECAY ** self._unseen.get(kind, 0))
        return of_kind[nearest] * work / seen * decay

    def timed(self, load: Load, width: int) -> bool:
        """Return whether a step of this kind and width was timed."""
        return (self.kind(load), width) in self._timed

    def observe(self, load: Load, width: int, seconds: float, host_bound: bool = False) -> bool:
        """Learn from the time of a step.

        Args:
            load: of the step.
            width: its N.
            seconds: its time.
            host_bound: whether the device waited for the host. Then the time is the host's, else the device's. The
                time of the other one is not known, but it is not longer.

        Returns:
            Whether the device's time was a surprise.
        """
        kind = self.kind(load)
        self._timed.add((kind, width))
        table = self._from_table(load, kind[0], width)
        mean = self._ratios.get((kind, width))
        expected = table * (mean.value if mean is not None else self._ratio_of_others(kind))
        self._observe_host(kind, load.calls(width), seconds, host_bound, expected)
        if host_bound and seconds >= expected:
            return False
        mean = self._ratios.setdefault((kind, width), _Mean())
        doubtful = not self.measured and mean.count == 0
        return mean.add(seconds / table, expected / table, doubtful=doubtful)

    def _observe_host(self, kind: Any, calls: int, seconds: float, host_bound: bool, expected: float) -> None:
        """Learn the host's time, or that it was not longer than `seconds`. `expected` is the device's time."""
        if self._latest_kind != kind:
            # The host may have become faster or slower since then.
            self._unseen[kind] = max(self._unseen.get(kind, 0), FEW_UNSEEN)
            self._latest_kind, self._was_late = kind, False
        was_late, self._was_late = self._was_late, host_bound
        if (
            host_bound
            and not was_late
            and seconds > (1.0 + SURPRISE) * max(expected, self._host(kind, calls))
        ):
            return  # a single late step says nothing about the next one
        if not host_bound:
            self._unseen[kind] += 1
            if seconds >= self._host(kind, calls):
                return
        else:
            self._unseen[kind] = 0
        of_kind = self._hosts.setdefault(kind, {})
        old = of_kind.get(calls, seconds)
        rate = RATE_IF_FASTER if seconds < old else RATE_IF_SLOWER
        new = of_kind[calls] = old + rate * (min(seconds, OUTLIER * old) - old)
        for other in of_kind.keys() - {calls}:  # a host that becomes slower or faster does so for all
            fewer, more = sorted((other, calls))
            most = (1.0 + MOST_CALL_HOST * (more - max(fewer, 1))) / (1.0 if fewer else PLAIN_HOST)
            bounds = (new, most * new) if other > calls else (new / most, new)
            of_kind[other] = min(max(of_kind[other], bounds[0]), bounds[1])
        self._latest_host = kind


@dataclass
class _Kind:
    """What the budget remembers of one kind of load.

    Attributes:
        width: the present choice; 0 before the first.
        steps: of this kind so far.
        waits: by width, the step of its last probe, and how many steps the next one waits (times its price).
        due, next: the step at which the next probe is due, and its width. Each decision sets them.
        surprises: the number of surprising times in a row.
        doubtful: whether the table's times were found to be wrong.
        probe, left: the width of a probe that takes several steps, and how many of them are left.
    """

    width: int = 0
    steps: int = 0
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)
    due: float = math.inf
    next: int = 0
    surprises: int = 0
    doubtful: bool = False
    probe: int = 0
    left: int = 0


class Budget:
    """Chooses the width of each step. Call choose() before a step, and observe() when its report comes in.

    Args:
        costs: of steps.
        probes: whether to probe other widths. Without probes, only the times of the chosen widths are corrected.
    """

    def __init__(self, costs: StepCosts, *, probes: bool = True) -> None:
        self.costs = costs
        self.widths = costs.widths
        self.probes = probes
        # Tokens per step and request by width. Until the first draft, those of an average drafter.
        self.expected = [1.0 + 1.5 * (1.0 - 1.0 / width**0.5) for width in self.widths]
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._latest: _Kind | None = None
        # Steps with a draft, and running means of the tokens per request that they were expected to emit, and did emit.
        self._drafts, self._mean_expected, self._mean_emitted = 0, 1.0, 1.0

    # ---- before a step ----

    def choose(self, load: Load) -> int:
        """Return the width of the next step.

        Args:
            load: of the step.

        Returns:
            One of the widths.
        """
        key = self.costs.kind(load)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        if kind.steps % DECIDE_EVERY == 0 or self._latest is not kind:
            self._decide(kind, load)
        self._latest = kind
        kind.steps += 1
        if kind.left:
            kind.left -= 1
            return kind.probe
        if kind.steps >= kind.due:
            return self._probe(kind, load)
        return kind.width

    def _decide(self, kind: _Kind, load: Load) -> None:
        """Set the present width of a kind, and plan its next probe."""
        seconds, correction = self.costs.seconds_by_width(load), self.correction
        rates = [(1.0 + (tokens - 1.0) * correction) / time for tokens, time in zip(self.expected, seconds)]
        best = rates.index(max(rates))
        if kind.width == 0 or rates[best] > (1.0 + HYSTERESIS) * rates[self.widths.index(kind.width)]:
            kind.width = self.widths[best]
        if self.probes:
            self._plan(kind, rates, seconds)

    def rate(self, load: Load, width: int) -> float:
        """Return the expected tokens per second of a step."""
        return load.bs * self.tokens(width) / self.costs.seconds(load, width)

    def tokens(self, width: int) -> float:
        """Return the expected tokens per step and request."""
        accepted = self.expected[self.widths.index(width)] - 1.0
        return 1.0 + accepted * (1.0 if width == 1 else self.correction)

    @property
    def correction(self) -> float:
        """Accepted nodes over expected ones, of the last steps: the error that the calibration leaves."""
        return min(2.0, max(0.1, (self._mean_emitted - 1.0 + 0.1) / (self._mean_expected - 1.0 + 0.1)))

    @property
    def calibration_error(self) -> float:
        """|expected - emitted| / emitted tokens per step, of the last steps with a draft. 0 before the first."""
        return abs(self._mean_expected - self._mean_emitted) / self._mean_emitted

    def _plan(self, kind: _Kind, rates: list[float], seconds: list[float]) -> None:
        """Set when the next probe of a kind is due, and its width.

        Args:
            kind: with its present width.
            rates: expected tokens per second and request, by width.
            seconds: expected times of steps, by width.
        """
        measured = self.costs.measured and not kind.doubtful
        first = FIRST_WAIT_IF_MEASURED if measured else FIRST_WAIT
        present = self.widths.index(kind.width)
        # Width 1 drafts nothing, so what the budget knows about the drafter gets old. To renew it, probes of the best
        # other width have no price.
        draft = max(range(1, len(rates)), key=rates.__getitem__) if kind.width == 1 else present
        kind.due = math.inf
        for i, width in enumerate(self.widths):
            if i == present:
                continue
            if width not in kind.waits:
                # The last term spreads the first probes over several steps.
                kind.waits[width] = kind.steps + (i * first) // len(self.widths), first
            last, wait = kind.waits[width]
            due: float = last + wait
            # The first probe of the next narrower and the next wider one costs little, and shows whether the measured
            # times hold.
            free = i == draft or (wait == first and (not measured or abs(i - present) == 1))
            if due < kind.due and not free:
                # The price is what the probe loses, in steps of the present width.
                lost = max(0.0, 1.0 - rates[i] / rates[present])
                due = last + wait * min(MOST_PRICE, 1.0 + PRICE * lost * seconds[i] / seconds[present])
            if due < kind.due:
                kind.due, kind.next = due, width

    def _probe(self, kind: _Kind, load: Load) -> int:
        """Return the width of the probe that is due."""
        width = kind.next
        kind.waits[width] = kind.steps, min(2 * kind.waits[width][1], LAST_WAIT)
        kind.due = math.inf  # until the next decision
        drafted = [other for other in self.widths if other > 1]
        if kind.width == 1 and width == max(drafted, key=lambda other: self.rate(load, other)):
            kind.probe, kind.left = width, PROBE_STEPS - 1
        return width

    # ---- after a step ----

    def observe(self, step: Step) -> None:
        """Learn from the device's report of a step."""
        # A drafter whose logits are NaN gives expectations that are NaN.
        if step.expected is not None and step.emitted is not None and math.isfinite(sum(step.expected)):
            self._drafts += 1
            weight = max(RATE_OF_CORRECTION, 1.0 / self._drafts)
            expected = step.expected[self.widths.index(step.width)]
            self._mean_expected += weight * (expected - self._mean_expected)
            self._mean_emitted += weight * (step.emitted - self._mean_emitted)
            weight = 1.0 if self._drafts == 1 else RATE_OF_TOKENS * min(step.load.bs, 4)
            self.expected = [old + weight * (new - old) for old, new in zip(self.expected, step.expected)]
        kind = self._kinds.get(self.costs.kind(step.load))
        if step.seconds is None or kind is None:
            return
        first = not self.costs.timed(step.load, step.width)
        surprised = self.costs.observe(step.load, step.width, step.seconds, step.host_bound)
        kind.surprises = kind.surprises + 1 if surprised else 0
        if surprised and (first or kind.surprises == 2):  # a single later one is noise
            kind.waits = {w: wait for w, wait in kind.waits.items() if self.costs.timed(step.load, w)}
            kind.due, kind.doubtful = math.inf, True
