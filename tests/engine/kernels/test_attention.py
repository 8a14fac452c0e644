"""Native tree attention on every instruction set of this machine: against dense attention in float64, and bit for bit against
itself with other threads, other neighbours and other chunks. The contract suite runs over its backend too."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.engine.attention.trees import Forest, Row, Segment, attach, build, dense, new_kv, segment, spec_of

from branchline.engine import _kernels
from branchline.engine.attention.base import AttentionBackend, AttentionSpec, PagePool
from branchline.engine.attention.native import Backend
from branchline.engine.errors import ConfigError
from branchline.engine.step import Int32Array, Level, Step

ISAS = _kernels.attention_isas()
# Against K/V as the pool has them; of int8 the numbers that its codes stand for.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.int8: 1e-4}
DTYPES = list(TOLERANCE)


def backend_on(spec: AttentionSpec, pool: PagePool, isa: str = "", threads: int = 1) -> Backend:
    return Backend(spec, pool, isa=isa, threads=_kernels.ThreadPool(threads))


def open_on(spec: AttentionSpec, forest: Forest, isa: str = "", threads: int = 1) -> AttentionBackend:
    """A backend whose pool has the forest's content. `spec` of int8: a pool of its own, for a forest in float32."""

    class Chosen(Backend):
        def __init__(self, spec: AttentionSpec, pool: PagePool) -> None:
            super().__init__(spec, pool, isa=isa, threads=_kernels.ThreadPool(threads))

    if spec.dtype != torch.int8:
        return attach(Chosen, spec, forest)
    pool = PagePool(spec, forest.pool.num_pages)
    instance = Chosen(spec, pool)
    instance.write_pages(torch.arange(pool.num_pages), forest.pool.data)
    return instance


def laid_out(spec: AttentionSpec, roots: list[Segment | Row]) -> Forest:
    """A forest for `open_on`. Of int8 in float32, but with numbers that 8 bits hold."""
    if spec.dtype != torch.int8:
        return build(spec, roots)
    forest = build(dataclasses.replace(spec, dtype=torch.float32), roots)
    for piece in {id(piece): piece for path in forest.paths for piece in path}.values():
        piece.kv = rounded(piece.kv)
        for i in range(len(piece.kv)):
            page, offset = piece.pages[i // spec.page_tokens], i % spec.page_tokens
            written = ~forest.pool.data[page, :, :, :, offset].isnan()
            forest.pool.data[page, :, :, :, offset] = torch.where(written, piece.kv[i], torch.nan)
    return forest


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    """Each vector [head_dim] as 8 bits of its own scale have it."""
    scales = vectors.abs().amax(-1, keepdim=True) / 127
    return (vectors / scales).round() * scales


def queries(spec: AttentionSpec, num_tokens: int, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn((num_tokens, spec.num_heads, spec.head_dim), generator=generator)
    return numbers if spec.dtype == torch.int8 else numbers.to(spec.dtype)


def attend(instance: AttentionBackend, forest: Forest, q: torch.Tensor) -> torch.Tensor:
    instance.plan(forest.step)
    return instance.attend(0, q, *new_kv(forest, 0))


def agree(spec: AttentionSpec, roots: list[Segment | Row], isa: str) -> None:
    forest = laid_out(spec, roots)
    q = queries(spec, forest.num_tokens)
    expected = dense(spec, forest, 0, q)
    got = attend(open_on(spec, forest, isa), forest, q)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[spec.dtype], rtol=TOLERANCE[spec.dtype])


def deep_tree() -> list[Segment | Row]:
    tree: Segment | Row = Row(2)
    for length in (33, 1, 16, 130, 17):
        tree = segment(length, Row(length), tree, Row(0, 3))
    return [tree, Row(9)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128])
def test_head_dims(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    spec = spec_of(num_heads=6, num_kv_heads=2, head_dim=head_dim, num_layers=1, dtype=dtype)
    agree(spec, [segment(100, *(Row(past) for past in (0, 14, 15, 16, 40))), Row(0, 37), Row(20, 5)], isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_grouped_query_heads(isa: str, dtype: torch.dtype, group: int) -> None:
    spec = spec_of(num_heads=2 * group, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype)
    agree(spec, [segment(150, Row(0), Row(20, 3), Row(31), Row(130))], isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_five_levels_deep(isa: str, dtype: torch.dtype) -> None:
    agree(spec_of(num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype), deep_tree(), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens_to_see(isa: str, dtype: torch.dtype) -> None:
    """Up to two stretches of the online softmax, rows of all lengths beside each other."""
    spec = spec_of(num_heads=3, num_kv_heads=1, head_dim=64, num_layers=1, dtype=dtype)
    agree(spec, [*(Row(past) for past in range(0, 270, 3)), Row(0, 200)], isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [511, 512, 513, 1100])
def test_splits_of_a_long_segment(dtype: torch.dtype, num_tokens: int) -> None:
    spec = spec_of(num_heads=2, num_kv_heads=1, head_dim=64, num_layers=1, dtype=dtype)
    agree(spec, [segment(num_tokens, Row(0), Row(num_tokens, 1), Row(num_tokens - 300, 300))], "")


def test_many_branches_of_a_long_prefix() -> None:
    spec = spec_of(num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1)
    agree(spec, [segment(600, *(Row(i % 37) for i in range(500)))], "")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_tokens", [32, 48])
def test_pages_of_several_blocks(dtype: torch.dtype, page_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.attention.trees.PAGE_TOKENS", page_tokens)
    spec = spec_of(num_heads=4, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype)
    assert spec.page_tokens == page_tokens
    agree(spec, [segment(100, Row(0), Row(33), Row(47, 60)), Row(530)], "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    spec = spec_of(num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype)
    forest = laid_out(spec, [segment(1100, *(Row(i) for i in range(70)), Row(3, 40)), *deep_tree()])
    q = queries(spec, forest.num_tokens)
    first = open_on(spec, forest)
    expected = attend(first, forest, q)
    for threads in (1, 2, 3):
        again = backend_on(spec, first.pool, threads=threads)
        for _ in range(3):
            assert torch.equal(attend(again, forest, q), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_does_not_depend_on_the_others(isa: str, dtype: torch.dtype) -> None:
    """The same branches alone, in pairs and all together: also where tiles of query rows fall otherwise."""
    spec = spec_of(num_heads=14, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype)
    rows = [Row(i * 9 % 140) for i in range(11)]
    forest = laid_out(spec, [segment(700, *rows)])
    q = queries(spec, forest.num_tokens)
    together = open_on(spec, forest, isa)
    expected = attend(together, forest, q)
    k, v = new_kv(forest, 0)
    for chosen in ([0], [4], [10], [2, 3], [5, 6, 7, 8, 9]):
        step = _only(forest, chosen)
        together.plan(step)
        assert torch.equal(together.attend(0, q[chosen], k[chosen], v[chosen]), expected[chosen])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_gives_the_same_in_chunks_of_any_size(dtype: torch.dtype) -> None:
    spec = spec_of(num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, dtype=dtype)
    whole = laid_out(spec, [Row(0, 700)])
    q, (k, v) = queries(spec, 700), new_kv(whole, 0)
    expected = attend(open_on(spec, whole), whole, q)
    slots = whole.step.write_slots
    for size in (130, 256):
        pool = PagePool(spec, whole.pool.num_pages)
        pool.data.view(-1).view(torch.uint8).fill_(0xFF)  # not a number, in any dtype
        instance = backend_on(spec, pool)
        for begin in range(0, 700, size):
            end = min(begin + size, 700)
            pages = -(-end // spec.page_tokens)
            level = Level(
                _ints([0, end - begin]),
                _ints([0, pages]),
                whole.step.levels[0].kv_indices[:pages],
                _ints([(end - 1) % spec.page_tokens + 1]),
            )
            step = _step_with(whole, slots[begin:end], _ints([0, end - begin]), (level,))
            instance.plan(step)
            assert torch.equal(instance.attend(0, q[begin:end], k[begin:end], v[begin:end]), expected[begin:end])


@pytest.mark.parametrize("isa", ISAS)
def test_int8_costs_little(isa: str) -> None:
    """Numbers that 8 bits don't hold: each is off by at most half a 127th of its vector's largest."""
    spec = spec_of(num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, dtype=torch.int8)
    exact = dataclasses.replace(spec, dtype=torch.float32)
    forest = build(exact, [segment(150, Row(0), Row(20, 3), Row(31)), Row(300)])
    q = queries(spec, forest.num_tokens)
    expected = dense(exact, forest, 0, q)
    error = (attend(open_on(spec, forest, isa), forest, q).double() - expected).norm() / expected.norm()
    assert 1e-4 < error < 1.5e-2


def test_int8_pages_read_as_they_were_written_and_what_is_not_finite_shows() -> None:
    spec = spec_of(head_dim=24, dtype=torch.int8)
    pool = PagePool(spec, 3)
    instance = backend_on(spec, pool)
    assert PagePool.page_bytes(spec) == pool.data[0].numel() == 2 * 2 * 2 * 16 * (24 + 4)
    content = rounded(torch.randn(2, 2, 2, 2, 16, 24))
    content[0, 1, 0, 1, 5] = 0.0
    content[1, 0, 1, 0, 3, 7] = float("inf")
    instance.write_pages(torch.tensor([2, 0]), content)
    content[1, 0, 1, 0, 3] = float("nan")
    torch.testing.assert_close(instance.read_pages(torch.tensor([2, 0])), content, equal_nan=True)
    assert not instance.read_pages(torch.tensor([1])).any()


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_can_be_chosen(isa: str) -> None:
    spec = spec_of()
    assert backend_on(spec, PagePool(spec, 1), isa).isa == isa


def test_unknown_instruction_set() -> None:
    spec = spec_of()
    with pytest.raises(ConfigError, match="sse9"):
        backend_on(spec, PagePool(spec, 1), "sse9")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [("page_tokens", 8, "page_tokens"), ("head_dim", 12, "attention"), ("dtype", torch.float16, "dtype")],
)
def test_shapes_that_it_refuses(field: str, value: object, param: str) -> None:
    spec = dataclasses.replace(spec_of(), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        Backend(spec, PagePool(spec, 1))
    assert error.value.param == param
    assert str(value).removeprefix("torch.") in error.value.message


def test_steps_that_contradict_themselves() -> None:
    spec = spec_of(num_layers=1)
    forest = laid_out(spec, [segment(20, Row(3), Row(4))])
    instance = open_on(spec, forest)
    level, tail = forest.step.levels
    outside = Level(tail.qo_indptr, tail.kv_indptr, tail.kv_indices + 1000, tail.last_page_len)
    short = Level(tail.qo_indptr, tail.kv_indptr, tail.kv_indices[:1], tail.last_page_len)
    slots, rows = forest.step.write_slots, forest.step.row_indptr
    for levels, written, match in (
        ((level, outside), slots, "outside the pool"),
        ((level, short), slots, "contradict"),
        ((level,), slots, "rows"),
        ((), slots, "at least one level"),
        ((level, tail), slots + 100_000, "outside the pool"),
    ):
        with pytest.raises(ValueError, match=match):
            instance.plan(_step_with(forest, written, rows, levels))
    assert torch.isfinite(attend(instance, forest, queries(spec, 2))).all()


def test_inputs_of_another_size_than_planned() -> None:
    spec = spec_of(num_layers=1)
    forest = laid_out(spec, [Row(3), Row(4)])
    instance = open_on(spec, forest)
    instance.plan(forest.step)
    k, v = new_kv(forest, 0)
    with pytest.raises(ValueError, match=r"q must be \[2, 2, 8\]"):
        instance.attend(0, queries(spec, 3), k, v)
    with pytest.raises(ValueError, match="layer 1"):
        instance.attend(1, queries(spec, 2), k, v)


def _ints(values: list[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _step_with(forest: Forest, slots: Int32Array, rows: Int32Array, levels: tuple[Level, ...]) -> Step:
    return dataclasses.replace(
        forest.step, token_ids=np.zeros_like(slots), positions=slots, write_slots=slots, row_indptr=rows, levels=levels
    )


def _only(forest: Forest, chosen: list[int]) -> Step:
    """The step of some of a forest's decode rows, which share their one segment."""
    shared, tail = forest.step.levels
    count = len(chosen)
    tables = [tail.kv_indices[tail.kv_indptr[row] : tail.kv_indptr[row + 1]] for row in chosen]
    above = Level(_ints([0, count]), shared.kv_indptr, shared.kv_indices, shared.last_page_len)
    own = Level(
        _ints(list(range(count + 1))),
        _ints([0, *np.cumsum([len(table) for table in tables])]),
        np.concatenate(tables),
        tail.last_page_len[chosen],
    )
    return _step_with(forest, forest.step.write_slots[chosen], own.qo_indptr, (above, own))
