"""A chi-square test without a statistics library."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_fits(observed: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any], z: float = 4.0) -> None:
    """Counts are what `probabilities` would give, at `z` standard deviations (Wilson and Hilferty 1931). None where it is 0."""
    assert observed[probabilities == 0].sum() == 0
    some = probabilities > 0
    expected = probabilities[some] * observed.sum()
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = float(((observed[some] - expected) ** 2 / expected).sum())
    freedom = max(int(some.sum()) - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {freedom} degrees of freedom: at most {limit:.1f}"
