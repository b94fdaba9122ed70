"""Reports acceptance, tree size and the verify difference at /metrics and in the log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

logger = logging.getLogger(__name__)

READ_EVERY = 200  # verify steps between two readings of the difference
TIME_EVERY = 64  # one decode step in this many is timed by phase
PHASES = ("draft", "verify", "sample", "commit")
SECONDS = tuple(base * 10.0**power for power in (-5, -4, -3, -2) for base in (1.0, 2.0, 5.0)) + (0.1,)


def accept_length_so_far(reporter: SchedulerMetricsReporter) -> float | None:
    """Return the tokens emitted per verify step and request, of all steps since the start.

    Upstream (0.5.23) counts the current log interval (--decode-log-interval) separately, and reports the sum of
    the complete ones. That is nothing until the first one ends.

    Args:
        reporter: the scheduler's reporter of metrics.

    Returns:
        The accept length, or None before the first step, or if another algorithm serves.
    """
    steps = reporter.spec_total_num_forward_ct + reporter.spec_num_forward_ct
    if get_spec().speculative_algorithm != "DDTREE" or steps == 0:
        return None
    return (reporter.spec_total_num_accept_tokens + reporter.spec_num_accept_tokens) / steps


class DDTreeMetrics:
    """The counters of one scheduler process. They show up at /metrics if the server has --enable-metrics.

    Args:
        num_nodes: N, nodes of a verify tree.
        block_size: F, the most tokens that one step emits.
        labels: labels of every metric, such as the model's name.
        enabled: whether to count. False makes every method do nothing.
    """

    def __init__(self, *, num_nodes: int, block_size: int, labels: dict[str, str], enabled: bool) -> None:
        self.enabled = enabled
        if not enabled:
            return
        # Not imported at the top: prometheus_client picks its storage by a variable that the server sets first.
        from prometheus_client import Counter, Gauge, Histogram

        names = tuple(labels)
        self._lengths = Histogram(
            "sglang:ddtree_accept_length",
            "Tokens emitted per verify step and request: accepted nodes and the bonus token. Under overlap "
            "scheduling, this includes the step that is running when a request ends.",
            names,
            buckets=[float(length) for length in range(1, block_size + 1)],
        ).labels(**labels)
        by_depth = Counter(
            "sglang:ddtree_accepted_nodes",
            "Accepted tree nodes by depth. Divided by the count of ddtree_accept_length, this is the "
            "acceptance rate at that depth.",
            (*names, "depth"),
        )
        self._by_depth = [by_depth.labels(**labels, depth=str(depth)) for depth in range(1, block_size)]
        size = Gauge(
            "sglang:ddtree_tree_nodes",
            "Nodes of a verify tree, root included.",
            names,
            multiprocess_mode="mostrecent",
        )
        size.labels(**labels).set(num_nodes)
        self._steps = Counter(
            "sglang:ddtree_steps", "Decode steps by the nodes of their verify trees.", (*names, "nodes")
        )
        self._labels = labels
        self._calibration = Gauge(
            "sglang:ddtree_calibration_error",
            "|expected - emitted| / emitted tokens of the last steps. Only with --speculative-ddtree-budget auto.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        phases = Histogram(
            "sglang:ddtree_phase_seconds",
            f"Time of a decode step by phase, of one step in {TIME_EVERY}.",
            (*names, "phase"),
            buckets=SECONDS,
        )
        self._phases = {phase: phases.labels(**labels, phase=phase) for phase in PHASES}
        self._difference = Gauge(
            "sglang:ddtree_verify_difference",
            "Largest |native - base| attention output so far. Only with --speculative-ddtree-verify=validate.",
            names,
            multiprocess_mode="max",
        ).labels(**labels)

    def count(self, accepted: list[int]) -> None:
        """Count one verify step.

        Args:
            accepted: nodes accepted for each request, root excluded.
        """
        if self.enabled:
            for nodes in accepted:
                self._lengths.observe(nodes + 1)
                for counter in self._by_depth[:nodes]:
                    counter.inc()

    def count_step(self, num_nodes: int, calibration_error: float | None) -> None:
        """Count a step.

        Args:
            num_nodes: N of its verify tree.
            calibration_error: the error that the budget reports; None without a budget.
        """
        if self.enabled:
            self._steps.labels(**self._labels, nodes=str(num_nodes)).inc()
            if calibration_error is not None:
                self._calibration.set(calibration_error)

    def time_phases(self, seconds: dict[str, float]) -> None:
        """Count the phases of a step: their seconds by name."""
        if self.enabled:
            for phase, value in seconds.items():
                self._phases[phase].observe(value)

    def show_difference(self, difference: Difference) -> None:
        """Report the largest difference so far.

        Args:
            difference: the difference between native and base verify.
        """
        logger.info("DDTREE verify validation: %s", difference)
        if self.enabled:
            self._difference.set(difference.value)


class PhaseTimer:
    """Times the phases of one step in TIME_EVERY, without waiting for the device.

    Args:
        on_card: whether the phases run on a device.
    """

    def __init__(self, on_card: bool) -> None:
        self._on_card = on_card
        self._steps = 0
        self._times: bool = False
        self._marks: list[Any] = []

    def begin(self) -> dict[str, float] | None:
        """Begin a step.

        Returns:
            The seconds of each phase of the step that was timed last, once they are known; else None.
        """
        self._steps += 1
        found = self._read() if len(self._marks) == len(PHASES) + 1 else None
        self._times = self._steps % TIME_EVERY == 0
        if self._times:
            self._marks = []
            self.mark()
        return found

    def mark(self) -> None:
        """Mark the end of a phase. The phases come in their order."""
        if not self._times:
            return
        if not self._on_card:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _read(self) -> dict[str, float] | None:
        pairs = list(zip(PHASES, self._marks, self._marks[1:]))
        if not self._on_card:
            self._marks = []
            return {phase: end - start for phase, start, end in pairs}
        if not self._marks[-1].query():
            return None
        self._marks = []
        return {phase: start.elapsed_time(end) / 1e3 for phase, start, end in pairs}


class Difference:
    """The largest difference that a validating verify has found, with its layer and request.

    Args:
        table: [layers, request pool] float32, a backend's tree_difference, on the host.
        requests: for each row of the request pool, the id of the last request that had it.
    """

    def __init__(self, table: torch.Tensor, requests: dict[int, str]) -> None:
        table = table[:, 1:]  # upstream pads a graph's batch with row 0
        at = int(table.argmax())
        self.layer, row = divmod(at, table.shape[1])
        self.value = float(table[self.layer, row])
        self.request = requests.get(row + 1, f"pool row {row + 1}")

    def __str__(self) -> str:
        return f"largest |native - base| {self.value:.3e}, layer {self.layer}, request {self.request}"


class DifferenceReader:
    """Reads a table that captured graphs write to, without waiting for the device.

    Args:
        table: [layers, request pool] float32, on the device.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._steps = 0
        self.requests: dict[int, str] = {}

    def step(self, requests: dict[int, str]) -> Difference | None:
        """Start a copy every READ_EVERY steps and read it in a later step. Call it after each verify.

        Args:
            requests: request pool row -> request id, of the batch.

        Returns:
            The largest difference once a copy has finished, else None.
        """
        self.requests.update(requests)
        self._steps += 1
        if self._steps % READ_EVERY == 1:
            self._host.copy_(self._table, non_blocking=True)
            if self._table.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()
            return None
        if self._copied is not None and self._copied.query():
            self._copied = None
            return Difference(self._host, self.requests)
        return None

    def read(self) -> Difference:
        """Return the largest difference so far. It waits for the device."""
        return Difference(self._table.cpu(), self.requests)
