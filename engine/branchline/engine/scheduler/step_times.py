"""How long steps take, learnt from the steps; and what prefill a step has time for."""

from __future__ import annotations

import numpy as np

# A step counts half as much after 70 more.
_DECAY = 0.99
_LEAST_STEPS = 8


class StepTimes:
    """seconds = base + per_row * decode rows + per_token * prefill tokens, by least squares in which older steps count less."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._steps = 0
        self._fitted_at = -1
        self._fit = (0.0, 0.0, 0.0)
        self._mean_s = 0.0

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step ended."""
        x = np.array((1.0, decode_rows, prefill_tokens))
        self._products *= _DECAY
        self._products += np.outer(x, x)
        self._targets *= _DECAY
        self._targets += x * seconds
        self._mean_s += (seconds - self._mean_s) * max(1 - _DECAY, 1 / (self._steps + 1))
        self._steps += 1

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; 0 before the first."""
        return self._mean_s

    @property
    def prefill_token_s(self) -> float:
        """Seconds that one more token of prefill adds to a step; 0 while nothing is known."""
        return self._coefficients()[2]

    def prefill_within(self, seconds: float, decode_rows: int) -> int | None:
        """Tokens of prefill with which a step of so many decode rows takes `seconds`; None while nothing is known."""
        if self._steps < _LEAST_STEPS:
            return None
        base, per_row, per_token = self._coefficients()
        if per_token <= 0.0:
            return None
        return max(int((seconds - base - per_row * decode_rows) / per_token), 0)

    def _coefficients(self) -> tuple[float, float, float]:
        if self._fitted_at != self._steps:
            # A little of the identity: rows and tokens may never have varied.
            scale = np.diag(np.maximum(np.diag(self._products), 1.0) * 1e-6)
            base, per_row, per_token = np.linalg.solve(self._products + scale, self._targets).tolist()
            self._fit = max(base, 0.0), max(per_row, 0.0), max(per_token, 0.0)
            self._fitted_at = self._steps
        return self._fit
