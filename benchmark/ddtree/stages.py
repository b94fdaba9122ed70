"""What host_step.py needs to split a decode step's time into stages.

`watch` wraps the methods of a scheduler that a step passes through. While `Stages` records, each call adds the time
that it spent outside of the calls below it, its self time, to its stage. `read_trace` does the same for a trace of
torch's profiler.
"""

from __future__ import annotations

import bisect
import functools
import json
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

WAIT = "wait for the device"
STEP = "run_batch"  # the stage whose first moment begins a step


class Stages:
    """Self times of stages, summed over steps that run a whole batch.

    A step is counted when it and the next one decode `batch` requests: what a prefill, a finished request or an idle turn
    disturbs is dropped.
    """

    def __init__(self):
        self.batch = 0  # requests of a step that counts; 0: none does
        self.profiling = False  # whether stages also become annotations of torch's profiler
        self.begin(0)
        self._stack = []
        self._thread = threading.get_ident()

    def begin(self, batch: int, skip: int = 0) -> None:
        """Forget what was recorded. Record steps of `batch` requests, after the next `skip` of them."""
        self.batch = batch
        self.steps, self.seconds = 0, 0.0
        self.step_seconds = []  # of each step that counts
        self.tokens = Counter()  # by request
        self.self_seconds, self.calls = defaultdict(float), Counter()
        self._pending, self._pending_calls = defaultdict(float), Counter()
        self.skip(skip)

    def skip(self, steps: int) -> None:
        """Leave out the next steps."""
        self._skip, self._step_began, self._tokens_before = steps, None, Counter()

    def step(self, emitted: dict[str, int]) -> None:
        """Note that a batch is about to run.

        Args:
            emitted: tokens so far of each request that decodes; empty: it is another kind of batch.
        """
        now = time.perf_counter()
        whole = len(emitted) == self.batch > 0
        if self._step_began is not None and whole:
            if self._skip > 0:
                self._skip -= 1
            else:
                self.steps += 1
                self.seconds += now - self._step_began
                self.step_seconds.append(now - self._step_began)
                self.tokens.update({name: n - self._tokens_before[name] for name, n in emitted.items()})
                for name, seconds in self._pending.items():
                    self.self_seconds[name] += seconds
                self.calls.update(self._pending_calls)
        self._pending, self._pending_calls = defaultdict(float), Counter()
        self._step_began = now if whole else None
        self._tokens_before = Counter(emitted)

    def timed(self, stage: str, function):
        """`function`, whose self time goes to `stage`."""
        import torch

        @functools.wraps(function)
        def wrapped(*args, **options):
            if not self.batch or threading.get_ident() != self._thread:
                return function(*args, **options)
            if self.profiling:
                with torch.profiler.record_function(f"stage:{stage}"):
                    return function(*args, **options)
            began = time.perf_counter()
            self._stack.append(0.0)
            try:
                return function(*args, **options)
            finally:
                whole = time.perf_counter() - began
                self._pending[stage] += whole - self._stack.pop()
                self._pending_calls[stage] += 1
                if self._stack:
                    self._stack[-1] += whole

        return wrapped


def watch(scheduler, stages: Stages) -> None:
    """Wrap what a decode step of upstream's Scheduler passes through, whatever the algorithm."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    worker = scheduler.draft_worker or scheduler.tp_worker
    runners = {"target": scheduler.tp_worker.model_runner}
    if scheduler.draft_worker is not None:
        runners["draft"] = scheduler.draft_worker.draft_model_runner
    watched = [
        (scheduler, "get_next_batch_to_run", "schedule"),
        (scheduler, "process_batch_result", "results"),
        (scheduler, "_copy_result_to_cpu", "results to the host"),
        (scheduler, "_relay_forward_payload", "relay"),
        (worker, "forward_batch_generation", "worker"),
        (worker, "_append_target_hidden_to_draft_kv_by_loc", "drafter's KV"),
    ]
    watched += [
        (getattr(scheduler, "future_map", None), name, "relay")
        for name in ("publish", "resolve_seq_lens_cpu")
    ]
    # DFLASH's one method for a stage, and DDTREE's objects for all of them.
    watched.append((worker, "_accept_block", "accept"))
    for step in (getattr(worker, "step_graphs", None), _forward_step()):
        watched += [(step, stage, stage) for stage in ("draft", "verify", "accept")]
    for who, runner in runners.items():
        graphs = runner.decode_cuda_graph_runner
        watched += [
            (runner, "forward", f"{who}: forward"),
            (runner.attn_backend, "init_forward_metadata_out_graph", f"{who}: attention metadata"),
            (runner.attn_backend, "init_forward_metadata", f"{who}: attention metadata"),
            (graphs, "load_batch", f"{who}: graph inputs"),
            (getattr(graphs, "backend", None), "replay", f"{who}: graph launch"),
        ]
    for owner, name, stage in watched:
        if hasattr(owner, name):
            setattr(owner, name, stages.timed(stage, getattr(owner, name)))
    # upstream makes the target's ForwardBatch in a class method, DFLASH and DDTREE the drafter's by hand
    ForwardBatch.init_new = staticmethod(stages.timed("target: batch", ForwardBatch.init_new))
    if torch.cuda.is_available():
        for waiting in (torch.cuda.Event, torch.cuda.Stream):
            waiting.synchronize = stages.timed(WAIT, waiting.synchronize)

    run = stages.timed(STEP, scheduler.run_batch)

    @functools.wraps(run)
    def run_batch(batch, *args, **options):
        requests = batch.reqs if batch.forward_mode.is_decode() else []
        stages.step({request.rid: len(request.output_ids) for request in requests})
        return run(batch, *args, **options)

    scheduler.run_batch = run_batch


def _forward_step() -> type | None:
    """DDTREE's class of a step in upstream's forwards, where it is installed."""
    try:
        from sglang.srt.speculative.ddtree.forward_step import ForwardStep
    except ImportError:
        return None
    return ForwardStep


def read_trace(path: Path, skip: int) -> dict:
    """Launches and device time of each stage, out of a trace whose stages are annotations.

    Args:
        path: the file of a Chrome trace that torch's profiler has written while `Stages.profiling` was on.
        skip: steps to leave out at the beginning.

    Returns:
        steps; device_us and idle_us, busy and idle time of the device per step; of each stage per step: launches, by API,
        and device_us of what they started; kernels: the longest ones of a step, with stage and count.
    """
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("stage:")]
    spans.sort(key=lambda e: (e["ts"], -e["dur"]))
    steps = [e["ts"] for e in spans if e["name"] == f"stage:{STEP}"][skip:]
    if len(steps) < 2:
        raise ValueError(f"skip: expected a trace of more than {skip} steps, got {len(steps) + skip}")
    first, last, count = steps[0], steps[-1], len(steps) - 1
    threads = {e["tid"] for e in spans}
    starts = [e["ts"] for e in spans]

    def stage_at(event) -> str:
        """The innermost stage at an event's start: the last one that began before it and has not ended."""
        for i in range(bisect.bisect_right(starts, event["ts"]) - 1, -1, -1):
            if spans[i]["ts"] + spans[i]["dur"] >= event["ts"]:
                return spans[i]["name"].removeprefix("stage:")
            if spans[i]["name"] == f"stage:{STEP}":
                break  # a step's first stage: what is outside of it is in none before
        return "event loop"

    launches, started_by = defaultdict(Counter), {}
    for e in events:
        is_call = e.get("cat") in ("cuda_runtime", "cuda_driver") and first <= e["ts"] < last
        if is_call and any(word in e["name"] for word in ("Launch", "Memcpy", "Memset")):
            stage = stage_at(e) if e["tid"] in threads else "another thread"
            launches[stage][e["name"]] += 1
            started_by[e["args"]["correlation"]] = stage
    device, kernels, busy = defaultdict(float), defaultdict(lambda: [0.0, 0]), []
    for e in events:
        if (
            e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            and e["args"].get("correlation") in started_by
        ):
            stage = started_by[e["args"]["correlation"]]
            device[stage] += e["dur"]
            kernels[stage, e["name"]][0] += e["dur"]
            kernels[stage, e["name"]][1] += 1
            busy.append((e["ts"], e["ts"] + e["dur"]))
    covered, end = 0.0, -1.0
    for begin, until in sorted(busy):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    whole = end - min(busy)[0] if busy else 0.0
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    return dict(
        steps=count,
        device_us=covered / count,
        idle_us=(whole - covered) / count,
        launches={s: {name: n / count for name, n in calls.items()} for s, calls in launches.items()},
        stage_device_us={s: us / count for s, us in device.items()},
        kernels=[
            dict(stage=s, us=us / count, count=n / count, name=name[:120])
            for (s, name), (us, n) in longest[:60]
        ],
    )
