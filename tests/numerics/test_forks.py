"""A branch's logits equal those of a fresh sequence with the same tokens, on both ways of divergence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.numerics.rows import PAGE_TOKENS, Rows

from branchline.engine._core import BranchTree
from branchline.engine.config import EngineConfig
from branchline.engine.model.runner import LoadedModel, load_model

TOLERANCE = 1e-4
VOCAB = 250


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(tiny_model)))


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cascade", "flat"])
def rows(request: pytest.FixtureRequest, model: LoadedModel, backend: str) -> Rows:
    """`flat`: every fork inside a page is a copy-on-write."""
    rows = Rows(model, backend, num_pages=1024)
    max_levels = 8 if request.param == "cascade" else 1
    rows.tree = BranchTree(1024, page_tokens=PAGE_TOKENS, max_batch=128, max_step_tokens=1024, max_levels=max_levels)
    rows.copies_expected = request.param == "flat"  # type: ignore[attr-defined]
    return rows


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def extend(rows: Rows, branches: list[int], pieces: list[list[int]]) -> torch.Tensor:
    """Append a piece to each branch in one step. Returns the logits after each one's last token, in order."""
    for slot, (branch, piece) in enumerate(zip(branches, pieces, strict=True)):
        rows.tree.prefill(branch, slot, np.array(piece, np.int32))
    logits = rows.step()
    order = torch.tensor(rows.slots).argsort()
    return logits[order]


def assert_equal_fresh(rows: Rows, logits: torch.Tensor, tokens: list[int]) -> None:
    fresh = rows.logits(tokens)[-1]
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, fresh, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_children_and_parent_after_a_fork(rows: Rows, num_tokens: int) -> None:
    prefix = tokens_of(1, num_tokens)
    parent = rows.tree.root()
    extend(rows, [parent], [prefix])
    children = rows.tree.fork_many(parent, 3).tolist()
    pieces = [tokens_of(10 + i, length) for i, length in enumerate((1, 5, 16, 20))]
    logits = extend(rows, [*children, parent], pieces)
    for row, piece in zip(logits, pieces, strict=True):
        assert_equal_fresh(rows, row, prefix + piece)
    more = [tokens_of(20 + i, 18) for i in range(4)]
    logits = extend(rows, [*children, parent], more)
    for row, piece, added in zip(logits, pieces, more, strict=True):
        assert_equal_fresh(rows, row, prefix + piece + added)
    rows.tree.check()


@pytest.mark.parametrize("length", [3, 16, 21])
def test_five_levels_deep(rows: Rows, length: int) -> None:
    branch, held = rows.tree.root(), list[int]()
    for level in range(6):
        piece = tokens_of(level, length)
        (logits,) = extend(rows, [branch], [piece])
        held += piece
        assert_equal_fresh(rows, logits, held)
        branch = rows.tree.fork(branch)
    copied = rows.runner.copied_bytes
    assert (copied > 0) == (rows.copies_expected and length % PAGE_TOKENS != 0)  # type: ignore[attr-defined]


def test_sixty_four_wide(rows: Rows) -> None:
    prefix = tokens_of(1, 45)
    parent = rows.tree.root()
    extend(rows, [parent], [prefix])
    children = rows.tree.fork_many(parent, 64).tolist()
    pieces = [tokens_of(100 + i, 3 + i % 5) for i in range(64)]
    logits = extend(rows, children, pieces)
    for index in range(0, 64, 9):
        assert_equal_fresh(rows, logits[index], prefix + pieces[index])
