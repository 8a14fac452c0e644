"""How long steps take, learnt from the steps; and what prefill a step has time for."""

from __future__ import annotations

import numpy as np

# A step counts half as much after 70 more.
_DECAY = 0.99
_LEAST_STEPS = 8


class StepTimes:
    """seconds = base + per_row * decode rows + per_token * prefill tokens, by least squares in which older steps count less.

    The sums are plain numbers: every step adds to them, and few steps ask for the solution."""

    def __init__(self) -> None:
        # Sums over steps: 1, rows, tokens, rows², rows·tokens, tokens²; seconds, seconds·rows, seconds·tokens.
        self._sums = [0.0] * 9
        self._steps = 0
        self._fitted_at = -1
        self._fit = (0.0, 0.0, 0.0)
        self._mean_s = 0.0

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step ended."""
        s, rows, tokens = self._sums, decode_rows, prefill_tokens
        self._sums = [
            s[0] * _DECAY + 1.0,
            s[1] * _DECAY + rows,
            s[2] * _DECAY + tokens,
            s[3] * _DECAY + rows * rows,
            s[4] * _DECAY + rows * tokens,
            s[5] * _DECAY + tokens * tokens,
            s[6] * _DECAY + seconds,
            s[7] * _DECAY + seconds * rows,
            s[8] * _DECAY + seconds * tokens,
        ]
        self._steps += 1
        self._mean_s += (seconds - self._mean_s) * max(1 - _DECAY, 1 / self._steps)

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
        if self._fitted_at != self._steps and self._steps:
            one, rows, tokens, rows2, both, tokens2, *targets = self._sums
            products = np.array(((one, rows, tokens), (rows, rows2, both), (tokens, both, tokens2)))
            # A little of the identity: rows and tokens may never have varied.
            products += np.diag(np.maximum(np.diag(products), 1.0) * 1e-6)
            base, per_row, per_token = np.linalg.solve(products, np.array(targets)).tolist()
            self._fit = max(base, 0.0), max(per_row, 0.0), max(per_token, 0.0)
            self._fitted_at = self._steps
        return self._fit
