"""Compares servers on a host that runs other work too: each prompt goes to one server after the other.

All servers are up. The order rotates from prompt to prompt, so other work on the host slows all of them
alike. One request runs at a time.

    python -m benchmark.ddtree.bench_interleaved --model DIR --drafter demo/SmolLM2-135M-DFlash --output RESULTS.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmark.ddtree.bench_server import judge
from benchmark.ddtree.record import origin, save
from benchmark.ddtree.servers import Server, flags, measurement_parser, start

WARM_UP = 16  # tokens


def start_servers(args: argparse.Namespace) -> dict[str, Server]:
    """Start a server per case, and return those that came up."""
    common = [
        "--device", args.device, "--dtype", args.dtype, "--context-length", "2048", "--max-total-tokens", "8192",
        "--max-running-requests", "4", "--mem-fraction-static", "0.5", "--skip-server-warmup", "--sleep-on-idle",
        "--log-level", "warning",
    ]  # fmt: skip
    return start(
        args.model, {case: common + flags(case, args.drafter) for case in args.cases}, args.logs, port=args.port,
        seconds=args.start_seconds,
    )  # fmt: skip


def ask_in_turn(
    servers: dict[str, Server], prompts: list[list[int]], tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[dict]]]:
    """Give each prompt to one server after the other. Each prompt begins with another server.

    Args:
        servers: by case.
        prompts: token ids.
        tokens: per answer.

    Returns:
        By case: the seconds and the answers of the prompts.
    """
    seconds: dict[str, list[float]] = {case: [] for case in servers}
    answers: dict[str, list[dict]] = {case: [] for case in servers}
    for server in servers.values():
        server.generate(prompts[0], sampling_params={"temperature": 0, "max_new_tokens": WARM_UP})
    order = list(servers)
    for prompt in prompts:
        for case in order:
            began = time.perf_counter()
            answer = servers[case].generate(
                prompt, sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            )
            seconds[case].append(time.perf_counter() - began)
            answers[case].append(answer)
        order = order[1:] + order[:1]
    return seconds, answers


def speed(case: str, seconds: list[float], answers: list[dict], plain_seconds: list[float]) -> dict[str, Any]:
    """Return the fields of a case's row that say how fast it was.

    Args:
        case: the case that the row is about.
        seconds: the time of each prompt.
        answers: the answer to each prompt.
        plain_seconds: plain decoding's, or empty.
    """
    made = sum(a["meta_info"]["completion_tokens"] for a in answers)
    steps = sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers) or made - len(answers)
    # Both times of a ratio are of one prompt and close in time, so a drift of the host cancels out.
    ratios = [a / b for a, b in zip(plain_seconds, seconds)]
    return dict(
        case=case,
        tokens_per_second=made / sum(seconds),
        median_ratio_to_none=statistics.median(ratios) if ratios else None,
        accept_length=(made - len(answers)) / steps,
        step_ms=1000 * sum(seconds) / steps,
    )


def main() -> None:
    parser = measurement_parser(
        __doc__, port=31000, prompts=Path(__file__).with_name("prompts.json"), device="cpu", start_seconds=500
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["none", "DDTREE:4", "DDTREE:8", "DDTREE:16"],
        help="cases, as in bench_server.py",
    )
    parser.add_argument("--count", type=int, default=16, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    args = parser.parse_args()

    servers = start_servers(args)
    prompts = json.loads(args.prompts.read_text())[: args.count]
    seconds, answers = ask_in_turn(servers, prompts, args.tokens)
    outputs = {case: [a["output_ids"] for a in given] for case, given in answers.items()}
    results = []
    for case, given in answers.items():
        row = speed(case, seconds[case], given, seconds.get("none", []))
        if "none" in servers:
            row["exactness"] = judge(servers["none"], prompts, outputs["none"], outputs[case])
        results.append(row)
        print(json.dumps(row), flush=True)
    save(origin(args) | dict(dtype=args.dtype, tokens=args.tokens, results=results), args.output)


if __name__ == "__main__":
    main()
