"""What the compiled sampler refuses. What it chooses: tests/engine/sampler, which run over both samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from branchline.engine import _kernels


def arguments(rows: int, vocab: int) -> dict[str, Any]:
    return {
        "logits": np.zeros((rows, vocab), np.float32),
        "temperature": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int64),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "keys": np.zeros(rows, np.uint64),
        "positions": np.zeros(rows, np.int64),
        "tokens": np.full(rows, -1, np.int32),
        "is_bad": np.ones(rows, np.bool_),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", np.zeros((2, 5), np.float32), "logits are 2 x 5: expected 3 rows"),
        ("logits", np.zeros((3, 0), np.float32), "logits are 3 x 0"),
        ("top_p", np.ones(4, np.float32), "4 rows for 3 tokens"),
        ("is_bad", np.ones(2, np.bool_), "2 rows for 3 tokens"),
    ],
)
def test_sizes_that_do_not_fit(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _kernels.sample(**(arguments(3, 5) | {name: value}), pool=_kernels.ThreadPool(1))


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1024, 1025])
def test_vocabularies_that_end_anywhere(vocab: int) -> None:
    """The likeliest token is the last one, and the only one that can be drawn."""
    values = arguments(2, vocab)
    values["temperature"][1] = 0.0
    values["logits"][:] = -200.0
    values["logits"][:, -1] = 0.0
    _kernels.sample(**values, pool=_kernels.ThreadPool(1))
    assert values["tokens"].tolist() == [vocab - 1] * 2
    assert not values["is_bad"].any()
