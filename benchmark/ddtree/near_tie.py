"""Shows the float32 logits of both tokens wherever an answer of a results file differs from plain decoding's.

In bfloat16 logits of 8 to 16 are 0.0625 apart, of 16 to 32 0.125: two tokens closer than that are decided by rounding, which
depends on the shape of the batch. The prefix is decoded greedily in float32; a difference whose prefix came out otherwise
there is said to be one.

    python benchmark/ddtree/near_tie.py --model DIR --prompts benchmark/ddtree/prompts.json --results results/X.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch


def differences(results: dict) -> dict[str, list[dict]]:
    """Case -> its differing answers, of bench_server.py's or bench_interleaved.py's results."""
    if "exactness" in results:
        return {case: found["differing"] for case, found in results["exactness"].items()}
    return {row["case"]: row["exactness"]["differing"] for row in results["results"]}


def logits_after(model, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the [vocabulary] logits after the last of them."""
    output, inputs, cache = [], torch.tensor([prompt]), None
    with torch.no_grad():
        while True:
            answer = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = answer.logits[0, -1], answer.past_key_values
            if len(output) == tokens:
                return output, logits
            output.append(int(logits.argmax()))
            inputs = torch.tensor([output[-1:]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="those of the results")
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompts = json.loads(args.prompts.read_text())
    seen = {}
    for case, differing in differences(json.loads(args.results.read_text())).items():
        for d in differing:
            key = d["prompt"], d["at"]
            if key not in seen:
                _, seen[key] = logits_after(model, prompts[d["prompt"]], d["at"])
            logits = seen[key]
            (plain,), (got,) = d["plain"], d["got"]
            first, second = logits.topk(2).indices.tolist()
            same = {first, second} == {plain, got}
            print(
                f"{case}, prompt {d['prompt']}, token {d['at']}: plain {plain} {float(logits[plain]):.4f}, "
                f"got {got} {float(logits[got]):.4f}, apart {abs(float(logits[plain] - logits[got])):.4f}"
                + ("" if same else f"; the prefix differs in float32, whose choices are {first}, {second}"),
                flush=True,
            )


if __name__ == "__main__":
    main()
