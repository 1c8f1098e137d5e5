"""Predicts the experts of a layer from those that the layer before it has just chosen."""

from collections.abc import Sequence

import numpy as np

LIKELY = 0.5
"""A predictor names the experts that were wanted in more than this share of like cases: reading one that is not wanted
costs as much as waiting for one that is."""

MEMORY = 64.0
"""Cases after which an earlier one counts for little."""


class NextExpertPredictor:
    """Counts how often experts of one layer followed those of another. Threads: one at a time."""

    def __init__(self, before_count: int, after_count: int) -> None:
        """Begin without any experience; nothing is likely then.

        Args:
            before_count: Experts of the layer that chooses first.
            after_count: Experts of the layer that is predictor.
        """
        self._cases = np.zeros(before_count)
        self._followed = np.zeros((before_count, after_count))

    def learn(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Note that choosing `before` was followed by choosing `after`."""
        rows = np.asarray(before, dtype=np.intp)
        keep = 1 - 1 / MEMORY
        self._cases[rows] = self._cases[rows] * keep + 1
        self._followed[rows] *= keep
        self._followed[np.ix_(rows, np.asarray(after, dtype=np.intp))] += 1

    def likely(self, before: Sequence[int]) -> list[int]:
        """Return who will probably be wanted after `before` was chosen, the likeliest first."""
        rows = np.asarray(before, dtype=np.intp)
        cases = self._cases[rows].sum()
        if cases == 0:
            return []
        share = self._followed[rows].sum(axis=0) / cases
        order = np.argsort(-share, kind="stable")
        return [int(expert) for expert in order[share[order] > LIKELY]]
