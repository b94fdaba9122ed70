"""How often drafted nodes are accepted, over how often the drafter expects it, by depth and rank."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = 4.0  # the default factor weighs as much as this many expected acceptances
MEMORY = 0.98  # by which older counts are multiplied at each reading


class Calibration:
    """Turns counts of accepted nodes into factors for the drafter's conditional probabilities.

    A node is tested if its parent is accepted. The drafter's probabilities, summed over the tested nodes of one depth and
    rank, are the number of acceptances to expect. The factor is the number of acceptances over that. With few tested
    nodes, it tends to the factor of the rank at all depths. With none, it is 1.

    Args:
        max_depth: D.
        num_candidates: K.
    """

    def __init__(self, max_depth: int, num_candidates: int) -> None:
        self.max_depth, self.num_candidates = max_depth, num_candidates
        cells = max_depth * num_candidates
        self._last = [0.0] * (2 * cells)
        self._expected, self._accepted = [0.0] * cells, [0.0] * cells

    def read(self, totals: Sequence[float]) -> list[float]:
        """Take in a reading of the device's counts.

        Args:
            totals: [2 * D * K], since the start: expected acceptances, then acceptances, by depth and rank.

        Returns:
            [D * K], the factors.
        """
        cells = len(self._expected)
        new = [total - last for total, last in zip(totals, self._last)]
        self._last = list(totals)
        self._expected = [MEMORY * old + more for old, more in zip(self._expected, new[:cells])]
        self._accepted = [MEMORY * old + more for old, more in zip(self._accepted, new[cells:])]
        ranks = range(self.num_candidates)
        of_rank = [
            _factor(sum(self._expected[rank :: len(ranks)]), sum(self._accepted[rank :: len(ranks)]), 1.0)
            for rank in ranks
        ]
        return [
            _factor(expected, accepted, of_rank[cell % len(ranks)])
            for cell, (expected, accepted) in enumerate(zip(self._expected, self._accepted))
        ]


def _factor(expected: float, accepted: float, prior: float) -> float:
    return (accepted + PRIOR * prior) / (expected + PRIOR)
