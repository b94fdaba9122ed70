"""Serves one model in several ways and measures all of them with upstream's sglang.benchmark.serving.

All servers run on one device. One is measured at a time while the others are idle, and they take turns, so that other work
on the host slows all of them alike.

    python -m benchmark.serving.bench --model TARGET --drafter DRAFTER --prompts prompts.json --rounds 10

A case is written as in benchmark/ddtree: ALGORITHM[:N][:FLAG[=VALUE]]..., N being the nodes of the verify tree.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.ddtree.medians import median_and_interval
from benchmark.ddtree.record import origin, save
from benchmark.ddtree.servers import Server, device_flags, flags, measurement_parser

FOLDER = Path(__file__).parent
CASES = (
    "none", "DFLASH", "DDTREE:16", "DDTREE:32", "DDTREE:64:speculative-ddtree-budget=auto",
)  # fmt: skip
FIELDS = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "accept_length", "duration")


def write_dataset(prompts: Path, model: str, output: Path) -> int:
    """Write prompts as the dataset `custom` of upstream's benchmark; return their number.

    Args:
        prompts: JSON, a list of token ids per prompt.
        model: folder with the tokenizer.
        output: JSON lines.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    given = json.loads(prompts.read_text())
    with output.open("w") as file:
        for prompt in given:
            turns = [{"content": tokenizer.decode(prompt)}, {"content": "an answer of any length"}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return len(given)


def run_upstream(
    url: str,
    model: str,
    dataset: Path,
    *,
    requests: int,
    concurrency: int,
    tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Run upstream's benchmark once in this process, whose imports take longer than a run.

    Args:
        url: of the server.
        model: folder with the tokenizer.
        dataset: of write_dataset().
        requests: to send.
        concurrency: requests at once.
        tokens: of an answer. The end of the text does not end it.
        temperature: of all requests.
        seed: decides which prompts are taken.

    Returns:
        Upstream's result.

    Raises:
        RuntimeError: upstream's benchmark failed, or a request did.
    """
    from sglang.benchmark import serving

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.jsonl")
        command = [
            "serving", "--backend", "sglang", "--base-url", url, "--model", model, "--tokenizer", model,
            "--dataset-name", "custom", "--dataset-path", str(dataset), "--num-prompts", str(requests),
            "--sharegpt-output-len", str(tokens), "--max-concurrency", str(concurrency), "--seed", str(seed),
            "--temperature", str(temperature), "--disable-tqdm", "--warmup-requests", "1", "--output-file", str(output),
        ]  # fmt: skip
        before, text = sys.argv, io.StringIO()
        sys.argv = command
        try:
            with contextlib.redirect_stdout(text):
                serving.cli_main()
        except SystemExit as error:
            raise RuntimeError(
                f"{url}: upstream's benchmark ended with {error.code}: {text.getvalue()[-2000:]}"
            ) from error
        finally:
            sys.argv = before
        (line,) = output.read_text().splitlines()
    found = json.loads(line)
    if found["completed"] != requests:
        raise RuntimeError(f"{url}: expected {requests} answers, got {found['completed']}")
    return found


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per case, concurrency and temperature: medians over the rounds, and 95% intervals.

    `ratio_to_best` compares tokens per second with the fastest other case, round by round; `ratio_to_DFLASH` with DFLASH.
    """
    groups: dict[tuple[int, float], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        of_load = groups.setdefault((row["concurrency"], row["temperature"]), {})
        of_load.setdefault(row["case"], {})[row["round"]] = row
    found = []
    for (concurrency, temperature), cases in sorted(groups.items()):
        speed = {
            case: statistics.median(row["output_throughput"] for row in of_case.values())
            for case, of_case in cases.items()
        }
        for case, of_case in cases.items():
            line: dict[str, Any] = dict(
                case=case, concurrency=concurrency, temperature=temperature, rounds=len(of_case)
            )
            for field in FIELDS:
                values = [row[field] for row in of_case.values() if row.get(field) is not None]
                line[field] = median_and_interval(values) if values else None
            others = [other for other in cases if other != case and "auto" not in other]
            best = max(others, key=speed.__getitem__) if others else None
            for name, other in (("ratio_to_best", best), ("ratio_to_DFLASH", "DFLASH")):
                if other in cases and other != case:
                    shared = sorted(of_case.keys() & cases[other].keys())
                    ratios = [
                        of_case[i]["output_throughput"] / cases[other][i]["output_throughput"] for i in shared
                    ]
                    line[name] = (other, *median_and_interval(ratios))
            found.append(line)
    return found


def show(summary: list[dict[str, Any]]) -> None:
    """Print a line per load and case."""
    print(
        "\nat once  T  tokens/s [interval]  TPOT p50, p99 ms  accept length  case; tokens/s over the best other, DFLASH"
    )
    for row in summary:
        middle, low, high = row["output_throughput"]
        length = row["accept_length"]
        ratios = [
            f"{row[name][0]} {row[name][1]:.3f}"
            for name in ("ratio_to_best", "ratio_to_DFLASH")
            if name in row
        ]
        print(
            f"{row['concurrency']:7} {row['temperature']:2.0f}  {middle:6.0f} [{low:.0f}, {high:.0f}]  "
            f"{row['median_tpot_ms'][0]:6.2f} {row['p99_tpot_ms'][0]:6.2f}  {length[0] if length else 1.0:5.2f}  "
            f"{row['case']}; {'; '.join(ratios)}"
        )


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = measurement_parser(__doc__ or "", port=31400)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after this time")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument(
        "--requests-per-slot", type=int, default=3, help="requests of a run, per request at once"
    )
    parser.add_argument("--least-requests", type=int, default=4, help="requests of a run, at least")
    parser.add_argument(
        "--backend", help="attention backend of plain decoding and DFLASH; default: upstream's"
    )
    parser.add_argument("--max-total-tokens", type=int, default=65536)
    return parser.parse_args()


def server_flags(case: str, options: argparse.Namespace) -> list[str]:
    """Return the flags of a case's server."""
    arguments = [*device_flags(options.device, max(options.concurrency)), "--dtype", options.dtype]
    arguments += [*flags(case, options.drafter), "--max-total-tokens", str(options.max_total_tokens)]
    if not case.startswith("DDTREE") and options.backend is not None:
        arguments += ["--attention-backend", options.backend]
    return arguments


def start_servers(options: argparse.Namespace, servers: dict[str, Server]) -> None:
    """Start a server per case and wait for them: first those that measure their steps' times, then the others at once.

    Args:
        options: the arguments of the command line.
        servers: gets each server by its case, as soon as its process exists.

    Raises:
        RuntimeError: a server did not start in time.
    """
    deadline = time.monotonic() + options.start_seconds
    measuring = [case for case in options.cases if "=auto" in case]
    for together in (*([case] for case in measuring), [c for c in options.cases if c not in measuring]):
        for case in together:
            i = options.cases.index(case)
            log = options.logs / f"{i}.log"
            servers[case] = Server(options.model, options.port + i, log, server_flags(case, options))
        for case in together:
            if not servers[case].wait(deadline):
                raise RuntimeError(
                    f"{case}: the server did not start: {servers[case].log.read_text()[-2000:]}"
                )


def measure_round(
    number: int, options: argparse.Namespace, servers: dict[str, Server], dataset: Path, available: int
) -> Iterator[dict[str, Any]]:
    """Measure each server at each load and temperature. Each round begins with another case.

    Args:
        number: of the round, which also decides which prompts are taken.
        options: the arguments of the command line.
        servers: by case.
        dataset: of write_dataset().
        available: prompts in it.

    Yields:
        A row of the results file per measurement.
    """
    first = number % len(options.cases)
    for temperature in options.temperatures:
        for concurrency in options.concurrency:
            requests = min(available, max(options.least_requests, options.requests_per_slot * concurrency))
            for case in options.cases[first:] + options.cases[:first]:
                found = run_upstream(
                    servers[case].url, options.model, dataset, requests=requests, concurrency=concurrency,
                    tokens=options.tokens, temperature=temperature, seed=number,
                )  # fmt: skip
                row = dict(case=case, round=number, concurrency=concurrency, temperature=temperature)
                yield row | dict(requests=requests) | {field: found.get(field) for field in FIELDS}


def main() -> None:
    options = parse()
    # A time limit then ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    start = time.monotonic()
    options.logs.mkdir(parents=True, exist_ok=True)
    dataset = Path(tempfile.mkdtemp()) / "prompts.jsonl"
    available = write_dataset(options.prompts, options.model, dataset)
    result = origin(options) | dict(weights=options.model, tokens=options.tokens, results=[])
    servers: dict[str, Server] = {}
    try:
        start_servers(options, servers)
        print(f"servers are up after {time.monotonic() - start:.0f} s", flush=True)
        for number in range(options.rounds):
            if time.monotonic() - start > options.seconds:
                break
            for row in measure_round(number, options, servers, dataset, available):
                result["results"].append(row)
                result["summary"] = summarize(result["results"])
                save(result, options.output)
            print(f"round {number} is done after {time.monotonic() - start:.0f} s", flush=True)
    finally:
        for server in servers.values():
            server.close()
    show(result["summary"])
    print(f"\n{options.output}")


if __name__ == "__main__":
    main()
