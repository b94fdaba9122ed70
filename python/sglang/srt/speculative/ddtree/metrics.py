"""Reports acceptance, tree size and the verify difference at /metrics and in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

logger = logging.getLogger(__name__)

READ_EVERY = 200  # verify steps between two readings of the difference


def accept_length_so_far(reporter: SchedulerMetricsReporter) -> float | None:
    """Return the tokens emitted per verify step and request, of all steps since the start.

    Upstream (0.5.23) counts the current log interval (--decode-log-interval) separately, and reports the sum of
    the complete ones. That is nothing until the first one ends.

    Args:
        reporter: of the scheduler.

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

    def show_difference(self, difference: Difference) -> None:
        """Report the largest difference so far.

        Args:
            difference: between native and base verify.
        """
        logger.info("DDTREE verify validation: %s", difference)
        if self.enabled:
            self._difference.set(difference.value)


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
