"""Prompts for the tiny models of support.models."""

from __future__ import annotations

from collections.abc import Iterable


def patterned_prompts(lengths: Iterable[int]) -> list[list[int]]:
    """One prompt per length. All differ, repeat no short pattern and hold no special token (ids 3 to 15)."""
    return [[3 + (7 * i + 5 * j * j) % 13 for j in range(length)] for i, length in enumerate(lengths)]


PROMPTS = patterned_prompts((1, 5, 35, 65, 95, 17))
TOKENS = 48  # of each greedy answer to PROMPTS
LONG_PROMPTS = [PROMPTS[4] * 21, PROMPTS[3] * 31]  # 1995 and 2015 tokens; the models' context is 2048
