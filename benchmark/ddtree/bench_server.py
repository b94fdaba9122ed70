"""Measures speed, accept length and exactness of servers over HTTP: plain decoding, DFLASH, DDTREE.

The servers start side by side and are measured one after another while the others are idle.

    python -m benchmark.ddtree.make_prompts --model DIR --output prompts.json
    python -m benchmark.ddtree.bench_server --model DIR --drafter DIR --prompts prompts.json --output RESULTS.json

It compares the greedy answers to all prompts with plain decoding's, token by token. In addition one prefill
of the plain server over prompt and answer judges each token. Its gap is the logit of the first choice minus
the logit of the answer's token. In bfloat16 two logits are often equal or one rounding apart, and the shape
of the batch decides which wins. So plain decoding's own answers are judged in the same way, for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from benchmark.ddtree.record import origin, save
from benchmark.ddtree.servers import Server, closed_loop, device_flags, flags, measurement_parser, start

CASES = [
    "none",
    "DFLASH",
    "DDTREE:8",
    "DDTREE:16",
    "DDTREE:32",
    "DDTREE:64",
    "DDTREE:32:speculative-ddtree-top1-path=keep",
]
WARM_UP = 24  # tokens


def answer_all(
    server: Server, prompts: list[list[int]], clients: int, tokens: int
) -> tuple[list[dict], float]:
    """Greedy answers, and the seconds that they took."""

    def one(session, prompt):
        return server.generate(
            prompt, session=session, sampling_params={"temperature": 0, "max_new_tokens": tokens}
        )

    began = time.perf_counter()
    return closed_loop(prompts, clients, one), time.perf_counter() - began


def measure(
    server: Server, prompts: list[list[int]], batches: list[int], counts: list[int], tokens: int
) -> tuple[list[dict], list[list[int]]]:
    """Measure a server at each batch size.

    Args:
        server: server to ask.
        prompts: token ids.
        batches: numbers of requests in flight.
        counts: number of prompts at each batch size. They are spread evenly over all prompts.
        tokens: most tokens per answer.

    Returns:
        A row per batch size, and the answers at the last batch size.
    """
    rows = []
    for batch, count in zip(batches, counts):
        chosen = prompts[:: max(1, len(prompts) // count)][:count]
        answer_all(server, chosen[: 2 * batch], batch, WARM_UP)
        server.forget()
        answers, seconds = answer_all(server, chosen, batch, tokens)
        made = sum(a["meta_info"]["completion_tokens"] for a in answers)
        steps = sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers) or made - len(answers)
        rows.append(
            dict(
                batch=batch,
                requests=count,
                tokens=made,
                tokens_per_second=made / seconds,
                # Prefill makes the first token of an answer, the verify steps make the others.
                accept_length=(made - len(answers)) / steps,
                steps_per_second=steps / seconds / batch,
            )
        )
    return rows, [a["output_ids"] for a in answers]


def plain_of(case: str) -> str:
    """The case that judges `case`: plain decoding with the same number formats."""
    formats = [o for o in case.split(":") if o.startswith(("dtype=", "kv-cache-dtype="))]
    return ":".join(["none", *formats])


def judge(
    plain: Server, prompts: list[list[int]], expected: list[list[int]], outputs: list[list[int]]
) -> dict:
    """Compare answers with plain decoding's, and count the tokens that are not its first choice.

    Args:
        plain: server that decodes plainly.
        prompts: token ids.
        expected: plain decoding's answers.
        outputs: answers to judge.
    """
    gaps = closed_loop(
        list(zip(prompts, outputs)), 16, lambda session, job: plain.gaps(*job, session=session)
    )
    differing = []
    for i, (a, b) in enumerate(zip(expected, outputs)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            differing.append(
                dict(prompt=i, at=at, plain=a[at : at + 1], got=b[at : at + 1], gap=max(gaps[i][at : at + 1], default=None))
            )  # fmt: skip
    flat = sorted((gap for request in gaps for gap in request), reverse=True)
    return dict(
        equal=len(outputs) - len(differing),
        of=len(outputs),
        tokens=len(flat),
        tokens_not_first=sum(gap > 0 for gap in flat),
        largest_gaps=flat[:10],
        differing=differing,
    )


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = measurement_parser(__doc__, port=12000)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        help="cases, each ALGORITHM[:N][:FLAG[=VALUE]]...; default: %(default)s",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[20, 65, 260], help="number of prompts at each batch size"
    )
    parser.add_argument("--tokens", type=int, default=200, help="most tokens per answer")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all servers, to see the spread")
    parser.add_argument(
        "--judge", nargs="*", default=None, help="cases to compare with plain decoding; default: all"
    )
    args = parser.parse_args()
    if len(args.batches) != len(args.counts):
        parser.error(f"--counts: expected one per batch size ({len(args.batches)}), got {len(args.counts)}")
    return args


def start_servers(args: argparse.Namespace) -> dict[str, Server]:
    """Start a server per case, and return those that came up."""
    common = [*device_flags(args.device, max(args.batches)), "--dtype", args.dtype, "--context-length", "2048",
              "--max-total-tokens", "32768"]  # fmt: skip
    began = time.monotonic()
    servers = start(
        args.model, {case: common + flags(case, args.drafter) for case in args.cases}, args.logs,
        port=args.port, seconds=args.start_seconds,
    )  # fmt: skip
    print(f"{len(servers)} of {len(args.cases)} servers in {time.monotonic() - began:.0f} s", flush=True)
    return servers


def measure_in_turn(
    args: argparse.Namespace, servers: dict[str, Server], prompts: list[list[int]], result: dict[str, Any]
) -> dict[str, Any]:
    """Measure the servers one after the other, and save and print the rows as they come.

    Args:
        args: the arguments of the command line.
        servers: by case.
        prompts: token ids.
        result: the contents of the results file, to which the rows are added.

    Returns:
        The outputs of each case's last round.
    """
    outputs = {}
    for number, (case, server) in itertools.product(range(args.rounds), servers.items()):
        try:
            rows, outputs[case] = measure(server, prompts, args.batches, args.counts, args.tokens)
        except Exception as error:
            print(f"{case}: {error!r}\n{server.log.read_text()[-3000:]}", file=sys.stderr, flush=True)
            continue
        result["results"] += [dict(case=case, round=number) | row for row in rows]
        save(result, args.output)
        for row in rows:
            print(
                f"{case:45} batch {row['batch']:2}  accept {row['accept_length']:5.2f}  "
                f"{row['tokens_per_second']:8.1f} tok/s  {row['steps_per_second']:7.1f} steps/s",
                flush=True,
            )
    return outputs


def main() -> None:
    args = parse()
    prompts = json.loads(args.prompts.read_text())
    result = origin(args) | dict(dtype=args.dtype, max_tokens=args.tokens, results=[], exactness={})
    servers = start_servers(args)
    outputs = measure_in_turn(args, servers, prompts, result)
    asked = prompts[:: max(1, len(prompts) // args.counts[-1])][: args.counts[-1]]
    for case in args.cases if args.judge is None else args.judge:
        plain = plain_of(case)
        if case in outputs and plain in outputs:
            found = judge(servers[plain], asked, outputs[plain], outputs[case])
            result["exactness"][case] = found
            save(result, args.output)
            print(
                f"{case:45} equal {found['equal']}/{found['of']}  not first {found['tokens_not_first']} of "
                f"{found['tokens']} tokens  largest gaps {[round(g, 3) for g in found['largest_gaps'][:3]]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
