"""Checks that sampled answers have the exact distribution, for engines on any device."""

from __future__ import annotations

from typing import Any

import torch

from support.jobs import sample
from support.models import VOCABULARY
from support.penalties import penalize
from support.processes import run_engine
from support.prompts import PROMPTS


def filtered(
    probabilities: torch.Tensor, *, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities [vocabulary] of one position under top-k, top-p and min-p, as SGLang defines them."""
    ranked, index = probabilities.sort(descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        keep &= torch.arange(len(ranked)) < top_k
    ranked = ranked * keep
    ranked = ranked * ((ranked.cumsum(0) - ranked) <= top_p)
    ranked = ranked * (ranked >= ranked[0] * min_p)
    return torch.zeros_like(probabilities).scatter(0, index, ranked / ranked.sum())


class SamplingCheck:
    """A check for a DDTreeCase. It compares sampled tokens with the exact distribution, by chi-square.

    transformers computes the exact distribution. There are 1200 answers per case, and cells with fewer than 5
    expected answers are pooled. The threshold is the quantile 1 - 1e-5, so a run of seven cases fails by
    chance once in 14,000. An emitter that falls back to greedy in one step of ten would exceed the threshold
    with a probability above 0.99 (test_power checks it).

    Attributes:
        outside: share of the answers that may contain a token of probability 0.
        reference_dtype: the dtype in which transformers computes the logits.
    """

    count = 1200
    prompt = PROMPTS[2]
    outside = 0.0
    reference_dtype = torch.float64

    def exact(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        **penalties: Any,
    ) -> torch.Tensor:
        """The probability of each triple of first tokens, [vocabulary, vocabulary, vocabulary] float64."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=self.reference_dtype)

        def next_token(prompts: list[list[int]]) -> torch.Tensor:
            with torch.no_grad():
                logits = model(torch.tensor(prompts)).logits[:, -1].double()
            for row, prompt in zip(logits, prompts):
                row.copy_(penalize(row, prompt[len(self.prompt) :], penalties))
            return torch.stack(
                [
                    filtered(row, top_k=top_k, top_p=top_p, min_p=min_p)
                    for row in (logits / temperature).softmax(-1)
                ]
            )

        first = next_token([self.prompt])[0]
        second = next_token([[*self.prompt, token] for token in range(VOCABULARY)])
        third = next_token([[*self.prompt, a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)])
        return (first[:, None] * second)[..., None] * third.view(VOCABULARY, VOCABULARY, -1)

    def statistic(self, answers: list[Any], exact: torch.Tensor) -> float:
        """Chi-square of the answers divided by its threshold. A value above 1 rejects them."""
        counts = torch.zeros_like(exact)
        for a, b, c in answers:
            counts[a, b, c] += 1
        self.assertLessEqual(
            float(counts[exact == 0].sum()),
            self.outside * len(answers),
            "tokens of probability 0 were emitted",
        )
        expected = exact * len(answers)
        large = expected >= 5
        pairs = torch.cat([torch.stack([counts[large], expected[large]], 1),
                           torch.stack([counts[~large].sum(), expected[~large].sum()])[None]])  # fmt: skip
        pairs = pairs[pairs[:, 1] > 0]
        chi = ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum()
        freedom = len(pairs) - 1
        # Wilson and Hilferty: (chi / freedom) ** (1/3) is nearly normal, whose quantile 1 - 1e-5 is 4.265.
        spread = (2 / (9 * freedom)) ** 0.5
        return float(chi / (freedom * (1 - spread**2 + 4.265 * spread) ** 3))

    def check(self, **options: Any) -> None:
        """Check a DDTREE engine under these sampling parameters."""
        self.assertLess(self.statistic(self.answers(self.tree, **options), self.exact(**options)), 1.0)

    def answers(self, tree: dict[str, Any], **options: Any) -> list[Any]:
        """The first three tokens of `count` answers from an engine with the arguments `tree`."""
        arguments = tree | {"speculative_num_draft_tokens": 24, "skip_tokenizer_init": False}
        return run_engine(arguments, sample, self.prompt, self.count, options)


class SamplingChecks(SamplingCheck):
    """Test methods for a DDTreeCase: every sampling option, and the check's power."""

    def test_temperature_1(self) -> None:
        self.check(temperature=1.0)

    def test_temperature_2(self) -> None:
        self.check(temperature=2.0)

    def test_top_p(self) -> None:
        self.check(temperature=1.5, top_p=0.7)

    def test_top_k(self) -> None:
        self.check(temperature=1.5, top_k=5)

    def test_min_p(self) -> None:
        self.check(temperature=1.5, min_p=0.2)

    def test_all_options(self) -> None:
        self.check(temperature=1.7, top_k=9, top_p=0.9, min_p=0.1)

    def test_penalties(self) -> None:
        self.check(
            temperature=1.7,
            top_p=0.9,
            frequency_penalty=0.8,
            presence_penalty=-1.5,
            repetition_penalty=1.4,
            min_new_tokens=2,
        )

    def test_power(self) -> None:
        """The check rejects an emitter that is greedy in one answer of ten."""
        exact = self.exact(temperature=1.5)
        generator = torch.Generator().manual_seed(1)
        draws = torch.multinomial(exact.flatten(), self.count, replacement=True, generator=generator)
        fair = [divmod(int(d) // VOCABULARY, VOCABULARY) + (int(d) % VOCABULARY,) for d in draws]
        self.assertLess(self.statistic(fair, exact), 1.0)
        mode = int(exact.argmax())
        greedy_answer = divmod(mode // VOCABULARY, VOCABULARY) + (mode % VOCABULARY,)
        self.assertGreater(
            self.statistic(fair[: -self.count // 10] + [greedy_answer] * (self.count // 10), exact), 1.0
        )
