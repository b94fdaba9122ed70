"""Time of one decode step: plain, DFLASH and DDTREE at several widths and batch sizes, in upstream's own event loop.

The weights are random (only the shapes count here), so nearly nothing is accepted: a step's time is what this measures;
tokens/s follow with an accepted length measured elsewhere. Graphs and overlap scheduling are on; HTTP, tokenizer and
detokenizer are not in the time.

    python benchmark/ddtree/bench_steps.py --model CONFIG_DIR --drafter CONFIG_DIR --output results/GPU-DATE.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "e2e"))
from ddtree_host import Child  # noqa: E402

BATCHES = (1, 4, 16)
PROMPT, TOKENS = 64, 160


def measure(host, turn) -> list[dict]:
    """Seconds a step at each batch size; `turn` lets one process at a time use the device."""
    rows = []
    with turn:
        for batch in BATCHES:
            vocabulary = host.scheduler.model_config.vocab_size
            prompts = [
                [(17 * i + 31 * j) % (vocabulary - 3) + 3 for j in range(PROMPT)] for i in range(batch)
            ]
            host.generate(
                prompts, temperature=0, max_new_tokens=24, ignore_eos=True
            )  # compiles, fills caches
            start = time.perf_counter()
            requests = host.generate(prompts, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
            seconds = time.perf_counter() - start
            steps = max(request.spec_verify_ct for request in requests) or TOKENS - 1
            rows.append(
                dict(batch=batch, step_ms=1000 * seconds / steps, steps=steps,
                     tokens_per_step=sum(min(len(r.output_ids), TOKENS) - 1 for r in requests) / batch / steps)
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with the target's config.json")
    parser.add_argument("--drafter", required=True, help="folder with the drafter's config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64], help="tree rows N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of this repository; git's by default")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    cuda = args.device == "cuda"
    plain = dict(model_path=args.model, device=args.device, load_format="dummy", max_total_tokens=16384,
                 max_running_requests=16, mem_fraction_static=0.8 if cuda else 0.05, context_length=2048) | (
        dict(dtype="bfloat16", attention_backend="triton", cuda_graph_max_bs_decode=16,
             cuda_graph_backend_prefill="disabled") if cuda else dict(dtype="float32")
    )  # fmt: skip
    spec = plain | dict(speculative_draft_model_path=args.drafter, speculative_draft_load_format="dummy")
    if cuda:
        spec["speculative_draft_attention_backend"] = "triton"
    cases = {("none", None, None): plain}
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
    children = {case: Child(arguments, measure, turn) for case, arguments in cases.items()}
    results = []
    for (algorithm, rows, verify), child in children.items():
        try:
            measured = child.result()
        except RuntimeError as error:
            print(f"{algorithm} {rows} {verify}: {error}", file=sys.stderr)
            continue
        for row in measured:
            results.append(dict(algorithm=algorithm, rows=rows, verify=verify) | row)
            print(f"{algorithm:7} N {rows or '':>3} {verify or '':7} batch {row['batch']:2}  "
                  f"{row['step_ms']:7.3f} ms/step  {row['tokens_per_step']:.2f} tokens/step", flush=True)  # fmt: skip

    import torch

    commit = (
        args.commit or subprocess.check_output(["git", "-C", ROOT, "rev-parse", "HEAD"], text=True).strip()
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps(
            dict(
                gpu=torch.cuda.get_device_name() if cuda else "CPU",
                torch=torch.__version__,
                commit=commit,
                command=" ".join(sys.argv),
                prompt=PROMPT,
                tokens=TOKENS,
                weights="random",
                results=results,
            ),
            indent=1,
        )  # fmt: skip
    )


if __name__ == "__main__":
    main()
