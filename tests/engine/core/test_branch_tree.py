"""What the core promises: boundaries, depth, width, handles, errors. The same tests run on the core and on its twin."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.properties.core_driver import row_reads

from branchline.engine import _core
from branchline.engine._core import BatchError, CoreError, OutOfBranchesError, OutOfPagesError, ReleasedHandleError
from branchline.engine.cache import reference

Tree = Any


@pytest.fixture(params=[_core.BranchTree, reference.BranchTree], ids=["core", "twin"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def fill(tree: Tree, branch: int, count: int, *, slot: int = 0, first: int = 0) -> None:
    tree.prefill(branch, slot, np.arange(first, first + count, dtype=np.int32))
    tree.plan()
    tree.commit()


def decode(tree: Tree, steps: int) -> None:
    for _ in range(steps):
        tree.plan()
        tree.commit()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("max_levels", [1, 8])
def test_fork_at_page_boundaries(make: Any, length: int, max_levels: int) -> None:
    tree = make(100, max_levels=max_levels, level_cost_pages=0)
    root = tree.root()
    fill(tree, root, length)
    free = tree.num_free_pages
    children = [int(c) for c in tree.fork_many(root, 2)]
    assert tree.num_free_pages == free
    assert tree.describe(children[0]) == (length, length, -(-length // 16), 0, 1)
    for i, child in enumerate(children):
        tree.join(child, i, 1000 + i)
    tree.plan()
    copied = max_levels == 1 and length % 16 != 0
    assert tree.num_copies == (2 if copied else 0)
    assert tree.copy_tokens[: tree.num_copies].tolist() == [length % 16] * tree.num_copies
    expected_levels = 1 if copied and length < 16 and make is _core.BranchTree else None
    assert expected_levels is None or tree.num_levels == expected_levels
    reads = row_reads(tree)
    assert [len(r) for r in reads] == [length + 1] * 2
    assert set(tree.write_slots[:2].tolist()) == {r[-1] for r in reads}
    shared = length // 16 * 16 if copied else length
    assert reads[0][:shared] == reads[1][:shared]
    assert not set(reads[0][shared:]) & set(reads[1][shared:])
    tree.commit()
    for i, child in enumerate(children):
        assert tree.tokens(child).tolist() == [*range(length), 1000 + i]
    assert tree.tokens(root).tolist() == list(range(length))
    tree.check()


def test_the_parent_goes_on_after_its_children(make: Any) -> None:
    tree = make(100)
    root = tree.root()
    fill(tree, root, 20)
    child = tree.fork(root)
    fill(tree, root, 5, first=100)
    fill(tree, child, 3, first=200)
    assert tree.tokens(root).tolist() == [*range(20), *range(100, 105)]
    assert tree.tokens(child).tolist() == [*range(20), *range(200, 203)]
    assert tree.describe(root) == (25, 20, 2, 1, 1)


def test_a_branch_takes_its_segment_back_when_it_is_alone(make: Any) -> None:
    tree = make(100)
    root = tree.root()
    fill(tree, root, 20)
    for _ in range(50):
        child = tree.fork(root)
        tree.release(child)
        fill(tree, root, 1)
    assert tree.num_segments == 0
    assert tree.describe(root) == (70, 0, 0, 5, 0)
    tree.check()


def test_64_wide(make: Any) -> None:
    tree = make(200, max_batch=64, level_cost_pages=0)
    root = tree.root()
    fill(tree, root, 33)
    free = tree.num_free_pages
    children = tree.fork_many(root, 64)
    for i, child in enumerate(children.tolist()):
        tree.join(child, i, i)
    decode(tree, 20)
    assert tree.num_free_pages == free - 64 * 2
    assert tree.tokens(int(children[63])).tolist() == [*range(33), *[63] * 20]
    tree.check()
    tree.release_many(children)
    assert tree.num_free_pages == free


def test_a_shared_segment_is_emitted_once() -> None:
    tree = _core.BranchTree(200, max_batch=64)
    root = tree.root()
    fill(tree, root, 33)
    for i, child in enumerate(tree.fork_many(root, 64).tolist()):
        tree.join(child, i, i)
    tree.plan()
    assert tree.num_levels == 2
    qo, kv, ids, last = tree.level(0)
    assert qo.tolist() == [0, 64]
    assert kv.tolist() == [0, 3]
    tree.commit()
    assert ids.tolist() == tree.pages(root).tolist()
    assert last.tolist() == [1]


def pairs_of_rows(tree: _core.BranchTree, pairs: int, pages: int) -> None:
    """Roots of some full pages, each with two children in the batch."""
    roots = [tree.root() for _ in range(pairs)]
    for root in roots:
        fill(tree, root, pages * tree.page_tokens)
    for pair, root in enumerate(roots):
        for i, child in enumerate(tree.fork_many(root, 2).tolist()):
            tree.join(child, 2 * pair + i, 0)


@pytest.mark.parametrize(("pairs", "levels"), [(15, 1), (16, 2)])
def test_a_level_is_kept_for_what_all_its_groups_save(pairs: int, levels: int) -> None:
    tree = _core.BranchTree(200, max_batch=64, level_cost_pages=32)
    pairs_of_rows(tree, pairs, 2)
    tree.plan()
    assert tree.num_levels == levels
    if levels == 2:
        qo, kv, _, last = tree.level(0)
        assert qo.tolist() == list(range(0, 33, 2))
        assert kv.tolist() == list(range(0, 33, 2))
        assert last.tolist() == [16] * 16


def test_of_too_many_levels_those_that_save_most_are_kept() -> None:
    """Prefixes of 1, 1 and 9 pages, one below the other, with room for one level that is a choice."""
    tree = _core.BranchTree(200, max_batch=64, max_levels=1, level_cost_pages=1)
    branch, slot = tree.root(), 0
    for pages in (1, 1, 9):
        fill(tree, branch, 16 * pages, slot=63)
        for _ in range(2):
            tree.join(tree.fork(branch), slot, 0)
            slot += 1
        branch = tree.fork(branch)
    tree.join(branch, slot, 0)
    tree.plan()
    assert tree.num_levels == 2
    _, kv, _, _ = tree.level(0)
    assert kv[-1] == 11
    assert [len(r) for r in row_reads(tree)].count(16 * 11 + 1) == 3


def test_5_deep_with_few_levels(make: Any) -> None:
    """Deeper than the levels: the chain copies instead of adding another."""
    tree = make(100, max_levels=3, max_batch=8, level_cost_pages=0)
    branch, expected, copies = tree.root(), [], 0
    for depth in range(6):
        tree.prefill(branch, 0, np.arange(5, dtype=np.int32) + 100 * depth)
        tree.plan()
        copies += tree.num_copies
        assert len(row_reads(tree)[0]) == 5 * (depth + 1)
        tree.commit()
        expected += [100 * depth + i for i in range(5)]
        branch = tree.fork(branch)
        assert tree.tokens(branch).tolist() == expected
    assert copies == 3
    assert tree.describe(branch)[4] == 6
    tree.check()


def test_10_000_deep() -> None:
    tree = _core.BranchTree(10_100, page_tokens=4, max_branches=10_100, max_batch=4)
    branches = [tree.root()]
    for depth in range(10_000):
        tree.join(branches[-1], 0, depth)
        decode(tree, 1)
        tree.leave(branches[-1])
        branches.append(tree.fork(branches[-1]))
    deepest = branches[-1]
    assert tree.describe(deepest)[::4] == (10_000, 10_000)
    assert tree.tokens(deepest).tolist() == list(range(10_000))
    tree.check()
    tree.join(branches[5_000], 0, 1)
    tree.join(deepest, 1, 2)
    assert tree.plan() == 2
    assert tree.num_levels <= 16
    assert sorted(len(r) for r in row_reads(tree)) == [5_002, 10_001]
    tree.commit()
    tree.release_many(np.array(branches[:-1], np.uint64))
    assert tree.tokens(deepest).tolist() == [*range(10_000), 2]
    tree.release(deepest)
    assert tree.num_free_pages == tree.num_pages
    assert tree.num_segments == 0


def test_1_000_000_branches_over_a_pool_s_life() -> None:
    tree = _core.BranchTree(64, max_branches=65_536)
    root = tree.root()
    fill(tree, root, 100)
    seen = np.zeros(0, np.uint64)
    for _ in range(20):
        children = tree.fork_many(root, 50_000)
        assert not np.isin(children[:1000], seen).any()
        seen = np.concatenate([seen, children[:1000]])
        tree.release_many(children)
    tree.check()
    assert tree.num_branches == 1
    with pytest.raises(ReleasedHandleError):
        tree.length(int(seen[0]))


def test_a_stale_handle_never_hits_another_branch(make: Any) -> None:
    tree = make(8, max_branches=1)
    handles = set()
    for _ in range(1000):
        branch = tree.root()
        assert branch not in handles
        handles.add(branch)
        tree.release(branch)
    live = tree.root()
    for handle in handles:
        with pytest.raises(ReleasedHandleError):
            tree.fork(handle)
    assert tree.length(live) == 0


def test_another_tree_s_handle_is_refused() -> None:
    one, two = _core.BranchTree(8), _core.BranchTree(8)
    theirs = one.root()
    two.root()
    with pytest.raises(ReleasedHandleError, match=f"{theirs} names no live branch"):
        two.length(theirs)


def test_release_many_is_all_or_none(make: Any) -> None:
    tree = make(8)
    a, b = tree.root(), tree.root()
    for bad in ([a, b, a], [a, 12345], [a, b, 2**64 - 1]):
        with pytest.raises(ReleasedHandleError):
            tree.release_many(np.array(bad, np.uint64))
        assert tree.num_branches == 2
        assert tree.length(a) == tree.length(b) == 0
    tree.release_many(np.array([a, b], np.uint64))
    assert tree.num_branches == 0


def test_out_of_pages_changes_nothing(make: Any) -> None:
    tree = make(3, page_tokens=4)
    root = tree.root()
    fill(tree, root, 6)
    child = tree.fork(root)
    tree.join(child, 0, 1)
    tree.prefill(root, 1, np.arange(5, dtype=np.int32))
    with pytest.raises(OutOfPagesError):
        tree.plan()
    assert tree.num_free_pages == 1
    assert tree.length(root) == tree.length(child) == 6
    with pytest.raises(BatchError):  # the prefill row is still queued
        tree.prefill(root, 2, np.arange(5, dtype=np.int32))
    tree.leave(root)
    assert tree.plan() == 1
    tree.commit()
    tree.check()


def test_out_of_pages_says_the_numbers() -> None:
    tree = _core.BranchTree(3, page_tokens=4)
    tree.prefill(tree.root(), 0, np.zeros(20, np.int32))
    with pytest.raises(OutOfPagesError, match="needs 5 pages, 3 of 3 are free"):
        tree.plan()


def test_out_of_branches_changes_nothing(make: Any) -> None:
    tree = make(8, max_branches=3)
    root = tree.root()
    fill(tree, root, 3)
    with pytest.raises(OutOfBranchesError, match="need 3 more"):
        tree.fork_many(root, 3)
    assert tree.num_segments == 0
    assert len(tree.fork_many(root, 0)) == 0
    assert len(tree.fork_many(root, 2)) == 2
    with pytest.raises(OutOfBranchesError):
        tree.root()


def test_batch_errors(make: Any) -> None:
    tree = make(16, max_batch=2, max_step_tokens=8)
    a, b = tree.root(), tree.root()
    tokens = np.zeros(3, np.int32)
    tree.join(a, 0, 1)
    refused: list[Callable[[], object]] = [
        lambda: tree.join(a, 1, 1),
        lambda: tree.join(b, 0, 1),
        lambda: tree.join(b, 2, 1),
        lambda: tree.join(b, -1, 1),
        lambda: tree.prefill(a, 1, tokens),
        lambda: tree.prefill(b, 0, tokens),
        lambda: tree.prefill(b, 1, tokens[:0]),
        lambda: tree.prefill(b, 1, np.zeros(9, np.int32)),
        lambda: tree.leave(b),
        lambda: tree.commit(),
        lambda: tree.rollback(),
        lambda: tree.level(tree.num_levels),
        lambda: tree.level(-1),
    ]
    for call in refused:
        with pytest.raises(BatchError):
            call()
    tree.prefill(b, 1, np.zeros(8, np.int32))
    with pytest.raises(BatchError):
        tree.plan()
    tree.check()
    tree.leave(b)
    tree.plan()
    refused = [
        lambda: tree.plan(),
        lambda: tree.root(),
        lambda: tree.fork(a),
        lambda: tree.fork_many(a, 2),
        lambda: tree.release(a),
        lambda: tree.release_many(np.array([a], np.uint64)),
        lambda: tree.truncate(a, 0),
        lambda: tree.join(b, 1, 0),
        lambda: tree.leave(a),
        lambda: tree.prefill(b, 1, tokens),
        lambda: tree.length(a),
        lambda: tree.tokens(a),
    ]
    for call in refused:
        with pytest.raises(BatchError):
            call()
    tree.commit()
    assert issubclass(BatchError, ValueError)
    assert issubclass(BatchError, CoreError)


def test_truncate(make: Any) -> None:
    tree = make(16, page_tokens=4)
    root = tree.root()
    fill(tree, root, 6)
    child = tree.fork(root)
    fill(tree, child, 7, first=50)
    for bad in (5, 14, -1):
        with pytest.raises(ValueError):
            tree.truncate(child, bad)
    tree.truncate(child, 9)
    assert tree.tokens(child).tolist() == [*range(6), 50, 51, 52]
    assert tree.describe(child)[3] == 1
    tree.truncate(child, 6)
    assert tree.describe(child)[3] == 0
    fill(tree, child, 2, first=70)
    assert tree.tokens(child).tolist() == [*range(6), 70, 71]
    tree.check()


@pytest.mark.parametrize("sizes", [{"num_pages": 0}, {"num_pages": 8, "max_levels": 0}, {"num_pages": 8, "page_tokens": -1}])
def test_sizes_are_checked(make: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        make(**sizes)


def test_slots_must_fit_32_bits() -> None:
    with pytest.raises(ValueError, match="write slots are 32-bit"):
        _core.BranchTree(2**28, page_tokens=16)


def test_arrays_never_move_and_what_python_writes_there_is_not_read_back() -> None:
    tree = _core.BranchTree(64, page_tokens=4, max_batch=4)
    views = [tree.token_ids, tree.positions, tree.write_slots, tree.row_indptr, tree.row_slots]
    branch = tree.root()
    tree.join(branch, 2, 7)
    for i in range(10):
        tree.plan()
        tree.commit()
        for array in [*views, *tree.level(0)]:
            array[:] = 2**31 - 1
        assert len(tree.level(0)[2]) == (i + 4) // 4
    assert tree.positions.ctypes.data == views[1].ctypes.data
    tree.plan()
    assert tree.positions[0] == 10
    assert views[1][0] == 10
    tree.commit()
    assert tree.tokens(branch).tolist() == [7] * 11
    tree.check()


@pytest.mark.parametrize("count", [0, 1, 500])
def test_handles_come_as_an_array_of_their_own(make: Any, count: int) -> None:
    tree = make(16)
    root = tree.root()
    first, second = tree.fork_many(root, count), tree.fork_many(root, count)
    assert first.dtype == second.dtype == np.uint64
    assert first.shape == second.shape == (count,)
    assert first.flags.owndata
    assert first.flags.writeable
    assert not np.shares_memory(first, second)
    assert len({root, *first.tolist(), *second.tolist()}) == 1 + 2 * count
    tree.release_many(second)
    second[:] = 0  # the caller's own: nothing is read from it any more
    assert [tree.length(child) for child in first.tolist()] == [0] * count
    leases = tree.lend_many(count, 0, 0)
    del tree, root
    gc.collect()
    assert leases.shape == (count,)
    assert np.unique(leases).size == count


def test_a_view_keeps_the_tree_alive() -> None:
    view = _core.BranchTree(64).next_tokens
    gc.collect()
    view[:] = 3
    assert view.sum() == 3 * 512


@pytest.mark.parametrize("bad", [-1, 2**64, 2**200, 1.5, "1", None, [1], b"x"])
def test_what_is_no_handle_is_refused(bad: Any) -> None:
    tree = _core.BranchTree(8)
    for call in (tree.fork, tree.release, tree.length, tree.tokens, tree.pages, tree.describe, tree.leave):
        with pytest.raises(TypeError):
            call(bad)


@pytest.mark.parametrize("bad", [0, 1, 2**32, 2**63, 2**64 - 1, (1 << 32) | 2**31])
def test_what_names_no_branch_is_refused(bad: int) -> None:
    tree = _core.BranchTree(8)
    tree.root()
    for call in (tree.fork, tree.release, tree.length, tree.tokens, tree.pages, tree.describe, tree.leave):
        with pytest.raises(ReleasedHandleError):
            call(bad)


@pytest.mark.parametrize(
    "bad", [[1, 2], np.zeros(3), np.zeros(3, np.int64), np.zeros((2, 2), np.int32), np.zeros(6, np.int32)[::2], None, "ab"]
)
def test_arrays_of_another_kind_are_refused(bad: Any) -> None:
    tree = _core.BranchTree(8)
    with pytest.raises(TypeError):
        tree.prefill(tree.root(), 0, bad)
    with pytest.raises(TypeError):
        tree.release_many(bad)
