"""Runs mixed load on a DDTREE server for a given time: does anything crash, leak or answer wrongly?

The load has short and long prompts, T = 0 and 1, regex and JSON grammars, stop strings, n = 2, logprobs,
streams, clients that hang up, and requests that are aborted. With --pool 4096 the KV pool is too small for
all of them. At the same time a plain server judges each token of every greedy answer by one prefill (see
bench_server.py). Afterwards the load that the server reports must be what it was before.

In a 16-bit type a token can be a near tie of the first choice, and how often and how far depends on the
model. So plain decoding answers some of the same requests too, and is judged in the same way. DDTREE's tokens
must not miss the first choice more often than plain decoding's, and none by more than --tolerance.

    python -m benchmark.ddtree.load --model DIR --drafter DIR --prompts prompts.json --seconds 540 --output RESULTS.json

It writes its progress into the output every ten seconds, and exits with 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from benchmark.ddtree.record import origin, save
from benchmark.ddtree.servers import Server, closed_loop, device_flags, flags, measurement_parser, start

RUNNING = 16  # requests that run at once; more wait
JUDGED = 16  # answers judged at once, so that judging keeps up with the load
KEPT = 12  # answers whose tokens are kept: those with the largest gaps
BOUNDS = (0.0, 0.125, 0.25, 0.5)  # the gaps above each bound are counted
SURE = 5.0  # standard deviations between two shares that chance does not explain
REGEX = r"\[[01](,[01]){3,12}\]"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [0, 1]}, "b": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
KINDS = dict(
    greedy=28, long=14, sampled=14, regex=7, json=7, stream=10, hang_up=7, abort=5, stop=4, n=2, logprob=2
)


def plan(number: int, prompts: list[list[int]], longest: int) -> dict:
    """Plan request `number`: kind, prompt and sampling parameters. They depend on the arguments only."""
    draw = random.Random(number)
    kind = draw.choices(list(KINDS), weights=KINDS.values())[0]
    prompt = draw.choice(prompts)
    sampling = {"temperature": 0, "max_new_tokens": draw.choice([1, 16, 64, 160])}
    if kind == "long":
        while len(prompt) < longest // 2:
            prompt = prompt + draw.choice(prompts)
        prompt = prompt[-longest:]
    elif kind == "sampled":
        sampling |= {"temperature": 1.0, "top_p": draw.choice([1.0, 0.9]), "min_p": draw.choice([0.0, 0.05])}
    elif kind == "regex":
        sampling |= {"regex": REGEX, "max_new_tokens": 64, "temperature": draw.choice([0, 1.0])}
    elif kind == "json":
        sampling |= {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 64}
    elif kind == "stop":
        sampling |= {"stop": ["\n", "the"], "max_new_tokens": 160}
    elif kind == "n":
        sampling |= {"n": 2, "temperature": 1.0}
    elif kind in ("hang_up", "abort"):
        sampling |= {"max_new_tokens": 300, "ignore_eos": True}
    return dict(kind=kind, prompt=prompt, sampling=sampling, leave_after=draw.randrange(1, 6))


class Judge:
    """Asks a plain server, during the load, how far each greedy token is from its own first choice.

    Args:
        plain: server that decodes plainly.
        clients: answers judged at once.
    """

    def __init__(self, plain: Server, clients: int):
        self.plain = plain
        self.gaps = []  # of all tokens of the judged answers
        self.furthest = []  # gap, number of the request, output through the token
        self.judged = 0
        self.wrong = []
        self._lock = threading.Lock()
        self._answers = queue.Queue()
        for _ in range(clients):
            threading.Thread(target=self._work, daemon=True).start()

    def add(self, number: int, prompt: tuple, output: tuple) -> None:
        """Queue the answer to request `number`."""
        self._answers.put((number, list(prompt), list(output)))

    def finish(self, seconds: float) -> int:
        """Wait for the queued answers, `seconds` at most. Return how many are not judged."""
        deadline = time.monotonic() + seconds
        while self._answers.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.2)
        return self._answers.unfinished_tasks

    def report(self) -> dict:
        """What the judge has found so far."""
        with self._lock:
            gaps = sorted(self.gaps, reverse=True)
        return dict(judged=self.judged, waiting=self._answers.unfinished_tasks, errors=len(self.wrong), tokens=len(gaps),
                    largest_gaps=gaps[:10], tokens_above={str(bound): self.above(bound) for bound in BOUNDS})  # fmt: skip

    def above(self, bound: float) -> int:
        """The number of tokens with a larger gap."""
        return sum(gap > bound for gap in list(self.gaps))

    def _work(self):
        session = requests.Session()
        while True:
            number, prompt, output = self._answers.get()
            try:
                gaps = self.plain.gaps(prompt, output, session=session)
                with self._lock:
                    self.gaps += gaps
                    self.judged += 1
                    at = max(range(len(gaps)), key=gaps.__getitem__)
                    self.furthest = sorted([*self.furthest, (gaps[at], number, output[: at + 1])])[-KEPT:]
            except Exception as error:
                self.wrong.append(f"judging: {error!r}"[:300])
            self._answers.task_done()


class Load:
    """Sends plan(0), plan(1), ... from many clients until told to stop, and checks the answers.

    Args:
        server: server under load.
        judge: judge of the greedy answers.
        prompts: token ids.
        longest: most tokens of a prompt.
        clients: number of clients, each with one request in flight.
    """

    def __init__(self, server: Server, judge: Judge, prompts: list[list[int]], longest: int, clients: int):
        self.server, self.judge, self.prompts, self.longest = server, judge, prompts, longest
        self.done = Counter()
        self.wrong = []
        self.greedy = set()  # prompt, output
        self.judged = []  # numbers of the requests whose answers were judged
        self.accept = [0, 0]  # tokens without those of prefill; verify steps
        self._number = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float) -> None:
        """Send no more requests, and wait for those in flight, `seconds` at most."""
        self._stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            self.wrong.append(f"{hanging} requests still hang {seconds:.0f} s after the last one was sent")

    def _client(self):
        session = requests.Session()
        while not self._stop.is_set():
            with self._lock:
                number = self._number
                self._number += 1
            job = plan(number, self.prompts, self.longest)
            try:
                wrong = self._one(session, number, **job)
            except Exception as error:
                wrong = repr(error)[:300]
                if not self.server.alive():
                    self._stop.set()
            with self._lock:
                self.done[job["kind"]] += 1
                if wrong:
                    self.wrong.append(f"request {number}, {job['kind']}: {wrong}")

    def _one(self, session, number, *, kind, prompt, sampling, leave_after) -> str | None:
        """Send one request. Return what was wrong with the answer, or None."""
        rid = f"load-{os.getpid()}-{number}"
        body = {"sampling_params": sampling, "rid": rid}
        if kind in ("stream", "hang_up"):
            return self._stream(session, number, prompt, body, leave_after if kind == "hang_up" else None)
        if kind == "abort":
            url = f"{self.server.url}/abort_request"
            threading.Timer(
                0.02 * leave_after, requests.post, (url,), {"json": {"rid": rid}, "timeout": 60}
            ).start()
            try:
                self.server.generate(prompt, session=session, **body)
            except requests.HTTPError as error:
                if "abort" not in str(error).lower():
                    raise
            return None
        if kind == "n":
            del body["rid"]  # a request id names one answer only
        if kind == "logprob":
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer = self.server.generate(prompt, session=session, **body)
        if kind == "n":
            return None if len(answer) == 2 else f"expected 2 answers, got {len(answer)}"
        return self._check(kind, number, prompt, sampling, answer)

    def _stream(self, session, number, prompt, body, leave_after) -> str | None:
        last, chunks = None, 0
        body = {"input_ids": prompt, "stream": True} | body
        with session.post(f"{self.server.url}/generate", json=body, stream=True, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    last, chunks = json.loads(line[6:]), chunks + 1
                    if chunks == leave_after:
                        return None
        if last is None or "error" in last:
            return f"stream: {answer.status_code} {last}"
        return self._check("stream", number, prompt, body["sampling_params"], last)

    def _check(self, kind, number, prompt, sampling, answer) -> str | None:
        info, output, text = answer["meta_info"], answer["output_ids"], answer["text"]
        reason = (info["finish_reason"] or {}).get("type")
        with self._lock:
            self.accept[0] += info["completion_tokens"] - 1
            self.accept[1] += info.get("spec_verify_ct", 0)
        if reason not in ("stop", "length"):
            return f"finish reason: expected stop or length, got {info['finish_reason']}"
        if not 1 <= info["completion_tokens"] <= sampling["max_new_tokens"]:
            return f"expected 1 to {sampling['max_new_tokens']} tokens, got {info['completion_tokens']}"
        if kind == "regex" and reason == "stop" and not re.fullmatch(REGEX, text):
            return f"{text!r} does not match the regex"
        if kind == "json" and reason == "stop":
            value = json.loads(text)
            if set(value) != {"a", "b"}:
                return f"{text!r} does not match the schema"
        if kind == "logprob" and len(info["output_token_logprobs"]) != len(output):
            return f"expected {len(output)} logprobs, got {len(info['output_token_logprobs'])}"
        if sampling["temperature"] == 0 and kind not in ("regex", "json"):
            answer = tuple(prompt), tuple(output)
            with self._lock:
                new = answer not in self.greedy
                self.greedy.add(answer)
            if new:
                self.judged.append(number)
                self.judge.add(number, *answer)
        return None


def more_often(found: int, of: int, other: int, other_of: int) -> bool:
    """Whether the share `found` / `of` is larger than `other` / `other_of` by more than chance explains."""
    both = (found + other) / max(1, of + other_of)
    deviation = math.sqrt(both * (1 - both) * (1 / max(1, of) + 1 / max(1, other_of)))
    return found / max(1, of) - other / max(1, other_of) > SURE * deviation


def load_of(server: Server) -> dict:
    """The load that the server reports."""
    (load,) = requests.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]
    return {k: load[k] for k in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage")}


def idle_load(server: Server, seconds: float) -> dict:
    """load_of() as soon as nothing runs, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        load = load_of(server)
        if not (load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"]):
            return load
        if time.monotonic() > deadline:
            return load
        time.sleep(0.5)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = measurement_parser(__doc__, port=12500, start_seconds=300)
    parser.set_defaults(logs=Path("/tmp/ddtree-load"))
    parser.add_argument("--case", default="DDTREE:32", help="case, as in bench_server.py")
    parser.add_argument("--seconds", type=float, default=540, help="duration of the load")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--longest", type=int, default=3000, help="most tokens per prompt")
    parser.add_argument("--pool", type=int, default=24576, help="tokens of the KV pool")
    parser.add_argument(
        "--tolerance", type=float, default=1.0, help="largest gap in the logit that counts as a near tie"
    )
    parser.add_argument(
        "--own", type=int, default=400, help="greedy requests that plain decoding answers too"
    )
    parser.add_argument(
        "--judge-seconds", type=float, default=120, help="time to wait for judgements after the load"
    )
    parser.add_argument(
        "--at-most",
        type=float,
        help="seconds of the whole run: the load becomes shorter if the servers start late",
    )
    return parser.parse_args()


def server_flags(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the flags of the server under load and of the one that judges it."""
    common = ["--dtype", args.dtype, "--context-length", str(args.longest + 512), "--enable-metrics"]
    loaded = [*common, *device_flags(args.device, RUNNING), "--max-total-tokens", str(args.pool),
              "--chunked-prefill-size", "1024", *flags(args.case, args.drafter)]  # fmt: skip
    judging = [*common, *device_flags(args.device, JUDGED)]
    judging += ["--max-total-tokens", str(JUDGED * (args.longest + 512))]
    return {"loaded": loaded, "judging": judging}


def duration(args: argparse.Namespace, run_began: float) -> float:
    """Return the seconds of the load. With --at-most they leave time to judge both servers' answers."""
    if not args.at_most:
        return args.seconds
    return min(args.seconds, args.at_most - (time.monotonic() - run_began) - 2 * args.judge_seconds - 10)


class Run:
    """The load on one server, the verdicts on its answers, and the results file, which shows how far the run is.

    Args:
        args: the arguments of the command line.
        note: writes fields into the results file.
        tree: the server under load.
        plain: the server that decodes plainly.
    """

    def __init__(self, args: argparse.Namespace, note: Callable[..., None], tree: Server, plain: Server):
        self.args, self.note, self.tree, self.plain = args, note, tree, plain
        self.prompts = json.loads(args.prompts.read_text())
        tree.generate(self.prompts[0], sampling_params={"temperature": 0, "max_new_tokens": 40})
        self.before = idle_load(tree, 20)
        self.judge = Judge(plain, JUDGED)
        self.began = time.monotonic()
        self.load = Load(tree, self.judge, self.prompts, args.longest, args.clients)

    def progress(self, state: str) -> None:
        """Write what the run has found so far."""
        load = self.load
        self.note(
            state=state, seconds=round(time.monotonic() - self.began, 1), requests=sum(load.done.values()),
            kinds=load.done, wrong=load.wrong[:50], wrong_count=len(load.wrong), before=self.before,
            during=load_of(self.tree), accept_length=load.accept[0] / max(1, load.accept[1]), greedy=self.judge.report(),
        )  # fmt: skip

    def keep_loading(self, seconds: float) -> bool:
        """Let the clients send requests for `seconds`. Return whether the server is still alive."""
        while time.monotonic() - self.began < seconds and self.tree.alive():
            time.sleep(min(10.0, max(0.1, seconds / 4)))
            try:
                self.progress("loading")
            except requests.RequestException as error:
                self.load.wrong.append(f"/v1/loads: {error!r}"[:300])
        self.load.stop(60)
        return self.tree.alive()

    def judge_plain_decoding(self) -> Judge:
        """Let plain decoding answer some of the judged requests, and return the judge of these answers."""
        own = Judge(self.plain, JUDGED)

        def answer(session: requests.Session, number: int) -> None:
            job = plan(number, self.prompts, self.args.longest)
            answered = self.plain.generate(job["prompt"], session=session, sampling_params=job["sampling"])
            own.add(number, job["prompt"], answered["output_ids"])

        judged = self.load.judged
        closed_loop(random.Random(0).sample(judged, min(self.args.own, len(judged))), JUDGED, answer)
        own.finish(self.args.judge_seconds)
        return own

    def faults(self, own: Judge, unjudged: int, after: dict) -> Iterator[str]:
        """Yield what was wrong with the run as a whole.

        Args:
            own: the judge of plain decoding's answers.
            unjudged: answers of the load that were not judged in time.
            after: the server's load, after the last answer.
        """
        yield from self.judge.wrong
        far = self.judge.above(self.args.tolerance)
        if far:
            yield f"{far} greedy tokens are more than {self.args.tolerance} below the first choice"
        for bound in BOUNDS:
            counts = self.judge.above(bound), len(self.judge.gaps), own.above(bound), len(own.gaps)
            if more_often(*counts):
                yield "gaps above {} for {} of {} greedy tokens, but {} of {} of plain decoding's".format(
                    bound, *counts
                )
        if unjudged:
            yield f"{unjudged} greedy answers were not judged in {self.args.judge_seconds:.0f} s after the load"
        if after != self.before:
            yield f"load: expected {self.before} as before, got {after}"

    def complete(self, own: Judge, after: dict) -> None:
        """Write the last fields of the results file."""
        metrics = requests.get(f"{self.tree.url}/metrics", timeout=60).text
        self.note(
            state="complete", after=after, wrong=self.load.wrong[:50], wrong_count=len(self.load.wrong),
            greedy=self.judge.report() | {"plain_decoding": own.report()},
            furthest=[dict(gap=gap, request=number, output=output)
                      for gap, number, output in reversed(self.judge.furthest)],
            metrics=[line for line in metrics.splitlines()
                     if line.startswith(("sglang:ddtree", "sglang:num_retracted", "sglang:token_usage"))],
        )  # fmt: skip


def main() -> int:
    """Run the command line; return the exit status."""
    args = parse()
    run_began = time.monotonic()
    result = origin(args) | dict(dtype=args.dtype)

    def note(**more: Any) -> None:
        result.update(more)
        save(result, args.output)

    note(state="starting")
    servers = start(args.model, server_flags(args), args.logs, port=args.port, seconds=args.start_seconds)
    if len(servers) < 2:
        note(state="a server did not start")
        return 1
    run = Run(args, note, servers["loaded"], servers["judging"])
    if not run.keep_loading(duration(args, run_began)):
        note(state="crashed", wrong=run.load.wrong[:50], wrong_count=len(run.load.wrong))
        return 1
    after = idle_load(run.tree, 20)
    run.progress("judging")
    unjudged = run.judge.finish(args.judge_seconds)
    run.progress("judged")
    own = run.judge_plain_decoding()
    run.load.wrong += run.faults(own, unjudged, after)
    run.complete(own, after)
    print(json.dumps(result, indent=1))
    return 1 if run.load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
