"""Records the steps of the demo model with the widest trees: what simulate.py takes acceptance from.

    PYTHONPATH=test python -m benchmark.serving.record_trace --model TARGET --drafter DRAFTER --prompts prompts.json \\
        --temperature 0 --output trace.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from support.engine import Engine
from support.processes import EngineProcess


class Answers:
    """Answers prompts. It is the job of an EngineProcess."""

    def __init__(self, prompts: list[list[int]], tokens: int, temperature: float) -> None:
        self.prompts, self.tokens, self.temperature = prompts, tokens, temperature

    def __call__(self, engine: Engine) -> int:
        requests = engine.generate(
            self.prompts, temperature=self.temperature, max_new_tokens=self.tokens, ignore_eos=True
        )
        return sum(request.spec_verify_ct for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON with token ids")
    parser.add_argument("--count", type=int, default=64, help="prompts to answer")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    prompts = json.loads(options.prompts.read_text())[: options.count]
    arguments = dict(
        model_path=options.model, speculative_algorithm="DDTREE", speculative_draft_model_path=options.drafter,
        speculative_num_draft_tokens=options.nodes, speculative_ddtree_trace=str(options.output), device=options.device,
        max_running_requests=16, max_total_tokens=32768,
    )  # fmt: skip
    if options.device == "cuda":
        arguments |= dict(
            dtype="bfloat16", attention_backend=None, mem_fraction_static=0.5, cuda_graph_bs_decode=[16],
            cuda_graph_backend_prefill="disabled", context_length=4096,
        )  # fmt: skip
    else:
        arguments |= dict(mem_fraction_static=0.3)
    steps = EngineProcess(arguments, Answers(prompts, options.tokens, options.temperature)).result(900)
    print(f"{steps} verify steps of {len(prompts)} answers: {options.output}")


if __name__ == "__main__":
    main()
