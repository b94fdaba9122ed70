"""The median of a few measurements, and how far to trust it."""

from __future__ import annotations

import math
import statistics


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of an interval that holds the true median with at least 95% confidence.

    The ends are order statistics, so nothing is assumed of the distribution. With fewer than six values they are the
    least and the greatest one, and confidence is less.
    """
    values, n, cut = sorted(values), len(values), 0
    while sum(math.comb(n, i) for i in range(cut + 2)) <= 0.025 * 2**n:
        cut += 1
    return statistics.median(values), values[cut], values[n - 1 - cut]
