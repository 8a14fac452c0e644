"""The fairness gap, against its definition looked up for every stretch of time."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from branchline.load.simulate.fairness import FairnessGap

Samples = list[tuple[list[int], list[bool]]]


def by_definition(samples: Samples, weights: list[float]) -> float:
    service = np.cumsum([np.array(cost) / weights for cost, _ in samples], axis=0)
    largest = 0.0
    for a, b in itertools.combinations(range(len(weights)), 2):
        for i, j in itertools.combinations(range(len(samples)), 2):
            if all(waiting[a] and waiting[b] for _, waiting in samples[i : j + 1]):
                rise = service[j] - service[i]
                largest = max(largest, abs(float(rise[a] - rise[b])))
    return largest


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)))
)
def test_the_gap_is_the_largest_over_all_stretches(samples: Samples) -> None:
    weights = [1.0, 2.0, 0.5]
    gap = FairnessGap(weights)
    for cost, waiting in samples:
        gap.serve(np.array(cost, np.float64))
        gap.observe(np.array(waiting))
    np.testing.assert_allclose(gap.largest, by_definition(samples, weights), atol=1e-9)
