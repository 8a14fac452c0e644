"""How long outputs are, learnt from those that ended."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

# Bins an eighth of a doubling wide: 9 % apart.
_BINS_PER_DOUBLING = 8
_NUM_BINS = 24 * _BINS_PER_DOUBLING
_EDGES = [math.ceil(math.exp2((i + 1) / _BINS_PER_DOUBLING)) for i in range(_NUM_BINS)]
# An output counts half as much after 350 more.
_DECAY = 0.998


class OutputLengths:
    """A histogram of output lengths that forgets. What remains of an output is estimated given how long it is already."""

    def __init__(self) -> None:
        self._weights = [0.0] * _NUM_BINS
        self._newest = 1.0  # weight of the next one: it grows, instead of all others shrinking
        self._running: list[float] | None = None

    @property
    def known(self) -> bool:
        """Whether any output has ended yet."""
        return self._newest > 1.0

    def observe(self, num_tokens: int) -> None:
        """An output ended by itself after `num_tokens`."""
        self._weights[min(int(math.log2(max(num_tokens, 1)) * _BINS_PER_DOUBLING), _NUM_BINS - 1)] += self._newest
        self._newest /= _DECAY
        if self._newest > 1e100:
            self._weights = [weight / self._newest for weight in self._weights]
            self._newest = 1.0 / _DECAY
        self._running = None

    def remaining(self, num_generated: int, max_tokens: int, quantile: float) -> int:
        """Tokens that such a share of the outputs longer than `num_generated` doesn't pass, less those; at most what
        `max_tokens` leaves, which is the answer too where nothing is known."""
        most = max_tokens - num_generated
        running = self._running
        if running is None:
            running = self._running = list(accumulate(self._weights))
        first = bisect_right(_EDGES, num_generated)
        below = running[first - 1] if first else 0.0
        mass = running[-1] - below
        if mass < self._newest:  # less than one output's weight
            return most
        at = min(bisect_left(running, below + quantile * mass, first), _NUM_BINS - 1)
        return min(most, max(_EDGES[at] - num_generated, 1))
