"""What DDTREE shows of itself: acceptance and tree size at /metrics, the verify difference there and in the log."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

READ_EVERY = 200  # verify steps between two readings of the difference


class DDTreeMetrics:
    """Counters of one scheduler process, at /metrics where the server has --enable-metrics.

    Args:
        rows: N, rows of a verify tree.
        depth: D, most output tokens of one step.
        labels: of every metric, such as the model's name.
        enabled: False: counts nothing.
    """

    def __init__(self, *, rows: int, depth: int, labels: dict[str, str], enabled: bool):
        self.enabled = enabled
        if not enabled:
            return
        # Here and not above: prometheus_client chooses its storage by a variable that the server sets first.
        from prometheus_client import Counter, Gauge, Histogram

        names = tuple(labels)
        self._lengths = Histogram(
            "sglang:ddtree_accept_length",
            "Output tokens of one verify step and request: accepted nodes and the bonus token. Under overlap scheduling "
            "the step that is under way when a request ends is counted too.",
            names,
            buckets=[float(length) for length in range(1, depth + 1)],
        ).labels(**labels)
        by_depth = Counter(
            "sglang:ddtree_accepted_nodes",
            "Accepted tree nodes by depth; divided by the count of ddtree_accept_length: the acceptance at that depth.",
            (*names, "depth"),
        )
        self._by_depth = [by_depth.labels(**labels, depth=str(d)) for d in range(1, depth)]
        size = Gauge(
            "sglang:ddtree_tree_rows",
            "Rows of a verify tree, root included.",
            names,
            multiprocess_mode="mostrecent",
        )
        size.labels(**labels).set(rows)
        self._difference = Gauge(
            "sglang:ddtree_verify_difference",
            "Largest |native - base| attention output so far; --speculative-ddtree-verify=validate only.",
            names,
            multiprocess_mode="max",
        ).labels(**labels)

    def count(self, accepted: list[int]) -> None:
        """Takes up one verify step: accepted nodes of each request, on the host."""
        if self.enabled:
            for nodes in accepted:
                self._lengths.observe(nodes + 1)
                for counter in self._by_depth[:nodes]:
                    counter.inc()

    def show_difference(self, difference: Difference) -> None:
        logger.info("DDTREE verify validation: %s", difference)
        if self.enabled:
            self._difference.set(difference.value)


class Difference:
    """The largest difference that a validating verify found: its layer, and the last request of its pool row."""

    def __init__(self, table: torch.Tensor, requests: dict[int, str]):
        """From a backend's tree_difference, [layers, request pool], on the host; `requests` names pool rows."""
        table = table[:, 1:]  # upstream's padding of a graph's batch is row 0
        at = int(table.argmax())
        self.layer, row = divmod(at, table.shape[1])
        self.value = float(table[self.layer, row])
        self.request = requests.get(row + 1, f"pool row {row + 1}")

    def __str__(self):
        return f"largest |native - base| {self.value:.3e}, layer {self.layer}, request {self.request}"


class DifferenceReader:
    """Reads a table that captured graphs accumulate into, and never waits for the device on the way.

    Args:
        table: [layers, request pool] float32, on the device.
    """

    def __init__(self, table: torch.Tensor):
        self._table = table
        self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        self._copied = None
        self._steps = 0
        self.requests: dict[int, str] = {}

    def step(self, requests: dict[int, str]) -> Difference | None:
        """Called after each verify was launched; what an earlier call copied, once in READ_EVERY steps.

        Args:
            requests: request pool row -> request id, of the batch.
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
        """The difference now; waits for the device."""
        return Difference(self._table.cpu(), self.requests)
