"""Measures what a step costs at every batch size, width and context, when the server starts."""

from __future__ import annotations

import hashlib
import json
import logging
import time
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

SHORT, LONG = 128, 8192  # tokens of context that are measured; other contexts follow by a line
WARM_UP_STEPS, STEPS = 1, 3
# Fields of ServerArgs that the time of a step does not depend on, but that differ from run to run.
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
    """Return the costs of steps: from the disk if a server of this kind measured them before, else measured.

    Args:
        graphs: captured.

    Returns:
        The same costs on every rank: those of the first.
    """
    parallel = get_parallel()
    path = _cache_file(graphs) if parallel.tp_rank == 0 else None
    table = _shared(_read(path) if path is not None else None)
    if table is None:
        start = time.perf_counter()
        table = _shared(measure(graphs))
        logger.info(
            "DDTREE: measured steps of %d batch sizes and %d widths in %.1f s.",
            len(graphs.batch_sizes),
            len(graphs.widths),
            time.perf_counter() - start,
        )
        if path is not None:
            _write(path, table)
    elif path is not None:
        logger.info("DDTREE: the times of steps are from %s.", path)
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
    """Time steps of made-up requests. It needs the device for itself: no request may run yet.

    Args:
        graphs: captured.

    Returns:
        (batch size, width) -> seconds without context, and seconds per token of context of all requests together.
    """
    pool, table = graphs.target_runner.req_to_token_pool, graphs.target_runner.req_to_token_pool.req_to_token
    room = table.shape[1] - 2 * graphs.widths[-1]
    slots = graphs.target_runner.token_to_kv_pool.size
    contexts = [min(SHORT, room), min(LONG, room)]
    requests = table.shape[0] - 1  # row 0 is padding's
    before = table.clone()
    found: Table = {}
    try:
        for row in range(
            1, requests + 1
        ):  # slots of different requests are different, as far as the pool goes
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
        pool.req_to_token.copy_(before)
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
    folder = Path(envs.SGLANG_CACHE_DIR.get()).expanduser() / "ddtree"
    return folder / f"step-costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _kind(graphs: StepGraphs) -> dict[str, Any]:
    """Return what times depend on: model, GPU, versions and flags."""
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


def _read(path: Path) -> Table | None:
    try:
        rows = json.loads(path.read_text())["seconds"]
        return {(int(bs), int(width)): (float(fixed), float(slope)) for bs, width, fixed, slope in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not ours: measure


def _write(path: Path, table: Table) -> None:
    rows = [[bs, width, *times] for (bs, width), times in table.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{time.time_ns()}")
        temporary.write_text(json.dumps(dict(gpu=torch.cuda.get_device_name(), seconds=rows)))
        temporary.rename(path)
    except OSError as error:
        logger.warning("DDTREE: the times of steps are not kept: %s", error)


def _shared(value: Any) -> Any:
    """Return the first rank's value."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return value
    box = [value]
    group = parallel.tp_group
    torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
    return box[0]
