"""What the tests of DDTREE on a CUDA device share."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.engine import Engine, Greedy
from support.processes import EngineProcess, run_all, start_engine
from support.prompts import patterned_prompts

PROMPTS = patterned_prompts((1, 5, 35, 65, 95, 17, 300))
TOKENS = 64
# For all children together, so that one that hangs does not cost the others' results
SECONDS = int(os.environ.get("SGLANG_TEST_ENGINE_SECONDS", "420"))
# Arguments of every engine.
CUDA = dict(
    device="cuda", dtype="bfloat16", attention_backend="triton", mem_fraction_static=0.8, max_total_tokens=16384,
    cuda_graph_max_bs_decode=8, cuda_graph_backend_prefill="disabled",
)  # fmt: skip


def greedy(engine: Engine) -> tuple[Greedy, tuple[float, int, str] | None]:
    """Answer PROMPTS greedily and sample a few tokens afterwards. The free slots are counted after both.

    Returns:
        The greedy answers, and the largest difference that verify mode `validate` found, with its layer and
        request. None in other modes.
    """
    found = engine.greedy(PROMPTS, TOKENS)
    engine.generate(PROMPTS[:3], temperature=1.0, top_p=0.9, min_p=0.05, max_new_tokens=16, ignore_eos=True)
    found = found._replace(free_slots=(found.free_slots[0], engine.free_slots()))
    worker = engine.scheduler.draft_worker
    if worker is None or getattr(worker, "difference", None) is None:
        return found, None
    worst = worker.difference.read()
    return found, (worst.value, worst.layer, worst.request)


def decoding_noise(engine: Engine) -> list[list[float]]:
    """How decoding's log-probabilities differ from those of one prefill over the same tokens.

    Both run on the same weights, in other kernels and other batches, so this is what bfloat16 makes of them.

    Returns:
        [tokens of all answers to PROMPTS, vocabulary]. A list, because a tensor does not outlive its process.
    """
    outputs, decoded = engine.with_log_probabilities(PROMPTS, TOKENS)
    prefilled = engine.log_probabilities(PROMPTS, outputs)
    return (torch.cat(decoded) - torch.cat(prefilled)).tolist()


def gaps_by_name(engine: Engine, answers: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
    """Engine.gaps() of each engine's answers to PROMPTS, by name."""
    return {name: engine.gaps(PROMPTS, outputs) for name, outputs in answers.items()}


def greedy_without_waiting(engine: Engine) -> tuple[Greedy, tuple[float, int, str] | None, list[str]]:
    """greedy(), and the places (file:line) at which Python waited for the device between draft and commit."""
    worker = engine.scheduler.draft_worker
    assert worker.step_graphs.can_run(1), "upstream's path runs the steps"
    decode = worker._decode
    steps = 0
    waits: set[str] = set()

    def watched(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps < 4:  # the first steps compile Triton kernels
            return decode(*args)
        torch.cuda.set_sync_debug_mode("warn")  # "error" would end the run at the first place
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return decode(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.update(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))

    worker._decode = watched
    result = greedy(engine)
    assert steps > 10, steps
    return (*result, sorted(waits))


class Judge:
    """A job for plain decoding. It returns the gaps of all answers (see support.answers), its own as "plain".

    Args:
        answers: JSON file with the other engines' answers by name. The job waits for it.
    """

    def __init__(self, answers: Path) -> None:
        self.answers = answers

    def __call__(self, engine: Engine) -> dict[str, list[list[float]]]:
        found, _ = greedy(engine)
        deadline = time.monotonic() + SECONDS
        while not self.answers.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return gaps_by_name(engine, json.loads(self.answers.read_text()) | {"plain": found.outputs})


def run_and_judge(
    folder: Path,
    plains: dict[str, dict[str, Any]],
    trees: dict[str, tuple[str, dict[str, Any], Callable[[Engine], Any]]],
    around_judge: dict[str, Callable[[Judge], Callable[[Engine], Any]]] | None = None,
    at_once: int | None = None,
) -> dict[str, Any]:
    """Run engines. Each plain engine judges the answers of its tree engines.

    Args:
        folder: the folder for the answers.
        plains: arguments of the plain engines by name.
        trees: by name: the plain engine that judges, the engine's arguments and its job, whose result starts
            with a Greedy.
        around_judge: for some plain engines, what makes its job from a Judge.
        at_once: how many tree engines run together at most. None: all.

    Returns:
        By name: a job's result, a plain engine's gaps, or the RuntimeError of a child that failed. A tree engine with
        `tp_size` has a list of results, by rank. The first rank's answers are judged.
    """
    wrap = around_judge or {}
    start = time.monotonic()
    judges = {
        name: EngineProcess(arguments, wrap.get(name, lambda judge: judge)(Judge(folder / name)))
        for name, arguments in plains.items()
    }
    starts = {name: partial(start_engine, arguments, job) for name, (_, arguments, job) in trees.items()}
    results: dict[str, Any] = {}
    answers: dict[str, dict[str, list[list[int]]]] = {name: {} for name in plains}
    for name, result in run_all(starts, at_once or len(starts), SECONDS):
        results[name] = result
        _report(name, start, result)
        if not isinstance(result, RuntimeError):
            judge, arguments, _ = trees[name]
            first = result[0] if arguments.get("tp_size", 1) > 1 else result
            answers[judge][name] = first[0].outputs
    for judge, given in answers.items():
        (folder / "answers").write_text(json.dumps(given))
        (folder / "answers").rename(folder / judge)  # the judge must not read half a file
    for name, process in judges.items():
        try:
            results[name] = process.result(max(1.0, start + SECONDS - time.monotonic()))
        except RuntimeError as error:
            results[name] = error
        _report(name, start, results[name])
    return results


def _report(name: str, start: float, result: Any) -> None:
    """Print how an engine has ended. With `pytest -s`, a run that is cut off later has shown what failed first."""
    how = f"failed: {result}" if isinstance(result, RuntimeError) else "done"
    print(f"{name}: {how} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
