"""What every attention backend must do. Runs over every file in `branchline/engine/attention/`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.engine.attention.base import AttentionBackend, PagePool
from branchline.engine.attention.find import backend_names, find_backend
from branchline.engine.errors import ConfigError

from .trees import PAGE_TOKENS, Row, Segment, attach, build, new_kv, run, segment, spec_of

EDGES = (1, 15, 16, 17, 31, 32, 33)


@pytest.fixture(params=backend_names())
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    if request.param == "flashinfer" and not torch.cuda.is_available():
        pytest.skip("flashinfer needs an NVIDIA GPU")
    return find_backend(request.param, "cpu")


def agree(backend: type[AttentionBackend], roots: list[Segment | Row], tolerance: float = 1e-4, **shape: object) -> None:
    spec = spec_of(**shape)  # type: ignore[arg-type]
    got, expected = run(backend, spec, build(spec, roots))
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shared", EDGES)
def test_fork_at_every_side_of_a_page_boundary(backend: type[AttentionBackend], shared: int) -> None:
    agree(backend, [segment(shared, *(Row(past) for past in (0, *EDGES)))])


@pytest.mark.parametrize("new", EDGES)
def test_prefill_chunk_of_every_length(backend: type[AttentionBackend], new: int) -> None:
    agree(backend, [Row(0, new), segment(20, Row(0, new), Row(5, new), Row(16, new))])


def test_lone_row_without_any_past(backend: type[AttentionBackend]) -> None:
    agree(backend, [Row(0, 1)])


def test_rows_that_have_nothing_at_a_level(backend: type[AttentionBackend]) -> None:
    agree(backend, [Row(3), segment(17, Row(2), segment(33, Row(4), Row(40)), Row(1)), Row(18), segment(0, Row(7), Row(0))])


def test_five_levels_deep(backend: type[AttentionBackend]) -> None:
    tree: Segment | Row = Row(2)
    for length in (33, 1, 16, 15, 17):
        tree = segment(length, Row(length), tree, Row(0))
    agree(backend, [tree, Row(9)])


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_grouped_query_heads(backend: type[AttentionBackend], group: int) -> None:
    agree(backend, [segment(37, Row(0), Row(20, 3), Row(31))], num_heads=2 * group, num_kv_heads=2)


def test_single_kv_head(backend: type[AttentionBackend]) -> None:
    agree(backend, [segment(37, Row(0), Row(20, 3), Row(31))], num_heads=4, num_kv_heads=1, head_dim=64)


@pytest.mark.parametrize("width", [64, 500])
def test_many_branches_of_one_prefix(backend: type[AttentionBackend], width: int) -> None:
    rows = [Row(i % 37) for i in range(width)]
    agree(backend, [segment(100, *rows)], num_layers=1, num_heads=3, num_kv_heads=1)


def test_prefill_chunks_and_decode_rows_in_one_step(backend: type[AttentionBackend]) -> None:
    agree(backend, [Row(0, 40), segment(50, Row(3), Row(0, 21), Row(16), Row(15, 2)), Row(70, 5), Row(70)])


def test_bfloat16(backend: type[AttentionBackend]) -> None:
    agree(
        backend,
        [segment(100, *(Row(i) for i in range(20))), Row(0, 40)],
        tolerance=3e-2,
        dtype=torch.bfloat16,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )


def test_scores_far_from_zero_neither_overflow_nor_vanish(backend: type[AttentionBackend]) -> None:
    spec = spec_of()
    forest = build(spec, [segment(33, Row(5), Row(0, 4))])
    for path in forest.paths:
        path[0].kv[:, :, 0] *= 0  # a level whose scores are 0 …
    forest.pool.data[forest.paths[0][0].pages, :, 0] = 0
    for path in forest.paths:  # … and tails whose scores are in the hundreds
        filled = len(path[-1].kv)
        path[-1].kv[:, :, 0] *= 100
        for i in range(filled):
            forest.pool.data[path[-1].pages[i // PAGE_TOKENS], :, 0, :, i % PAGE_TOKENS] *= 100
    got, expected = run(backend, spec, forest)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_new_kv_lands_at_its_slots_and_nowhere_else(backend: type[AttentionBackend]) -> None:
    spec = spec_of(num_layers=3)
    forest = build(spec, [segment(17, Row(15, 3), Row(4)), Row(0, 20)])
    before = forest.pool.data.clone()
    instance = attach(backend, spec, forest)
    instance.plan(forest.step)
    layer = 1
    k, v = new_kv(forest, layer)
    instance.attend(layer, torch.zeros(forest.num_tokens, spec.num_heads, spec.head_dim), k, v)
    expected = before.clone()
    for token, slot in enumerate(forest.step.write_slots.tolist()):
        expected[slot // PAGE_TOKENS, layer, 0, :, slot % PAGE_TOKENS] = k[token]
        expected[slot // PAGE_TOKENS, layer, 1, :, slot % PAGE_TOKENS] = v[token]
    got = instance.read_pages(torch.arange(forest.pool.num_pages))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_read_as_they_were_written(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    spec = spec_of(dtype=dtype)
    pool = PagePool(spec, 6)
    instance = backend(spec, pool)
    pages = torch.tensor([4, 1])
    content = torch.randn(2, *pool.data.shape[1:]).to(dtype)
    instance.write_pages(pages, content)
    assert torch.equal(instance.read_pages(pages), content)
    assert not instance.read_pages(torch.tensor([0, 2, 3, 5])).any()


def test_copied_pages_hold_at_least_the_filled_tokens(backend: type[AttentionBackend]) -> None:
    spec = spec_of()
    pool = PagePool(spec, 6)
    instance = backend(spec, pool)
    content = torch.randn(pool.data.shape)
    instance.write_pages(torch.arange(6), content)
    step = build(spec, [Row(0)]).step
    sources, targets, filled = (np.array(values, np.int32) for values in ([1, 4], [0, 5], [3, 15]))
    token_bytes = PagePool.page_bytes(spec) // PAGE_TOKENS
    copied = instance.copy_pages(dataclasses.replace(step, copy_src=sources, copy_dst=targets, copy_tokens=filled))
    assert 18 * token_bytes <= copied <= 32 * token_bytes
    now = instance.read_pages(torch.arange(6))
    assert torch.equal(now[0, :, :, :, :3], content[1, :, :, :, :3])
    assert torch.equal(now[5, :, :, :, :15], content[4, :, :, :, :15])
    assert torch.equal(now[1:5], content[1:5])


def test_queries_keys_and_values_are_not_modified(backend: type[AttentionBackend]) -> None:
    spec = spec_of()
    forest = build(spec, [segment(17, Row(15), Row(4, 6))])
    instance = attach(backend, spec, forest)
    instance.plan(forest.step)
    q = torch.randn(forest.num_tokens, spec.num_heads, spec.head_dim)
    k, v = new_kv(forest, 0)
    copies = q.clone(), k.clone(), v.clone()
    instance.attend(0, q, k, v)
    for tensor, copy in zip((q, k, v), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_inputs_may_be_views_of_a_fused_projection(backend: type[AttentionBackend]) -> None:
    spec = spec_of(num_heads=6, num_kv_heads=2)
    forest = build(spec, [segment(17, Row(15), Row(4, 6))])
    fused = torch.randn(forest.num_tokens, 10, spec.head_dim)
    fused[:, 6:8], fused[:, 8:] = new_kv(forest, 0)
    outs = []
    views = torch.split(fused, [6, 2, 2], dim=1)
    instance = attach(backend, spec, forest)
    for q, k, v in (views, [part.contiguous() for part in views]):
        instance.plan(forest.step)
        outs.append(instance.attend(0, q, k, v))
    torch.testing.assert_close(outs[0], outs[1])


def test_one_instance_takes_steps_of_any_shape_in_turn(backend: type[AttentionBackend]) -> None:
    spec = spec_of(num_layers=1)
    wide = build(spec, [segment(100, *(Row(i) for i in range(20)))], spare_pages=40)
    small = build(spec, [Row(0, 3)], beside=wide)
    deep = build(spec, [segment(17, segment(5, Row(4), Row(2, 9)), Row(60))], beside=wide)
    instance = attach(backend, spec, wide)
    for forest in (wide, small, deep, wide, small):
        got, expected = run(backend, spec, forest, instance=instance)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


rows = st.builds(Row, past=st.integers(0, 40), new=st.sampled_from([1, 1, 1, 2, 17]))
trees = st.recursive(
    rows,
    lambda below: st.builds(Segment, num_tokens=st.integers(0, 40), below=st.lists(below, min_size=1, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(roots=st.lists(trees, min_size=1, max_size=3))
@pytest.mark.parametrize("name", [name for name in backend_names() if name != "flashinfer"])
def test_any_tree(name: str, roots: list[Segment | Row]) -> None:
    agree(find_backend(name, "cpu"), roots, num_layers=1, num_heads=3, num_kv_heads=1)


def test_auto_takes_the_best_of_the_device() -> None:
    assert find_backend("auto", "cpu") is find_backend("cpu", "cpu")


def test_unknown_backend_is_an_error_that_lists_those_there() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reference'") as error:
        find_backend("referense", "cpu")
    assert error.value.param == "attention"
    assert "cpu, " in error.value.message


@pytest.mark.parametrize("name", ["base", "find", "__init__", "..errors", ""])
def test_a_name_that_is_no_backend_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such backend"):
        find_backend(name, "cpu")
