"""How long outputs are, learnt from those that ended."""

from __future__ import annotations

import math

import numpy as np

# Bins an eighth of a doubling wide: 9 % apart.
_BINS_PER_DOUBLING = 8
_NUM_BINS = 24 * _BINS_PER_DOUBLING
# An output counts half as much after 350 more.
_DECAY = 0.998


class OutputLengths:
    """A histogram of output lengths that forgets. What remains of an output is estimated given how long it is already."""

    def __init__(self) -> None:
        self._weights = np.zeros(_NUM_BINS)
        self._edges = np.ceil(2.0 ** ((np.arange(_NUM_BINS) + 1) / _BINS_PER_DOUBLING)).astype(np.int64)

    @property
    def known(self) -> bool:
        """Whether any output has ended yet."""
        return bool(self._weights.any())

    def observe(self, num_tokens: int) -> None:
        """An output ended by itself after `num_tokens`."""
        self._weights *= _DECAY
        self._weights[min(int(math.log2(max(num_tokens, 1)) * _BINS_PER_DOUBLING), _NUM_BINS - 1)] += 1.0

    def remaining(self, num_generated: int, max_tokens: int, quantile: float) -> int:
        """Tokens that such a share of the outputs longer than `num_generated` doesn't pass, less those; at most what
        `max_tokens` leaves, which is the answer too where nothing is known."""
        most = max_tokens - num_generated
        first = int(np.searchsorted(self._edges, num_generated, side="right"))
        mass = np.cumsum(self._weights[first:])
        if not len(mass) or mass[-1] < 1.0:
            return most
        at = int(np.searchsorted(mass, quantile * mass[-1]))
        return min(most, max(int(self._edges[first + min(at, len(mass) - 1)]) - num_generated, 1))
