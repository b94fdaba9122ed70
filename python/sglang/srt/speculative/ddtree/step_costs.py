"""Measures what a step costs at every batch size, width and context, when the server starts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.speculative.ddtree.budget import StepCosts

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.step_graphs import StepGraphs

logger = logging.getLogger(__name__)

SHORT, LONG = 128, 8192  # tokens of context that are measured. A line through both gives the others
WARM_UP_STEPS, STEPS = 1, 3
# Fields of ServerArgs, or their first letters, that differ from run to run without changing the time of a step.
INCIDENTAL = (
    "host",
    "port",
    "nccl_port",
    "dist_init_addr",
    "log_",
    "random_seed",
    "api_key",
    "served_model_name",
)

Table = dict[tuple[int, int], tuple[float, float]]


def step_costs(graphs: StepGraphs) -> StepCosts:
    """Return the costs of steps. Read them from the disk if a server like this one has measured them; else measure.

    Args:
        graphs: the server's, after their capture.

    Returns:
        The same costs on every rank: those of the first.
    """
    parallel = get_parallel()
    path = _cache_file(graphs) if parallel.tp_rank == 0 else None
    table = _shared(_read(path, graphs) if path is not None else None)
    if table is None:
        start = time.perf_counter()
        table = _shared(measure(graphs))
        logger.info(
            "DDTREE: measured the step times of %d batch sizes and %d widths in %.1f s.",
            len(graphs.batch_sizes),
            len(graphs.widths),
            time.perf_counter() - start,
        )
        if path is not None:
            _write(path, table)
    elif path is not None:
        logger.info("DDTREE: read the step times from %s.", path)
    for line in describe(table, graphs.widths):
        logger.info("DDTREE: %s", line)
    return StepCosts(graphs.widths, graphs.batch_sizes, table)


def describe(table: Table, widths: tuple[int, ...]) -> list[str]:
    """Return lines that show the times of steps without context, in milliseconds."""
    sizes = sorted({bs for bs, _ in table})
    head = f"ms per step of {', '.join(map(str, widths))} nodes, without context:"
    return [head] + [
        f"batch {bs}: {', '.join(f'{1e3 * table[bs, width][0]:.2f}' for width in widths)}" for bs in sizes
    ]


def measure(graphs: StepGraphs) -> Table:
    """Time steps of made-up requests, before any real request runs. It restores the slot table and the counts.

    Args:
        graphs: the server's, after their capture.

    Returns:
        (batch size, width) -> seconds without context, and seconds per token of context of all requests together.
    """
    table = graphs.target_runner.req_to_token_pool.req_to_token
    room = table.shape[1] - 2 * graphs.widths[-1]
    slots = graphs.target_runner.token_to_kv_pool.size
    contexts = [min(SHORT, room), min(LONG, room)]
    requests = table.shape[0] - 1  # row 0 is padding's
    expectation = graphs.commits.expectation
    changed = [table] if expectation is None else [table, expectation.totals]
    before = [tensor.clone() for tensor in changed]
    found: Table = {}
    try:
        # Each request has slots of its own while the pool has enough of them.
        for row in range(1, requests + 1):
            window = torch.arange(table.shape[1], device=table.device) + row * (
                contexts[1] + 2 * graphs.widths[-1]
            )
            table[row] = (1 + window % max(1, slots - 1)).to(table.dtype)
        for bs in graphs.batch_sizes:
            rows = 1 + torch.arange(bs, device=table.device) % requests
            for width in graphs.widths:
                short, long = (_time(graphs, rows, context, width) for context in contexts)
                tokens = bs * (contexts[1] - contexts[0])
                per_token = max(0.0, (long - short) / tokens) if tokens else 0.0
                found[bs, width] = max(0.1 * short, short - bs * contexts[0] * per_token), per_token
    finally:
        for tensor, values in zip(changed, before):
            tensor.copy_(values)
    return found


def _time(graphs: StepGraphs, rows: torch.Tensor, context: int, width: int) -> float:
    """Return the seconds of a step of greedy requests with `context` tokens each."""
    lens = torch.full(rows.shape, context, dtype=torch.int64, device=rows.device)
    batch = SimpleNamespace(
        seq_lens=lens,
        req_pool_indices=rows,
        spec_info=SimpleNamespace(bonus_tokens=torch.zeros_like(lens)),
        multimodal_inputs=None,
    )
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(WARM_UP_STEPS + STEPS):
        if i == WARM_UP_STEPS:
            start.record()
        step = graphs.begin(batch, width)
        step.draft()
        output, _ = step.verify()
        step.accept(torch.argmax(output.next_token_logits, dim=-1, out=step.target_out))
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / STEPS


# ---- the disk ----


def _cache_file(graphs: StepGraphs) -> Path:
    """Return the file for servers of this kind."""
    key = json.dumps(_kind(graphs), sort_keys=True, default=str)
    folder = Path(os.path.expanduser(envs.SGLANG_CACHE_DIR.get())) / "ddtree"  # Path's raises without a home
    return folder / f"step-costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _kind(graphs: StepGraphs) -> dict[str, Any]:
    """Return what the times depend on: model, GPU, versions and arguments."""
    arguments = {
        name: value
        for name, value in vars(get_server_args()).items()
        if not name.startswith(("_", *INCIDENTAL)) and isinstance(value, (str, int, float, bool, list, tuple))
    }
    return dict(
        gpu=torch.cuda.get_device_name(),
        versions=[torch.__version__, *map(_version, ("sglang", "sglang-kernel-ddtree"))],
        model=graphs.target_runner.model_config.hf_config.to_dict(),
        widths=graphs.widths,
        batch_sizes=graphs.batch_sizes,
        arguments=arguments,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a tree that was unpacked, not installed
        return "unknown"


def _read(path: Path, graphs: StepGraphs) -> Table | None:
    """Return the table of a file; None if there is none for these graphs."""
    try:
        rows = json.loads(path.read_text())["seconds"]
        table = {(int(bs), int(width)): (float(fixed), float(slope)) for bs, width, fixed, slope in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    complete = table.keys() == {(bs, width) for bs in graphs.batch_sizes for width in graphs.widths}
    usable = all(0 < fixed < math.inf and 0 <= slope < math.inf for fixed, slope in table.values())
    return table if complete and usable else None


def _write(path: Path, table: Table) -> None:
    rows = [[bs, width, *times] for (bs, width), times in table.items()]
    temporary = path.with_suffix(f".{time.time_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(gpu=torch.cuda.get_device_name(), seconds=rows)))
        temporary.rename(path)
    except OSError as error:
        logger.warning(
            "DDTREE: the step times cannot be saved, so the next start measures them again: %s", error
        )
        with suppress(OSError):
            temporary.unlink()


def _shared(value: Any) -> Any:
    """Return the first rank's value."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return value
    box = [value]
    group = parallel.tp_group
    torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
    return box[0]
