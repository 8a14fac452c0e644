"""How often something happens."""

from __future__ import annotations

import math

# What happened so long ago counts 1/e.
_MEMORY_S = 10.0


class Rate:
    """Events per second, of which older ones count less. While nothing happens it falls."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        """It happened."""
        self._count = self._count * self._faded(now) + 1.0
        self._at = max(now, self._at)

    def per_second(self, now: float) -> float:
        """The rate now; 0 before the first."""
        return self._count * self._faded(now) / _MEMORY_S

    def _faded(self, now: float) -> float:
        return math.exp(-max(now - self._at, 0.0) / _MEMORY_S)
