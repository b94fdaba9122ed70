"""Measures host and device time of a decode step by stage: plain decoding, DFLASH and DDTREE in one run.

It runs engines (support.engine) with graphs and overlap scheduling, without HTTP and tokenizer. A group of engines
starts together; then one is measured at a time while the others are idle. A first pass times the stages on the host. A
second pass, under torch's profiler, counts launches and gives the device time of each stage. The profiler slows the host
down, so no host time is taken from it. With --rounds, the engines of the group take turns at every batch of a round, so
that other work on the host slows all of them alike. The first of several rounds only warms up.

    PYTHONPATH=test python -m benchmark.ddtree.host_step --model DIR --drafter DIR
    PYTHONPATH=test python -m benchmark.ddtree.host_step --model DIR --drafter DIR --rounds 10 --no-profile
    PYTHONPATH=test python -m benchmark.ddtree.host_step --shape 8b --contexts 4096 --topic 8b-step

The prompts of a shape are not computed: their KV is random, as the weights are. Those of a shape with recurrent layers
are computed, because KV alone is not enough to continue them. The drafter of a shape knows nothing of the target. With
--acceptance, traces of another model say what the target accepts (benchmark/serving/acceptance.py).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import gc
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.engine import Engine
from support.processes import EngineProcess

from benchmark.ddtree.medians import median_and_interval
from benchmark.ddtree.record import origin, save
from benchmark.ddtree.shapes import BLOCK_SIZE, SHAPES, randomize, write_configs
from benchmark.ddtree.stages import WAIT, Stages, read_trace, watch

FOLDER = Path(__file__).parent
AGAIN = " again"
SKIPPED_STEPS = 8  # they compile what is compiled at the first use
LATER_SKIPPED_STEPS = 3  # of several rounds, before which everything ran once
FIRST_TOKENS = 4  # of an answer that only compiles what is compiled at the first use
PROFILED_STEPS = 24
START_SECONDS = 300
SAVE_SECONDS = 5
# A width whose median is below this part of the best one's tokens per second has no more turns: at first, and later on.
SLOW, LATER_SLOW, LATER = 0.8, 0.9, 3
PAUSE = 3.0  # a step that takes longer than this many medians counts as so many: the host paused


class Batch(NamedTuple):
    """Requests that are answered at once.

    Attributes:
        prompts: token ids.
        temperature: of all of them.
    """

    prompts: list[list[int]]
    temperature: float = 0.0


def decode(engine: Engine, batch: Batch, tokens: int, enough: Callable[[], bool] = lambda: False) -> None:
    """Answer a batch with `tokens` tokens per prompt. Abort all answers at once when `enough` returns True."""
    requests = [
        engine.submit(prompt, temperature=batch.temperature, max_new_tokens=tokens, ignore_eos=True)
        for prompt in batch.prompts
    ]
    running = list(requests)

    def each_turn() -> bool:
        if running and enough():
            for request in running:
                if not request.finished():
                    engine.abort(request)
            running.clear()
        return True

    engine.finish(requests, each_turn)


def time_stages(
    engine: Engine,
    stages: Stages,
    batches: list[Batch],
    tokens: int,
    most: float,
    skipped: int = SKIPPED_STEPS,
) -> dict[str, Any]:
    """Times the stages of the steps in which all prompts of a batch are answered at once.

    Args:
        engine: a watched engine that has the prompts' KV in its cache.
        stages: what `watch` made.
        batches: of the same size, answered one after the other.
        tokens: of an answer.
        most: steps per batch. Its answers end after them.
        skipped: first steps of each batch that are left out.

    Returns:
        Per step: its time, the host's own time and wait, all in microseconds; time and calls by stage. `steady_us` is the
        time of a step without the host's pauses. And the time per output token of each request, in milliseconds.

    Raises:
        ValueError: the answers are too short.
    """
    size = len(batches[0].prompts)
    stages.begin(size)
    tpot_ms: list[float] = []
    for batch in batches:
        seconds, known, before = stages.seconds, set(stages.tokens), stages.steps
        stages.skip(skipped)
        decode(engine, batch, tokens, lambda before=before: stages.steps - before >= most)
        new = stages.tokens.keys() - known
        tpot_ms += [1e3 * (stages.seconds - seconds) / max(1, stages.tokens[name]) for name in new]
    steps = stages.steps
    if steps == 0:
        raise ValueError(f"--tokens: expected enough for more than {skipped} steps, got {tokens}")
    host_us = {stage: 1e6 * seconds / steps for stage, seconds in stages.self_seconds.items()}
    waited_us = host_us.pop(WAIT, 0.0)
    step_us = 1e6 * stages.seconds / steps
    longest = PAUSE * statistics.median(stages.step_seconds)
    return dict(
        steps=steps,
        step_us=step_us,
        steady_us=1e6 * statistics.fmean(min(seconds, longest) for seconds in stages.step_seconds),
        host_busy_us=step_us - waited_us,
        waited_us=waited_us,
        tokens_per_step=stages.tokens.total() / steps / size,
        tpot_ms=[round(value, 4) for value in tpot_ms],
        host_us=host_us,
        calls={stage: count / steps for stage, count in stages.calls.items()},
    )


def loop_us() -> float:
    """Times a fixed loop of Python, in microseconds. It shows how fast the host's CPU is at the moment."""
    start, counts = time.perf_counter(), {}
    for i in range(10_000):
        counts[i & 255] = counts.get(i & 127, 0) + i
    return 1e6 * (time.perf_counter() - start)


class Cpus:
    """Runs each measurement on the CPU that is the fastest at the moment. A virtual CPU may share a core with a neighbor.

    Args:
        cpus: to choose from; none: leave it to the host.
    """

    TOLERANCE, ATTEMPTS = 1.15, 3

    def __init__(self, cpus: list[int]) -> None:
        self._cpus, self._best = cpus, math.inf

    def measure(self, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the job's result with `loop_us`: loop_us() before and after it. If the CPU became slow, runs it again."""
        if not self._cpus:
            return job()
        for _ in range(self.ATTEMPTS):
            before = self._take_fastest()
            result = job()
            after = min(loop_us(), loop_us())
            self._best = min(self._best, before)
            if max(before, after) < self.TOLERANCE * self._best:
                break
        return result | dict(loop_us=[round(before), round(after)])

    def _take_fastest(self) -> float:
        """Moves this thread, which runs the scheduler, to the fastest CPU. Returns its loop_us()."""
        times = {}
        for cpu in self._cpus:
            os.sched_setaffinity(0, [cpu])
            times[cpu] = min(loop_us(), loop_us())
        fastest = min(times, key=times.__getitem__)
        os.sched_setaffinity(0, [fastest])
        return times[fastest]


class OneWidth(NamedTuple):
    """A budget that always chooses the same width."""

    width: int
    calibration_error: float = 0.0

    def choose(self, load: Any) -> int:
        return self.width

    def observe(self, step: Any) -> None:
        pass


class Widths:
    """Records the widths that --speculative-ddtree-budget auto chooses, and what it expects of them.

    Args:
        engine: of any kind. With another budget nothing is counted.
    """

    def __init__(self, engine: Engine) -> None:
        self._counts: Counter[int] = Counter()
        self._control = control = getattr(engine.scheduler.draft_worker, "control", None)
        if control is not None:
            self._budget, self._most = control.budget, None
            self._choose, control.choose = control.choose, self._count
            self._observe, self._budget.observe = self._budget.observe, self._note
        self._reports: list[tuple[int, int, bool]] = []
        self._is_measured = False

    @property
    def are_chosen(self) -> bool:
        """Whether the engine chooses widths."""
        return self._control is not None

    def turns(
        self, ordered: list[str], speeds: dict[int, list[float]], seed: str
    ) -> list[tuple[int | None, str]]:
        """Return the turns of a row in random order: the budget's choices, and each of the ordered widths.

        Args:
            ordered: widths, "all" for every one that the engine has, "best" for the fastest one of the first round. A
                width that is named again gets a second turn, which shows by how much equal turns differ.
            speeds: tokens per second of earlier turns by ordered width. Those that are far from the best get no turn.
            seed: of the order.

        Returns:
            The width of each turn, None if the budget chooses; and what its row's case says of it.
        """
        if not self.are_chosen:
            return [(None, "")]
        medians = {width: statistics.median(of_width) for width, of_width in speeds.items()}
        best = max(medians.values(), default=0.0)
        named: list[int] = []
        for name in ordered:
            if name == "best":
                named += [max(speeds, key=lambda width: speeds[width][0])] if speeds else []
            else:
                named += self._budget.widths if name == "all" else [int(name)]
        counts: Counter[int] = Counter()
        turns: list[tuple[int | None, str]] = [(None, "")]
        for width in named:
            least = LATER_SLOW if len(speeds.get(width, ())) >= LATER else SLOW
            if width in self._budget.widths and medians.get(width, math.inf) >= least * best:
                turns.append((width, f", graphs of auto:{width}" + AGAIN * counts[width]))
                counts[width] += 1
        random.Random(seed).shuffle(turns)
        return turns

    def measure_alone(self, engine: Engine) -> None:
        """Measures the times of steps again, once. When the engines of a group start at once, they slow each other down.

        It overwrites KV in the pool.
        """
        graphs = getattr(engine.scheduler.draft_worker, "step_graphs", None)
        if self._is_measured or not self.are_chosen or graphs is None:
            return
        from sglang.srt.speculative.ddtree.step_costs import measure

        self._is_measured = True
        with torch.inference_mode():
            self._budget.costs.table.update(measure(graphs))
        torch.cuda.synchronize()  # the next step runs on another stream

    def fix(self, width: int | None) -> None:
        """Fix the width of the next steps, and let the budget learn nothing from them. None: the budget chooses again."""
        if self._control is not None:
            self._control.budget = self._budget if width is None else OneWidth(width)

    def _count(self, load: Any) -> int:
        width = self._choose(load)
        self._counts[width] += 1
        if self._most is None or load.bs >= self._most.bs:
            self._most = load
        return width

    def _note(self, step: Any) -> None:
        if step.seconds is not None:
            self._reports.append((step.width, round(1e6 * step.seconds), step.host_bound))
        self._observe(step)

    def take(self) -> dict[str, Any]:
        """Return fields of a row: the steps since the last call by width, and the tokens and ms expected of a step by width.

        The expectations are of the last load of the most requests. `reports` has what the budget learned of times: width,
        microseconds, and whether the host was late. Without auto there are no fields.
        """
        if not self._counts:
            return {}
        counts, load = self._counts, self._most
        self._counts, self._most = Counter(), None
        expected = {
            width: (self._budget.tokens(width), 1e3 * self._budget.costs.seconds(load, width))
            for width in self._budget.widths
        }
        reports, self._reports = self._reports, []
        return dict(widths=dict(sorted(counts.items())), expected=expected) | (
            dict(reports=reports) if reports else {}
        )


def profile(engine: Engine, stages: Stages, batch: Batch) -> dict[str, Any]:
    """Return read_trace() of a short answer to a batch. The arguments are those of time_stages()."""
    cuda = engine.args.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + cuda * [torch.profiler.ProfilerActivity.CUDA]
    stages.begin(len(batch.prompts))
    stages.profiling = True
    with torch.profiler.profile(activities=activities) as profiler:
        decode(engine, batch, SKIPPED_STEPS + PROFILED_STEPS)
        if cuda:
            torch.cuda.synchronize()
    stages.profiling = False
    stages.begin(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path, SKIPPED_STEPS // 2)


def fill_cache(engine: Engine, prompts: list[list[int]]) -> None:
    """Put the prompts into the radix cache with random KV, of target and drafter.

    A prefill of sixteen prompts of 32,768 tokens takes half a minute per engine, and no step time depends on its values.

    Raises:
        RuntimeError: the KV pool is too small.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    scheduler = engine.scheduler
    runners = [scheduler.tp_worker.model_runner]
    if scheduler.draft_worker is not None:
        runners.append(scheduler.draft_worker.draft_model_runner)
    for runner in runners:
        pool = runner.token_to_kv_pool
        for buffer in pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer:
            buffer.normal_()
    allocator = scheduler.token_to_kv_pool_allocator
    for prompt in prompts:
        slots = allocator.alloc(len(prompt))
        if slots is None:
            raise RuntimeError(
                f"fill_cache: expected {len(prompt)} free slots, got {allocator.available_size()}"
            )
        scheduler.tree_cache.insert(InsertParams(key=RadixKey(array("q", prompt)), value=slots))
    if engine.args.device == "cuda":
        # The cache has copied the slots on this stream, behind all the random numbers. The scheduler has streams of
        # its own, which wait for none of this.
        torch.cuda.synchronize()


class Measurement:
    """Measures one engine. It is the job of an EngineProcess.

    Args:
        may_start: event. The engine is created when it is set.
    """

    def __init__(self, may_start: Any) -> None:
        self._may_start = may_start

    def before(self) -> None:
        """Import what an engine needs, and wait for the group's turn.

        It skips DFLASH's rehearsal of sampling, for which FlashInfer compiles for two minutes. All answers are greedy.
        """
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

        DFlashWorkerV2.prewarm_sampling = lambda worker: worker.model_runner.prewarm_sampling()
        self._may_start.wait()

    def __call__(
        self,
        engine: Engine,
        ready: Any,
        stop: Any,
        turn: Any,
        rows: Any,
        case: str,
        batches: list[dict[str, list[Batch]]],
        options: argparse.Namespace,
    ) -> None:
        """Measure each batch of each round.

        Args:
            engine: to measure.
            ready: barrier of the group's engines. A batch begins when all of them have reached it.
            stop: event. Once it is set, no batch of a second or later round begins.
            turn: lock. One engine is measured at a time.
            rows: queue. It gets a row per round and batch.
            case: of the rows.
            batches: of a row, by its name, of each round.
            options: the command's.
        """
        if options.shape:
            randomize(engine)
            if "gdn" not in SHAPES[options.shape]:
                every = [batch for of_row in batches[0].values() for batch in of_row]
                fill_cache(engine, max(every, key=lambda batch: sum(map(len, batch.prompts))).prompts)
        stages, widths = Stages(), Widths(engine)
        stand_in = None
        if options.acceptance:
            from benchmark.serving.acceptance import StandIn

            traces = dict(zip(options.temperatures, options.acceptance, strict=True))
            stand_in = StandIn(engine, traces, teaches=options.shape is not None)
        watch(engine.scheduler, stages)
        cpus, frozen = Cpus(options.cpus), 0
        speeds: dict[str, dict[int, list[float]]] = {}  # by row and ordered width
        for of_row in batches[0].values():
            # All engines at once, because what is compiled at the first use takes long.
            self._warm_up(engine, stand_in, of_row)
        for i, name, of_row in [(i, *row) for i, of_round in enumerate(batches) for row in of_round.items()]:
            try:
                ready.wait(START_SECONDS)
            except threading.BrokenBarrierError:
                pass  # another engine did not start
            if i > 0 and stop.is_set():
                break
            if i > frozen:  # upstream does so after its warm-up
                gc.collect()
                gc.freeze()
                frozen = len(batches)
            if i == 0 and options.rounds > 1 and not widths.are_chosen:
                continue
            with turn:
                if widths.are_chosen and i == 0:
                    widths.measure_alone(engine)
                    self._begin(stand_in, of_row[0])
                    decode(engine, of_row[0], max(options.settle, 2 * SKIPPED_STEPS))
                elif widths.are_chosen:  # the batch size has changed, and the budget has to settle
                    self._measure(engine, stages, widths, stand_in, of_row[:1], options)
                of_name = speeds.setdefault(name, {})
                for width, order in widths.turns(options.also, of_name, f"{name} {i}"):
                    widths.fix(width)
                    named = case.split(":")[0] + order if order else case
                    began = time.monotonic()
                    row = dict(case=named, batch=name, round=i, at=round(began - options.began, 2))
                    try:
                        row |= cpus.measure(
                            partial(self._measure, engine, stages, widths, stand_in, of_row, options)
                        )
                    except ValueError as error:  # one row less is no reason to lose the others
                        print(f"{named}, {name}, round {i}: {error}", file=sys.stderr, flush=True)
                        continue
                    row["turn_seconds"] = round(time.monotonic() - began, 3)
                    if width is not None:
                        of_name.setdefault(width, []).append(tokens_per_second(row))
                    rows.put(row)
                widths.fix(None)

    def _warm_up(self, engine: Engine, stand_in: Any, batches: list[Batch]) -> None:
        """Fills the radix cache with the prompts of a row."""
        for batch in batches:
            self._begin(stand_in, batch)
            decode(engine, batch, FIRST_TOKENS)

    def _begin(self, stand_in: Any, batch: Batch) -> None:
        if stand_in is not None:
            stand_in.begin(batch.temperature)

    def _measure(
        self,
        engine: Engine,
        stages: Stages,
        widths: Widths,
        stand_in: Any,
        batches: list[Batch],
        options: argparse.Namespace,
    ) -> dict[str, Any]:
        """Return the fields of a row. Raises ValueError if the answers are too short."""
        widths.take()
        self._begin(stand_in, batches[0])
        skipped = LATER_SKIPPED_STEPS if options.rounds > 1 else SKIPPED_STEPS
        row = time_stages(engine, stages, batches, options.tokens, options.steps, skipped) | widths.take()
        if stand_in is not None and stand_in.is_active:
            row |= dict(tokens_per_step=stand_in.tokens_per_step(row.get("widths")), tpot_ms=[])
        if not options.no_profile:
            row["profile"] = profile(engine, stages, batches[0])
        if options.rounds > 1:
            del row["host_us"], row["calls"]  # they would make a large file
        return row


class LastRound:
    """Sets an event when there is no time for another batch. It is the action of the barrier between batches.

    Args:
        stop: the event.
        deadline: time.monotonic() of the host.
    """

    def __init__(self, stop: Any, deadline: float) -> None:
        self.stop, self.deadline = stop, deadline

    def __call__(self) -> None:
        if time.monotonic() > self.deadline:
            self.stop.set()


def keep(rows: Any, result: dict[str, Any], output: Path, options: argparse.Namespace) -> None:
    """Saves rows as they come, because a time limit may end the command.

    Args:
        rows: queue of rows. None ends it.
        result: gets them, and their summary.
        output: file.
        options: the command's.
    """
    saved = -math.inf
    for row in iter(rows.get, None):
        result["results"].append(row)
        if time.monotonic() - saved > SAVE_SECONDS:  # writing a large file takes longer than a turn
            save(result, output)
            saved = time.monotonic()
        if options.rounds == 1:
            show(row["case"], row, options.kernels)
    result["summary"] = summarize(result["results"]) if result["results"] else []
    save(result, output)


def show(case: str, row: dict[str, Any], kernels: int) -> None:
    """Print a row: its stages, longest host time first, and the longest kernels."""
    print(
        f"\n== {case}, {row['batch']}: {row['step_us']:.0f} us per step, host busy {row['host_busy_us']:.0f}, waited for "
        f"the device {row['waited_us']:.0f}; {row['tokens_per_step']:.2f} tokens per step, {row['steps']} steps"
    )
    found = row.get("profile", dict(launches={}, stage_device_us={}, kernels=[]))
    if "device_us" in found:
        print(
            f"   device busy {found['device_us']:.0f} us, idle {found['idle_us']:.0f} us, under the profiler"
        )
    stages = dict.fromkeys([*row["host_us"], *found["launches"]])
    for stage in sorted(stages, key=lambda stage: -row["host_us"].get(stage, 0.0)):
        launches = sum(found["launches"].get(stage, {}).values())
        print(
            f"   host {row['host_us'].get(stage, 0.0):7.1f} us in {row['calls'].get(stage, 0.0):4.1f} calls, "
            f"{launches:5.1f} launches, device {found['stage_device_us'].get(stage, 0.0):8.1f} us: {stage}"
        )
    for kernel in found["kernels"][:kernels]:
        print(f"      {kernel['us']:8.1f} us  {kernel['count']:6.1f} x  [{kernel['stage']}] {kernel['name']}")
    sys.stdout.flush()


def tokens_per_second(row: dict[str, Any]) -> float:
    """Return the tokens that a row's batch emits per second of decoding, without the host's pauses if they are known."""
    requests = int(row["batch"].split()[1].rstrip(","))
    return 1e6 * requests * row["tokens_per_step"] / row.get("steady_us", row["step_us"])


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per case and batch: medians over the rounds, each with its interval. The first of several is left out.

    Ratios compare tokens per second round by round. `ratio_to_best` is to the fastest case without auto: that of the even
    rounds in the odd ones, and the other way round. The fastest one of the same rounds would be the luckiest one as well.
    `all_to_best` compares the sums of these rounds, pauses of the host included. `ratio_to_CASE` is to plain decoding, to
    DFLASH, and to an equal turn. `tpot_ms` has the median and the 99th percentile of all requests.
    """
    first = min(1, max(row["round"] for row in rows))
    by_batch: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if row["round"] >= first:
            by_batch.setdefault(row["batch"], {}).setdefault(row["case"], {})[row["round"]] = row
    return [
        dict(case=case, batch=batch, rounds=len(by_case[case]))
        | _medians(by_case[case])
        | _ratios(case, by_case)
        for batch, by_case in by_batch.items()
        for case in by_case
    ]


def _medians(of_case: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a case's rows, which are given by round."""
    found: dict[str, Any] = {
        field: statistics.median(row[field] for row in of_case.values())
        for field in ("step_us", "host_busy_us", "tokens_per_step")
    }
    found["tokens_per_second"] = median_and_interval([tokens_per_second(row) for row in of_case.values()])
    tpot_ms = sorted(value for row in of_case.values() for value in row.get("tpot_ms", ()))
    if tpot_ms:
        found["tpot_ms"] = statistics.median(tpot_ms), tpot_ms[math.ceil(0.99 * len(tpot_ms)) - 1]
    return found


def _ratios(case: str, by_case: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return what summarize() says of a case compared to others."""
    speeds = {
        name: {i: tokens_per_second(row) for i, row in of_case.items()} for name, of_case in by_case.items()
    }
    own = speeds.pop(case)
    compared = {
        name: {i: name for i in own}
        for name in sorted(speeds)
        if name.split(":")[0] in ("none", "DFLASH") or name == case.removesuffix(AGAIN)
    }
    fixed = {name: of_case for name, of_case in speeds.items() if "=auto" not in name and AGAIN not in name}
    whole = {name: of_case for name, of_case in fixed.items() if 2 * len(of_case) >= len(own)}
    fixed = whole or fixed  # a width that soon has no more turns is not the best one
    found: dict[str, Any] = {}
    if fixed:
        best = {parity: _fastest(fixed, 1 - parity) for parity in (0, 1)}
        found["best"] = sorted(set(best.values()))
        compared["best"] = {i: best[i % 2] for i in own}
    for label, others in compared.items():
        pairs = [(row, by_case[others[i]][i]) for i, row in by_case[case].items() if i in by_case[others[i]]]
        if pairs:
            ratios = [tokens_per_second(row) / tokens_per_second(other) for row, other in pairs]
            found[f"ratio_to_{label}"] = median_and_interval(ratios)
        if pairs and label == "best":
            found["all_to_best"] = _overall([row for row, _ in pairs]) / _overall(
                [other for _, other in pairs]
            )
    return found


def _fastest(speeds: dict[str, dict[int, float]], parity: int) -> str:
    """Return the case with the highest median of the even or the odd rounds; of all rounds if it has none of these."""

    def speed(name: str) -> float:
        of_case = speeds[name]
        return statistics.median([v for i, v in of_case.items() if i % 2 == parity] or of_case.values())

    return max(speeds, key=speed)


def _overall(rows: list[dict[str, Any]]) -> float:
    """Return the tokens per microsecond and request of rows together, each of which counts for the same number of steps."""
    return sum(row["tokens_per_step"] for row in rows) / sum(row["step_us"] for row in rows)


def show_all(rows: list[dict[str, Any]], summary: list[dict[str, Any]]) -> None:
    """Print a line per case and batch: times of a step in microseconds, tokens per step and second, and ratios."""
    width = max([len(row["case"]) for row in summary], default=0)
    device = {(row["case"], row["batch"]): row.get("profile", {}).get("device_us") for row in rows}
    print(
        f"\n{'case':{width}}  step us  host us  device us  tokens/step  tokens/s [interval]  batch; ratios of tokens/s"
    )
    for row in summary:
        device_us = device[row["case"], row["batch"]] or float("nan")
        ratios = [
            f"{field.removeprefix('ratio_')} {value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"
            for field, value in row.items()
            if field.startswith("ratio_")
        ]
        if "all_to_best" in row:
            ratios.append(f"all_to_best {row['all_to_best']:.3f}")
        speed = "{:.0f} [{:.0f}, {:.0f}]".format(*row["tokens_per_second"])
        print(
            f"{row['case']:{width}} {row['step_us']:8.0f} {row['host_busy_us']:8.0f} {device_us:10.0f} "
            f"{row['tokens_per_step']:12.2f}  {speed:>19}  {'; '.join([row['batch'], *ratios])}"
        )
    sys.stdout.flush()


def engine_arguments(
    case: str, common: dict[str, Any], drafted: dict[str, Any], backend: str | None
) -> dict[str, Any]:
    """Return the arguments of a case's engine.

    Args:
        case: none, DFLASH or DDTREE, and any number of :N and :FIELD=VALUE, as in DDTREE:16:attention_backend=triton.
        common: of every case.
        drafted: of the cases with a drafter.
        backend: attention_backend of plain decoding and DFLASH. DDTREE chooses its own.
    """
    algorithm, *options = case.split(":")
    arguments = dict(common)
    if algorithm != "none":
        arguments |= drafted | dict(speculative_algorithm=algorithm)
    if algorithm != "DDTREE" and backend is not None:
        arguments["attention_backend"] = backend
    for option in options:
        field, equals, value = option.partition("=")
        if not equals:
            field, value = "speculative_num_draft_tokens", option
        try:
            arguments[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[field] = value
    return arguments


def batches_of(options: argparse.Namespace, turn: int) -> dict[str, list[Batch]]:
    """Return the batches of each row of a round, by the row's name.

    A model gets given prompts, other ones each round. A shape gets made-up ones, the same ones each round; the shorter
    ones are prefixes of the longer ones.
    """
    if not options.shape:
        given = json.loads(options.prompts.read_text())
        prompts = {}
        for size in options.batches:
            count = math.ceil(options.least_prompts / size)
            taken = [given[(turn * count * size + i) % len(given)] for i in range(count * size)]
            prompts[f"batch {size}"] = [taken[i : i + size] for i in range(0, len(taken), size)]
    else:
        vocabulary = SHAPES[options.shape]["vocabulary"]
        prompts = {
            f"batch {size}, context {context}": [
                [[3 + (17 * i + 31 * j) % (vocabulary - 3) for j in range(context)] for i in range(size)]
            ]
            for context in options.contexts
            for size in options.batches
        }
    return {
        name + (f", T = {temperature:g}" if temperature else ""): [
            Batch(of_batch, temperature) for of_batch in of_row
        ]
        for temperature in options.temperatures
        for name, of_row in prompts.items()
    }


def results_path(topic: str, result: dict[str, Any]) -> Path:
    """Return results/<gpu or cpu>-<date>-<commit7>-<topic>.json."""
    gpu = result["gpu"].removeprefix("NVIDIA ").split()[0].lower() if "gpu" in result else "cpu"
    today = datetime.date.today().isoformat()
    return FOLDER / "results" / f"{gpu}-{today}-{result['commit'][:7]}-{topic}.json"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter")
    parser.add_argument(
        "--prompts", type=Path, default=FOLDER / "prompts.json", help="JSON with token ids, for --model"
    )
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of --model")
    parser.add_argument("--layers", type=int, help="of the target of --shape; default: all")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[4096], help="tokens per prompt, for --shape"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--settle", type=int, default=0,
        help="tokens per answer from which speculative_ddtree_budget=auto learns before the first round",
    )  # fmt: skip
    parser.add_argument(
        "--also", nargs="+", default=[],
        help="widths, all, or best (the fastest one of the first round) that an engine with "
        "speculative_ddtree_budget=auto also runs by order",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance", type=Path, nargs="+",
        help="a trace of record_trace.py per temperature; own: what the model itself accepts",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", default=["none", "DFLASH", "DDTREE:12", "DDTREE:32"],
        help="ALGORITHM[:N][:FIELD=VALUE]...; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--backend", help="attention backend of plain decoding and DFLASH; default: upstream's"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=160, help="tokens per answer")
    parser.add_argument(
        "--steps", type=float, default=math.inf,
        help="measured steps per batch, after which its answers end. Otherwise the longest answer takes many steps with "
        "fewer requests, which are not measured",
    )  # fmt: skip
    parser.add_argument(
        "--least-prompts",
        type=int,
        default=1,
        help="prompts of a row at least, in batches one after the other",
    )
    parser.add_argument("--at-once", type=int, default=4, help="engines of a group")
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine of a group is measured")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="after this time, begin no batch of a second or later round",
    )
    parser.add_argument(
        "--cpus", type=int, nargs="+", default=[],
        help="measure on the one of these CPUs that is the fastest at the moment",
    )  # fmt: skip
    parser.add_argument("--kernels", type=int, default=12, help="the longest kernels to print")
    parser.add_argument("--no-profile", action="store_true", help="only time the host")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of this repository; default: ask git")
    parser.add_argument("--topic", default="host-step", help="in the name of the results file")
    parser.add_argument("--output", type=Path, help="default: results/<gpu>-<date>-<commit7>-<topic>.json")
    options = parser.parse_args()
    if options.shape is None:
        options.contexts = [0]
    if (options.shape is None) == (options.model is None or options.drafter is None):
        parser.error("--shape: expected either it or both --model and --drafter, got neither or all of them")
    return options


def model_arguments(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the arguments that name the target and the drafter. Those of a shape are written into `folder`."""
    if not options.shape:
        return dict(model_path=options.model, speculative_draft_model_path=options.drafter)
    shape = SHAPES[options.shape] | ({} if options.layers is None else dict(layers=options.layers))
    return write_configs(folder, **shape) | dict(speculative_draft_load_format="dummy")


def common_arguments(options: argparse.Namespace, model_path: str, longest: int) -> dict[str, Any]:
    """Return the arguments of every engine.

    Args:
        options: the command's.
        model_path: of the target.
        longest: tokens of the longest request.
    """
    most = max(options.batches)
    arguments: dict[str, Any] = dict(
        model_path=model_path, device=options.device, max_running_requests=most, max_total_tokens=most * longest,
        context_length=longest,
    )  # fmt: skip
    if options.device == "cuda":
        arguments |= dict(
            dtype="bfloat16", attention_backend=None, cuda_graph_bs_decode=options.batches, mem_fraction_static=0.8,
            cuda_graph_backend_prefill="disabled",
        )  # fmt: skip
    else:
        arguments |= dict(dtype="float32", mem_fraction_static=0.3)
    if options.shape:
        arguments["load_format"] = "dummy"
        if "gdn" in SHAPES[options.shape]:
            # A state of Qwen3.5-27B takes 151 MB. With the radix cache, a request would have three.
            arguments |= dict(
                mem_fraction_static=0.9, max_mamba_cache_size=most + 1, disable_radix_cache=True,
                linear_attn_prefill_backend="triton",  # upstream's default is compiled anew in each engine
            )  # fmt: skip
    return arguments


def longest_request(options: argparse.Namespace, batches: list[dict[str, list[Batch]]]) -> int:
    """Return the tokens of the longest prompt and of its longest answer."""
    prompts = (
        len(prompt)
        for of_round in batches
        for of_row in of_round.values()
        for batch in of_row
        for prompt in batch.prompts
    )
    return max(prompts) + max(options.tokens, options.settle) + 512


class Group(NamedTuple):
    """Engines that start together and are measured in turn.

    Attributes:
        may_start: event that lets them start.
        ready: barrier between their rounds.
        engines: the process of each case that is not done yet.
    """

    may_start: Any
    ready: Any
    engines: list[tuple[str, EngineProcess]]

    def measure(self) -> None:
        """Start the engines, and wait until all of them have been measured or have failed."""
        self.may_start.set()
        while self.engines:
            ended = [i for i, (_, engine) in enumerate(self.engines) if engine.has_ended()]
            for i in reversed(ended):
                case, engine = self.engines.pop(i)
                try:
                    engine.result()
                except RuntimeError as error:
                    print(f"{case}: {error}", file=sys.stderr, flush=True)
                    self.ready.abort()  # the others wait for it no longer
            time.sleep(0.5)


def main() -> None:
    options = parse()
    options.began = time.monotonic()
    deadline = options.began + options.seconds
    folder = tempfile.TemporaryDirectory()
    drafted = model_arguments(options, Path(folder.name))
    batches = [batches_of(options, i) for i in range(options.rounds)]
    common = common_arguments(options, drafted["model_path"], longest_request(options, batches))
    result = origin(options) | dict(
        weights=options.shape or options.model,
        layers=options.layers,
        block_size=BLOCK_SIZE if options.shape else None,
        results=[],
    )
    output = options.output or results_path(options.topic, result)
    context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
    turn, rows = context.Lock(), context.SimpleQueue()
    groups = []  # all processes start at once: the imports of a group take place while another one is measured
    for i in range(0, len(options.cases), options.at_once):
        cases = options.cases[i : i + options.at_once]
        may_start, stop = context.Event(), context.Event()
        ready = context.Barrier(len(cases), LastRound(stop, deadline))
        groups.append(Group(may_start, ready, [
            (case, EngineProcess(engine_arguments(case, common, drafted, options.backend), Measurement(may_start), ready,
                                 stop, turn, rows, case, batches, options))
            for case in cases
        ]))  # fmt: skip
    keeper = threading.Thread(target=keep, args=(rows, result, output, options))
    keeper.start()
    for group in groups:
        group.measure()
    rows.put(None)
    keeper.join()
    show_all(result["results"], result.get("summary", []))
    print(f"\n{output}")


if __name__ == "__main__":
    main()
