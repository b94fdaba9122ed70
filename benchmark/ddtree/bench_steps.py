"""Speed and acceptance of plain decoding, DFLASH and DDTREE at several widths and batch sizes.

In upstream's own event loop, with graphs and overlap scheduling on; HTTP, tokenizer and detokenizer are not in the time.

    python benchmark/ddtree/bench_steps.py --model DIR --drafter DIR --prompts ids.json --output results/GPU-DATE.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

from record import origin, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "e2e"))
from ddtree_host import Child  # noqa: E402


def measure(host, turn, given, batches, tokens) -> list[dict]:
    """Time and acceptance at each batch size; `turn` lets one process at a time use the device."""
    rows = []
    with turn:
        for batch in batches:
            prompts = given[: max(batch, 6)]
            groups = [prompts[i : i + batch] for i in range(0, len(prompts) // batch * batch, batch)]
            host.generate(
                groups[0], temperature=0, max_new_tokens=24, ignore_eos=True
            )  # compiles, fills caches
            start = time.perf_counter()
            requests = [
                request
                for group in groups
                for request in host.generate(group, temperature=0, max_new_tokens=tokens, ignore_eos=True)
            ]
            seconds = time.perf_counter() - start
            steps = sum(request.spec_verify_ct for request in requests) or (tokens - 1) * len(requests)
            rows.append(
                dict(
                    batch=batch,
                    tokens_per_second=tokens * len(requests) / seconds,
                    # of a request: its output tokens, but for the one of prefill, over its verify steps
                    accept_length=sum(len(request.output_ids) - 1 for request in requests) / steps,
                    step_ms=1000 * seconds * batch / steps,
                    outputs=[list(request.output_ids)[:tokens] for request in requests],
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--drafter", required=True, help="folder of the drafter")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64], help="tree rows N")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON, token ids of prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of this repository; git's by default")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    cuda = args.device == "cuda"
    plain = dict(model_path=args.model, device=args.device, max_total_tokens=16384,
                 max_running_requests=16, mem_fraction_static=0.8 if cuda else 0.5, context_length=2048) | (
        dict(dtype="bfloat16", attention_backend="triton", cuda_graph_max_bs_decode=16,
             cuda_graph_backend_prefill="disabled") if cuda else dict(dtype="float32")
    )  # fmt: skip
    spec = plain | dict(speculative_draft_model_path=args.drafter)
    if cuda:
        spec["speculative_draft_attention_backend"] = "triton"
    cases = {("none", None, None): plain}
    # DFLASH's chain as a tree of width 1: on a CPU upstream has no DFLASH to compare with.
    cases["chain", None, "native"] = spec | dict(speculative_algorithm="DDTREE", speculative_eagle_topk=1)
    if cuda:
        cases["DFLASH", None, None] = spec | dict(speculative_algorithm="DFLASH")
    for rows in args.rows:
        cases["DDTREE", rows, "native"] = spec | dict(
            speculative_algorithm="DDTREE", speculative_num_draft_tokens=rows
        )
    if cuda:
        cases["DDTREE", max(args.rows), "triton"] = spec | dict(
            speculative_algorithm="DDTREE", speculative_num_draft_tokens=max(args.rows),
            speculative_ddtree_verify="triton",
        )  # fmt: skip

    turn = multiprocessing.get_context("spawn" if cuda else "fork").Lock()
    given = json.loads(args.prompts.read_text())
    children = {
        case: Child(arguments, measure, turn, given, args.batches, args.tokens)
        for case, arguments in cases.items()
    }
    results, plain_outputs = [], {}
    for (algorithm, rows, verify), child in children.items():
        try:
            measured = child.result()
        except RuntimeError as error:
            print(f"{algorithm} {rows} {verify}: {error}", file=sys.stderr)
            continue
        for row in measured:
            outputs = row.pop("outputs")
            expected = plain_outputs.setdefault(row["batch"], outputs)  # plain decoding comes first
            row["equal_to_plain"] = sum(a == b for a, b in zip(outputs, expected)) / len(outputs)
            results.append(dict(algorithm=algorithm, rows=rows, verify=verify) | row)
            print(
                f"{algorithm:7} N {rows or '':>3} {verify or '':7} batch {row['batch']:2}  {row['step_ms']:7.3f} ms/step  "
                f"accept {row['accept_length']:5.2f}  {row['tokens_per_second']:8.1f} tok/s  same {row['equal_to_plain']:.2f}",
                flush=True,
            )

    save(origin(args) | dict(tokens=args.tokens, results=results), args.output)


if __name__ == "__main__":
    main()
