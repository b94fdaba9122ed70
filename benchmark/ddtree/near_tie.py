"""Prints the float32 logits of both tokens where an answer in a results file differs from plain decoding's.

bfloat16 logits from 8 to 16 are 0.0625 apart, those from 16 to 32 are 0.125 apart. Rounding decides between
two tokens that are closer than that, and rounding depends on the shape of the batch. The prefix is decoded
greedily in float32; where it comes out differently, the output says so.

    python -m benchmark.ddtree.near_tie --model DIR --prompts benchmark/ddtree/prompts.json --results RESULTS.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch


def differences(results: dict) -> dict[str, list[dict]]:
    """Case -> its differing answers, from the results of bench_server.py or bench_interleaved.py."""
    if "exactness" in results:
        return {case: found["differing"] for case, found in results["exactness"].items()}
    return {row["case"]: row["exactness"]["differing"] for row in results["results"]}


def logits_after(model, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt, and the logits [vocabulary] after the last of them."""
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
    parser.add_argument("--prompts", type=Path, required=True, help="prompts of the results")
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
                + (
                    ""
                    if same
                    else f"; in float32 the prefix differs, and the first choices are {first} and {second}"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
