"""Asks again for the tokens of a load that were furthest from the first choice: near-ties or mistakes?

For each token, float32 on the CPU says how far it is from the first choice. Then plain decoding and DDTREE
answer the same prefix again, together with 0 to 15 other requests and starting 0 to 29 tokens earlier, so
that its logits come from other batch shapes. Only answers that reach the token through the same tokens count.

    python -m benchmark.ddtree.ask_again --model DIR --drafter DIR --prompts prompts.json --load LOAD.json --output TIES.json
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmark.ddtree.load import RUNNING, plan
from benchmark.ddtree.record import origin, save
from benchmark.ddtree.servers import Server, device_flags, flags, measurement_parser, start

BATCHES = (1, 2, 4, 8, 16)
STARTS = (1, 2, 3, 9, 30)  # length of the answer whose last token is the one in question


def ask(
    server: Server, ids: list[int], token: int, tokens: int, others: list[list[int]]
) -> tuple[bool, float | None] | None:
    """Ask whether the server emits `token` after `ids`.

    Args:
        server: server with an empty radix cache.
        ids: prompt, and output before the token.
        token: the token in question.
        tokens: length of the answer. It starts tokens - 1 before the end of `ids`.
        others: prompts that are answered at the same time.

    Returns:
        Whether the token came, and its gap to the first choice (None: the token is not among the first
        eight). None if the answer reached the place through other tokens.
    """
    options = {"temperature": 0, "ignore_eos": True}
    start = len(ids) - (tokens - 1)
    with ThreadPoolExecutor(len(others) + 1) as pool:
        for prompt in others:
            pool.submit(server.generate, prompt, sampling_params=options | {"max_new_tokens": tokens + 3})
        answer = server.generate(
            ids[:start],
            sampling_params=options | {"max_new_tokens": tokens},
            return_logprob=True,
            top_logprobs_num=8,
        )
    output = answer["output_ids"]
    if len(output) < tokens or output[: tokens - 1] != ids[start:]:
        return None
    top = answer["meta_info"]["output_top_logprobs"][tokens - 1]
    found = {candidate: value for value, candidate, *_ in top}
    return output[tokens - 1] == token, top[0][0] - found[token] if token in found else None


def ask_often(server: Server, ids: list[int], token: int, answered: int, prompts: list[list[int]]) -> dict:
    """Ask at all batch sizes and starts. Say how often the token came, and the range of its gaps."""
    answers = []
    for batch in BATCHES:
        others = [prompt[: 40 + 7 * i] for i, prompt in enumerate(prompts[3 : 3 + batch - 1])]
        for tokens in STARTS:
            if tokens <= answered:
                server.forget()
                answers.append(ask(server, ids, token, tokens, others))
    answers = [answer for answer in answers if answer is not None]
    gaps = [gap for _, gap in answers if gap is not None]
    return dict(
        answers=len(answers), emitted=sum(emitted for emitted, _ in answers),
        least_gap=min(gaps, default=None), largest_gap=max(gaps, default=None),
    )  # fmt: skip


def main() -> None:
    parser = measurement_parser(__doc__, port=14000)
    parser.add_argument("--load", type=Path, required=True, help="results of load.py")
    parser.add_argument("--case", default="DDTREE:32", help="case, as in bench_server.py")
    parser.add_argument("--longest", type=int, default=3000, help="longest prompt, as in load.py")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    prompts = json.loads(args.prompts.read_text())
    result = origin(args) | dict(dtype=args.dtype, tokens=[])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    common = [*device_flags(args.device, RUNNING), "--dtype", args.dtype, "--context-length", str(args.longest + 512),
              "--max-total-tokens", str(RUNNING * (args.longest + 512))]  # fmt: skip
    servers = start(
        args.model, {case: common + flags(case, args.drafter) for case in ("none", args.case)}, args.logs,
        port=args.port, seconds=args.start_seconds,
    )  # fmt: skip
    for far in json.loads(args.load.read_text())["furthest"]:
        job = plan(far["request"], prompts, args.longest)
        *before, token = far["output"]
        ids = job["prompt"] + before
        with torch.no_grad():
            logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        row = dict(
            request=far["request"], kind=job["kind"], tokens_before=len(ids), answered=len(far["output"]), gap=far["gap"],
            float32_gap=float(logits.max() - logits[token]), float32_first_logit=float(logits.max()),
            float32_rank=int((logits > logits[token]).sum()),
        )  # fmt: skip
        for case, server in servers.items():
            row[case] = ask_often(server, ids, token, len(far["output"]), prompts)
        result["tokens"].append(row)
        print(row, flush=True)
        save(result, args.output)


if __name__ == "__main__":
    main()
