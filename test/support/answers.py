"""Judges greedy answers in bfloat16, where equality with plain decoding is too strict a test.

Two logits are often equal or one rounding apart, and which token wins depends on the shape of the batch. So
each token is compared with plain decoding's first choice after the same tokens (Engine.gaps), and so are
plain decoding's own answers.
"""

from __future__ import annotations

import unittest

import torch

from support.engine import Greedy

TIE = 0.1  # largest gap of a tie, in the logit: bfloat16's noise in the tiny models' logits
# Spacing of bfloat16 numbers from 1 to 2, a usual logit. Decoding may have less noise, if its kernels are prefill's too.
LEAST_NOISE = 2.0**-7


def assert_same_noise(
    case: unittest.TestCase,
    name: str,
    found: list[list[float]],
    plain: list[list[float]],
    factor: float = 2.0,
) -> None:
    """Assert that log-probabilities are no noisier than plain decoding's, for most tokens and for the tail.

    A wrong state moves the log-probabilities of every later token by as much as they differ among tokens.

    Args:
        case: the test case, for its assertions.
        name: name of the engine.
        found: what support.cuda.decoding_noise() returned for the engine.
        plain: the same for plain decoding.
        factor: the largest factor between both that is allowed.
    """
    levels = torch.tensor([0.5, 0.9], dtype=torch.float64)
    of_found, of_plain = (
        torch.tensor(noise, dtype=torch.float64).square().mean(1).sqrt().quantile(levels)
        for noise in (found, plain)
    )
    print(f"{name}: median and 90% of the noise {of_found.tolist()}, plain decoding's {of_plain.tolist()}")
    for level, mine, theirs in zip(levels.tolist(), of_found.tolist(), of_plain.tolist()):
        most = factor * max(theirs, LEAST_NOISE)
        case.assertLessEqual(mine, most, f"{name}: noise of {level:.0%} of the tokens")


def assert_first_choices(
    case: unittest.TestCase,
    name: str,
    found: Greedy,
    gaps: dict[str, list[list[float]]],
    least_accepted: int,
    tie: float | None = TIE,
) -> None:
    """Assert that every token is plain decoding's first choice or ties with it, and that no KV slot leaked.

    Args:
        case: the test case, for its assertions.
        name: name of the engine, a key of `gaps`.
        found: what the engine answered.
        gaps: Engine.gaps() of each engine's answers by name, with plain decoding's own under "plain".
        least_accepted: accepted draft tokens, at least.
        tie: largest gap of a tie. None suits an fp8 KV cache, where plain decoding's own answers tie often: then
            the largest gap and the number of ties are at most twice theirs.
    """
    flat = {
        who: sorted((gap for answer in gaps[who] for gap in answer), reverse=True) for who in (name, "plain")
    }
    ties, plain_ties = (sum(gap > 0 for gap in flat[who]) for who in (name, "plain"))
    print(f"{name}: {ties} of {len(flat[name])} tokens tie; largest gaps {flat[name][:4]}, plain decoding's own "
          f"{plain_ties} of {len(flat['plain'])}, {flat['plain'][:4]}; {found.accepted} accepted")  # fmt: skip
    case.assertLessEqual(flat[name][0], 2 * flat["plain"][0] if tie is None else tie)
    case.assertLessEqual(
        ties, len(flat[name]) // 10 if tie is not None else 2 * max(plain_ties, len(flat[name]) // 20)
    )
    case.assertEqual(*found.free_slots, "KV slots leaked")
    case.assertGreaterEqual(found.accepted, least_accepted)
