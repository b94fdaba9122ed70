"""Judges greedy answers in bfloat16, where equality with plain decoding is too strict a test.

Two logits are often equal or one rounding apart, and which token wins depends on the shape of the batch. So
each token is compared with plain decoding's first choice after the same tokens (Engine.gaps), and so are
plain decoding's own answers.
"""

from __future__ import annotations

import unittest

from support.engine import Greedy

TIE = 0.1  # largest gap of a tie, in the logit: bfloat16's noise in the tiny models' logits


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
        tie: largest gap of a tie. None stands for twice the largest gap of plain decoding's own answers, which
            suits an fp8 KV cache.
    """
    flat = {
        who: sorted((gap for answer in gaps[who] for gap in answer), reverse=True) for who in (name, "plain")
    }
    ties = sum(gap > 0 for gap in flat[name])
    print(f"{name}: {ties} of {len(flat[name])} tokens tie; largest gaps {flat[name][:4]}, "
          f"plain decoding's own {flat['plain'][:4]}; {found.accepted} accepted")  # fmt: skip
    case.assertLessEqual(flat[name][0], 2 * flat["plain"][0] if tie is None else tie)
    case.assertLess(ties, len(flat[name]) // 10)
    case.assertEqual(*found.free_slots, "KV slots leaked")
    case.assertGreaterEqual(found.accepted, least_accepted)
