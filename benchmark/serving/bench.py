"""Serves one model in several ways and measures all of them with upstream's own benchmarks of servers.

All servers run on one device. One is measured at a time while the others are idle, and they take turns, so that other work
on the host slows all of them alike. A server that dies is left out from then on.

    python -m benchmark.serving.bench --model TARGET --drafter DRAFTER --prompts prompts.json --rounds 10

A case is written as in benchmark/ddtree: ALGORITHM[:N][:FLAG[=VALUE]]..., N being the nodes of the verify tree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark.ddtree.record import gpu_clocks, origin, save
from benchmark.ddtree.servers import Server, device_flags, flags, measurement_parser, start
from benchmark.serving.summary import markdown, summarize
from benchmark.serving.upstream import Upstream

CASES = (
    "none", "DFLASH", "DDTREE:16", "DDTREE:32", "DDTREE:64:speculative-ddtree-budget=auto",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = measurement_parser(__doc__ or "", port=31400)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no load after this time")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument(
        "--requests-per-slot", type=float, default=3, help="requests of a run, per request at once"
    )
    parser.add_argument("--least-requests", type=int, default=4, help="requests of a run, at least")
    parser.add_argument(
        "--one-batch-every",
        type=int,
        default=1,
        help="rounds per round that also measures one batch in one call; 0: none does",
    )
    parser.add_argument(
        "--backend", help="attention backend of plain decoding and DFLASH; default: upstream's"
    )
    parser.add_argument("--max-total-tokens", type=int, default=65536)
    parser.add_argument(
        "--start-together",
        action="store_true",
        help="start all servers at once, also those that measure the times of their steps when they start",
    )
    return parser.parse_args()


def server_flags(case: str, options: argparse.Namespace) -> list[str]:
    """Return the flags of a case's server."""
    arguments = [*device_flags(options.device, max(options.concurrency)), "--dtype", options.dtype]
    arguments += ["--max-total-tokens", str(options.max_total_tokens)]
    if not case.startswith("DDTREE") and options.backend is not None:
        arguments += ["--attention-backend", options.backend]
    return [*arguments, *flags(case, options.drafter)]


def start_servers(options: argparse.Namespace) -> dict[str, Server]:
    """Start a server per case and wait: first those that measure their steps' times, then the others at once.

    Args:
        options: the arguments of the command line.

    Returns:
        The servers that are up, by case.
    """
    measuring = [case for case in options.cases if "=auto" in case]
    others = [case for case in options.cases if case not in measuring]
    servers: dict[str, Server] = {}
    for number, group in enumerate([options.cases] if options.start_together else [measuring, others]):
        cases = {case: server_flags(case, options) for case in group}
        servers |= start(
            options.model, cases, options.logs / str(number), port=options.port + 200 * number,
            seconds=options.start_seconds,
        )  # fmt: skip
    return {case: servers[case] for case in options.cases if case in servers}


class Bench:
    """Measures the servers in turn.

    Args:
        options: the arguments of the command line.
        servers: by case.
        upstream: upstream's benchmarks.
        end: no load begins after this time (monotonic).
    """

    def __init__(
        self, options: argparse.Namespace, servers: dict[str, Server], upstream: Upstream, end: float
    ):
        self.options, self.servers, self.upstream, self.end = options, servers, upstream, end

    def measure_round(self, number: int, tools: tuple[str, ...]) -> Iterator[list[dict[str, Any]]]:
        """Measure each server at each load and temperature. Each round begins with another case.

        Args:
            number: of the round, which also decides which prompts are taken.
            tools: which of upstream's benchmarks.

        Yields:
            The rows of the results file for one load.
        """
        for temperature in self.options.temperatures:
            for concurrency in self.options.concurrency:
                for tool in tools:
                    if time.monotonic() > self.end:
                        return
                    cases = list(self.servers)
                    first = number % max(1, len(cases))
                    load = dict(tool=tool, number=number, temperature=temperature, concurrency=concurrency)
                    rows = (self.measure(case, **load) for case in cases[first:] + cases[:first])
                    yield [row for row in rows if row is not None]

    def measure(
        self, case: str, *, tool: str, number: int, temperature: float, concurrency: int
    ) -> dict[str, Any] | None:
        """Measure a server once.

        Args:
            case: of the server.
            tool: which of upstream's benchmarks.
            number: of the round, which also decides which prompts are taken.
            temperature: of all requests.
            concurrency: requests at once.

        Returns:
            A row of the results file. None if the measurement failed; a server that died is left out from then on.
        """
        server, options = self.servers[case], self.options
        load = dict(concurrency=concurrency, temperature=temperature)
        run = load | dict(tokens=options.tokens, seed=number)
        try:
            begin = time.perf_counter(), time.process_time(), server.cpu_seconds()
            if tool == "serving":
                wanted = max(options.least_requests, round(options.requests_per_slot * concurrency))
                load["requests"] = min(self.upstream.available, wanted)
                found = self.upstream.serving(server.url, requests=load["requests"], **run)
            else:
                found = self.upstream.one_batch(server.url, **run)
            end = time.perf_counter(), time.process_time(), server.cpu_seconds()
        except Exception:
            traceback.print_exc()
            print(f"{case} failed.\n{server.log.read_text()[-3000:]}", file=sys.stderr, flush=True)
            if not server.alive():
                del self.servers[case]
            return None
        wall, client, http = (after - before for before, after in zip(begin, end))
        busy = dict(client_busy=client / wall, http_process_busy=http / wall)
        return dict(case=case, tool=tool, round=number) | load | found | busy


def main() -> None:
    options = parse()
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:  # importing upstream and asking for the GPU's name take ten seconds
        loading = pool.submit(Upstream, options.model, options.prompts, Path(tempfile.mkdtemp()))
        asking = pool.submit(origin, options)
        servers = start_servers(options)
        print(f"servers are up after {time.monotonic() - begin:.0f} s", flush=True)
        upstream, result = loading.result(), asking.result()
    if not servers:
        sys.exit("no server is up")
    result |= dict(weights=options.model, tokens=options.tokens, clocks=[], results=[])
    bench = Bench(options, servers, upstream, begin + options.seconds)
    print(f"the warm-up begins after {time.monotonic() - begin:.0f} s", flush=True)
    for _ in bench.measure_round(0, ("serving",)):
        pass
    for server in servers.values():
        server.freeze_gc()
    print(f"servers are warm after {time.monotonic() - begin:.0f} s", flush=True)
    for number in range(1, options.rounds + 1):
        one_batch = options.one_batch_every and number % options.one_batch_every == 0
        for rows in bench.measure_round(number, ("serving", "one_batch") if one_batch else ("serving",)):
            result["results"] += rows
            save(result, options.output)
        result["clocks"].append(gpu_clocks(options.device))
        print(f"round {number} is done after {time.monotonic() - begin:.0f} s", flush=True)
        if time.monotonic() > bench.end or not servers:
            break
    result["summary"] = summarize(result["results"])
    save(result, options.output)
    print(f"\n{markdown(result['summary'])}\n\n{options.output}")


if __name__ == "__main__":
    main()
