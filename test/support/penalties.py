"""Checks that penalties and min_new_tokens follow their definition, for engines on any device."""

from __future__ import annotations

from typing import Any

import torch

from support.engine import Engine
from support.processes import run_engine
from support.prompts import PROMPTS, TOKENS

# One set of options per prompt, all in one batch. The fifth asks for nothing.
PENALTIES: tuple[dict[str, Any], ...] = (
    dict(frequency_penalty=0.4),
    dict(presence_penalty=0.8),
    dict(repetition_penalty=1.5),
    dict(min_new_tokens=30, stop_token_ids=[3, 9]),
    dict(),
    dict(frequency_penalty=-0.2, presence_penalty=0.5, repetition_penalty=0.7, min_new_tokens=12),
)


def penalize(logits: torch.Tensor, output: list[int], options: dict[str, Any]) -> torch.Tensor:
    """Apply penalties to the logits of one position, by the definition in DDTREE's penalties.py.

    Args:
        logits: [vocabulary].
        output: tokens that the request has emitted before this position.
        options: sampling parameters of the request.

    Returns:
        [vocabulary] new logits.
    """
    logits = logits.clone()
    for token in set(output):
        logits[token] -= options.get("frequency_penalty", 0.0) * output.count(token)
        logits[token] -= options.get("presence_penalty", 0.0)
        repetition = options.get("repetition_penalty", 1.0)
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    if len(output) < options.get("min_new_tokens", 0):
        logits[[1, *options.get("stop_token_ids", ())]] = -float("inf")
    return logits


def stop_tokens(options: dict[str, Any]) -> list[int]:
    """Tokens that end an answer of answer_with_penalties()."""
    return [1, *options.get("stop_token_ids", ())] if "min_new_tokens" in options else []


def answer_with_penalties(engine: Engine) -> tuple[list[list[int]], int, int]:
    """Answer PROMPTS greedily under PENALTIES.

    Returns:
        Tokens of each answer through its stop, accepted draft tokens, and the number of retractions.
    """
    queue, retracted = engine.scheduler._add_request_to_queue, []

    def watched(request: Any, is_retracted: bool = False, **options: Any) -> Any:
        retracted.extend([request.rid] * is_retracted)
        return queue(request, is_retracted=is_retracted, **options)

    engine.scheduler._add_request_to_queue = watched
    requests = [
        engine.submit(
            prompt,
            temperature=0,
            max_new_tokens=TOKENS,
            ignore_eos="min_new_tokens" not in options,
            **options,
        )
        for prompt, options in zip(PROMPTS, PENALTIES)
    ]
    engine.finish(requests)
    return (
        [list(request.output_ids_through_stop) for request in requests],
        sum(request.spec_num_correct_drafts for request in requests),
        len(retracted),
    )


def answer_by_definition(target: str, prompt: list[int], options: dict[str, Any]) -> list[int]:
    """Answer a prompt greedily by transformers and penalize().

    Args:
        target: folder of the target model.
        prompt: token ids.
        options: sampling parameters of the request.

    Returns:
        The answer's tokens through its stop, TOKENS at most.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    stops = stop_tokens(options)
    output: list[int] = []
    while len(output) < TOKENS and not set(output[-1:]) & set(stops):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        output.append(int(penalize(logits, output, options).argmax()))
    return output


class PenaltyChecks:
    """Test methods for a DDTreeCase. They compare greedy answers with the definition.

    Plain decoding follows the definition only without overlap scheduling and without retractions. With
    overlap scheduling it counts one step late, and after a retraction it forgets its counts. Where a request combines
    the repetition penalty with the others, upstream applies them in an order that varies by process.
    """

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # Upstream's penalizer for min_new_tokens asks the tokenizer for its stop tokens.
        cls.plain |= {"skip_tokenizer_init": False, "disable_overlap_schedule": True}
        cls.tree |= {"skip_tokenizer_init": False, "speculative_num_draft_tokens": 32}
        cls.expected = [answer_by_definition(cls.target, *case) for case in zip(PROMPTS, PENALTIES)]

    def assert_by_definition(self, outputs: list[list[int]]) -> None:
        """Compare the answers to the first prompts, as many as there are outputs."""
        self.assertEqual(outputs, self.expected[: len(outputs)])

    def check(self, **arguments: Any) -> int:
        """Check a DDTREE engine with further arguments; return the number of retractions."""
        outputs, accepted, retracted = run_engine(self.tree | arguments, answer_with_penalties)
        self.assert_by_definition(outputs)
        self.assertGreater(accepted, 30)
        return retracted

    def test_plain_decoding(self) -> None:
        self.assert_by_definition(run_engine(self.plain, answer_with_penalties)[0][:-1])

    def test_penalties_change_the_answers(self) -> None:
        without = [answer_by_definition(self.target, prompt, {}) for prompt in PROMPTS]
        differ = [a != b[: len(a)] for a, b in zip(self.expected, without)]
        self.assertEqual(differ, [True, True, True, True, False, True])

    def test_tree(self) -> None:
        self.check()

    def test_mixed_prefill(self) -> None:
        self.check(chunked_prefill_size=16, enable_mixed_chunk=True)

    def test_retraction(self) -> None:
        self.assertGreater(self.check(speculative_num_draft_tokens=16, max_total_tokens=480), 0)
