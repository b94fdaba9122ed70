"""Measures speed and accept length of plain decoding, DFLASH and DDTREE without HTTP.

It runs engines (support.engine) with graphs and overlap scheduling. HTTP, tokenizer and detokenizer are not
in the time.

    PYTHONPATH=test python -m benchmark.ddtree.bench_steps --model DIR --drafter DIR --prompts prompts.json --output RESULTS.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from support.engine import Engine
from support.processes import EngineProcess

from benchmark.ddtree.record import origin, save


def measure(engine: Engine, turn: Any, given: list[list[int]], batches: list[int], tokens: int) -> list[dict]:
    """Measure an engine at each batch size.

    Args:
        engine: engine to measure.
        turn: lock. One engine uses the device at a time.
        given: prompts.
        batches: batch sizes.
        tokens: tokens per answer.

    Returns:
        A row per batch size, with the answers.
    """
    rows = []
    with turn:
        for batch in batches:
            prompts = given[: max(batch, 6)]
            groups = [prompts[i : i + batch] for i in range(0, len(prompts) // batch * batch, batch)]
            engine.generate(
                groups[0], temperature=0, max_new_tokens=24, ignore_eos=True
            )  # compiles, fills caches
            start = time.perf_counter()
            requests = [
                request
                for group in groups
                for request in engine.generate(group, temperature=0, max_new_tokens=tokens, ignore_eos=True)
            ]
            seconds = time.perf_counter() - start
            steps = sum(request.spec_verify_ct for request in requests) or (tokens - 1) * len(requests)
            rows.append(
                dict(
                    batch=batch,
                    tokens_per_second=tokens * len(requests) / seconds,
                    # Prefill makes the first token of an answer, the verify steps make the others.
                    accept_length=sum(len(request.output_ids) - 1 for request in requests) / steps,
                    step_ms=1000 * seconds * batch / steps,
                    outputs=[list(request.output_ids)[:tokens] for request in requests],
                )
            )
    return rows


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--drafter", required=True, help="folder of the drafter")
    parser.add_argument(
        "--num-nodes", type=int, nargs="+", default=[8, 16, 32, 64], help="widths N of the verify tree"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file with the prompts' token ids")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=160, help="tokens per answer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of this repository; default: ask git")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def engines(args: argparse.Namespace) -> dict[tuple[str, int | None, str | None], dict[str, Any]]:
    """Return each engine's arguments, by its algorithm, N and verify mode. Plain decoding comes first."""
    cuda = args.device == "cuda"
    plain = dict(model_path=args.model, device=args.device, max_total_tokens=16384,
                 max_running_requests=16, mem_fraction_static=0.8 if cuda else 0.5, context_length=2048) | (
        dict(dtype="bfloat16", attention_backend="triton", cuda_graph_max_bs_decode=16,
             cuda_graph_backend_prefill="disabled") if cuda else dict(dtype="float32")
    )  # fmt: skip
    spec = plain | dict(speculative_draft_model_path=args.drafter)
    if cuda:
        spec["speculative_draft_attention_backend"] = "triton"
    cases: dict[tuple[str, int | None, str | None], dict[str, Any]] = {("none", None, None): plain}
    # Upstream's DFLASH does not run on a CPU. DDTREE's tree with one candidate per position is its chain.
    cases["chain", None, "native"] = spec | dict(speculative_algorithm="DDTREE", speculative_eagle_topk=1)
    if cuda:
        cases["DFLASH", None, None] = spec | dict(speculative_algorithm="DFLASH")
    for num_nodes in args.num_nodes:
        cases["DDTREE", num_nodes, "native"] = spec | dict(
            speculative_algorithm="DDTREE", speculative_num_draft_tokens=num_nodes
        )
    if cuda:
        cases["DDTREE", max(args.num_nodes), "triton"] = spec | dict(
            speculative_algorithm="DDTREE", speculative_num_draft_tokens=max(args.num_nodes),
            speculative_ddtree_verify="triton",
        )  # fmt: skip
    return cases


def main() -> None:
    args = parse()
    turn = multiprocessing.get_context("spawn" if args.device == "cuda" else "fork").Lock()
    given = json.loads(args.prompts.read_text())
    children = {
        case: EngineProcess(arguments, measure, turn, given, args.batches, args.tokens)
        for case, arguments in engines(args).items()
    }
    results, plain_outputs = [], {}
    for (algorithm, num_nodes, verify), child in children.items():
        try:
            measured = child.result()
        except RuntimeError as error:
            print(f"{algorithm} {num_nodes} {verify}: {error}", file=sys.stderr)
            continue
        for row in measured:
            outputs = row.pop("outputs")
            expected = plain_outputs.setdefault(row["batch"], outputs)  # plain decoding comes first
            row["equal_to_plain"] = sum(a == b for a, b in zip(outputs, expected)) / len(outputs)
            results.append(dict(algorithm=algorithm, num_nodes=num_nodes, verify=verify) | row)
            print(
                f"{algorithm:7} N {num_nodes or '':>3} {verify or '':7} batch {row['batch']:2}  {row['step_ms']:7.3f} ms/step  "
                f"accept {row['accept_length']:5.2f}  {row['tokens_per_second']:8.1f} tok/s  same {row['equal_to_plain']:.2f}",
                flush=True,
            )
    save(origin(args) | dict(tokens=args.tokens, results=results), args.output)


if __name__ == "__main__":
    main()
