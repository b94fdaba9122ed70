"""Records steps for offline study: trees, what was accepted of them, and how the budget chose their widths.

A trace is a file of JSON lines. The first line is the header. A "step" line has the trees of a step, which draw.py draws.
The other lines are the calls of the budget, with which replay() repeats its choices.

    {"header": {"block_size": F, "widths": [...], "batch_sizes": [...], "seconds": [[bs, width, fixed, per token], ...]}}
    {"choose": [bs, context, nodes per call of the sampler], "width": N}
    {"observe": [bs, context, nodes per call], "width": N, "seconds": s, "expected": [...], "emitted": t,
     "host_bound": b}
    {"step": i, "width": N, "requests": [{"id", "tokens", "parents", "probabilities", "path", "emitted"}, ...]}
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees
from sglang.srt.speculative.ddtree.budget import Budget, Load, Step, StepCosts
from sglang.srt.speculative.ddtree.expectation import LATE, Expectation

logger = logging.getLogger(__name__)


class Trace:
    """Writes a trace. If the file cannot be written any more (a full disk), the trace ends and the server runs on.

    Args:
        path: the path of the file. An existing file is replaced.
        block_size: F.
        expectation: holds the nodes' probabilities.
        costs: what the budget starts from; None: all steps have one width.

    Raises:
        ValueError: the file cannot be opened.
    """

    def __init__(self, path: str, block_size: int, expectation: Expectation, costs: StepCosts | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            self._file = Path(path).open("w", buffering=1)
        except OSError as error:
            raise ValueError(
                f"DDTREE: --speculative-ddtree-trace: expected a file that can be written, got {path}: {error}."
            ) from error
        self._expectation = expectation
        self._steps = 0
        self._pending: deque[tuple[torch.cuda.Event | None, dict[str, Any], list[str]]] = deque()
        header: dict[str, Any] = dict(block_size=block_size, widths=expectation.widths)
        if costs is not None:
            rows = [[bs, width, *times] for (bs, width), times in costs.table.items()]
            header |= dict(batch_sizes=costs.batch_sizes, seconds=rows, measured=costs.measured)
        self._write(dict(header=header))

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("DDTREE: the trace ends here, because %s cannot be written: %s", self._path, error)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def choose(self, load: Load, width: int) -> None:
        """Record a choice of the budget."""
        self._write(dict(choose=load, width=width))

    def observe(self, step: Step) -> None:
        """Record a report that the budget learns from."""
        self._write(dict(observe=step.load, **{k: v for k, v in step._asdict().items() if k != "load"}))

    def step(self, trees: DraftTrees, accepted: Accepted, ids: list[str]) -> None:
        """Record a step. It is written two steps later; until then its copies may be on their way.

        Args:
            trees: the verified trees of bs requests.
            accepted: the accepted paths of the step.
            ids: the ids of the requests.
        """
        if self._file is None:
            return
        bs, num_nodes = trees.tokens.shape
        tensors = dict(
            tokens=trees.tokens,
            parents=trees.parents,
            sizes=trees.sizes,
            probabilities=self._expectation.probabilities[:bs, :num_nodes],
            path=accepted.path,
            lengths=accepted.lengths,
            emitted=accepted.tokens,
        )
        on_card, copies = trees.tokens.is_cuda, {}
        for name, tensor in tensors.items():
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_card)
            copies[name].copy_(tensor, non_blocking=True)
        copied = None
        if on_card:
            copied = torch.cuda.Event()
            copied.record()
        self._pending.append((copied, copies, ids))
        while len(self._pending) > LATE:
            self._write_step(*self._pending.popleft())

    def _write_step(self, copied: torch.cuda.Event | None, copies: dict[str, Any], ids: list[str]) -> None:
        if copied is not None:
            copied.synchronize()
        of_step = {name: tensor.tolist() for name, tensor in copies.items()}
        requests = []
        for r, request_id in enumerate(ids):
            size, length = of_step["sizes"][r], of_step["lengths"][r]
            requests.append(
                dict(
                    id=request_id,
                    tokens=of_step["tokens"][r][:size],
                    parents=of_step["parents"][r][:size],
                    probabilities=[round(p, 6) for p in of_step["probabilities"][r][:size]],
                    path=of_step["path"][r][:length],
                    emitted=of_step["emitted"][r][:length],
                )
            )
        width = len(of_step["tokens"][0]) if ids else 0
        self._write(dict(step=self._steps, width=width, requests=requests))
        self._steps += 1


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a trace. It leaves out incomplete lines, such as the last one of a server that was killed.

    Raises:
        ValueError: the file cannot be read, or is not a trace.
    """
    try:
        opened = Path(path).open()
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that --speculative-ddtree-trace wrote, got {error.strerror}"
        ) from error
    with opened as file:
        for number, line in enumerate(file):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if number == 0 and (not isinstance(found, dict) or "header" not in found):
                raise ValueError(
                    f"{path}: expected a file that --speculative-ddtree-trace wrote, got {line[:60]!r}"
                )
            if found is not None:
                yield found


def replay(lines: Iterable[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Repeat the choices of a trace.

    Args:
        lines: what read_trace() yields for a server with --speculative-ddtree-budget auto.

    Returns:
        The widths as recorded, and as a new budget chooses them from the same reports.
    """
    budget: Budget | None = None
    recorded, chosen = [], []
    for line in lines:
        if "header" in line:
            header = line["header"]
            table = {(bs, width): (fixed, slope) for bs, width, fixed, slope in header["seconds"]}
            costs = StepCosts(header["widths"], header["batch_sizes"], table if header["measured"] else None)
            budget = Budget(costs)
        assert budget is not None  # read_trace() has seen to it
        if "choose" in line:
            recorded.append(line["width"])
            chosen.append(budget.choose(Load(*line["choose"])))
        if "observe" in line:
            expected = None if line["expected"] is None else tuple(line["expected"])
            load = Load(*line["observe"])
            host_bound = line.get("host_bound", False)
            budget.observe(Step(load, line["width"], line["seconds"], expected, line["emitted"], host_bound))
    return recorded, chosen
