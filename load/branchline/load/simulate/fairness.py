"""How unequal the service of tenants gets while they wait side by side."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class FairnessGap:
    """The largest difference of normalised service between two tenants, over any stretch of time in which both of them always
    had work waiting (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 3).

    Attributes:
        service: [T] tokens for which each tenant was served: computed ones count 1, generated ones 2, over its weight.
        largest: the gap so far, in these tokens.
    """

    def __init__(self, weights: list[float]) -> None:
        count = len(weights)
        self._weights = np.array(weights)
        self.service = np.zeros(count)
        self.largest = 0.0
        self._low = np.full((count, count), np.inf)

    def serve(self, cost: Floats) -> None:
        """[T] tokens more."""
        self.service += cost / self._weights

    def observe(self, waiting: npt.NDArray[np.bool_]) -> None:
        """[T] who has work waiting now."""
        if np.count_nonzero(waiting) < 2:
            self._low[:] = np.inf
            return
        # The gap over a stretch is the rise of the difference above its lowest point in it; both orders are looked at.
        both = np.logical_and.outer(waiting, waiting)
        difference = np.subtract.outer(self.service, self.service)
        self._low = np.where(both, np.minimum(self._low, difference), np.inf)
        rise = float((difference - self._low)[both].max())
        self.largest = max(self.largest, rise)
