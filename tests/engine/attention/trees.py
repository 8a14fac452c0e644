"""Builds a step's arrays by hand from the description of a tree, with the K/V of every path kept beside it as dense rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from branchline.engine.attention.base import AttentionBackend, AttentionSpec, PagePool
from branchline.engine.step import Int32Array, Level, Step

PAGE_TOKENS = 16


@dataclass
class Segment:
    """Tokens that all rows below share."""

    num_tokens: int
    below: list[Segment | Row]


@dataclass
class Row:
    """One branch of the step: `past` tokens of its own tail are there, `new` are computed now."""

    past: int
    new: int = 1


def segment(num_tokens: int, *below: Segment | Row) -> Segment:
    return Segment(num_tokens, list(below))


def spec_of(
    num_heads: int = 2, num_kv_heads: int = 2, head_dim: int = 8, num_layers: int = 2, dtype: torch.dtype = torch.float32
) -> AttentionSpec:
    return AttentionSpec(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=PAGE_TOKENS,
        scale=head_dim**-0.5,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@dataclass
class Piece:
    """A run of tokens with its pages and its dense K/V, [tokens, layers, 2, kv_heads, head_dim]."""

    pages: list[int]
    kv: torch.Tensor


@dataclass
class Forest:
    """A pool filled from a tree's description, the step over it, and each row's path of pieces (its own tail last)."""

    pool: PagePool
    step: Step
    paths: list[list[Piece]]
    new_tokens: list[int]
    unused_pages: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.step.token_ids)


def build(
    spec: AttentionSpec, roots: list[Segment | Row], seed: int = 0, spare_pages: int = 5, beside: Forest | None = None
) -> Forest:
    """Lay the tree out on permuted pages of a pool filled with NaN. Only past K/V is written; new tokens' slots stay NaN.

    `beside`: use the unused pages of that forest's pool instead of a new pool."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_pages = _count_pages(roots) + spare_pages
    free = [int(page) for page in rng.permutation(num_pages)] if beside is None else beside.unused_pages
    pieces: list[Piece] = []
    rows: list[tuple[list[Piece], int]] = []

    def piece(num_tokens: int) -> Piece:
        pages = [free.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))]
        shape = (num_tokens, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        made = Piece(pages, torch.randn(shape, generator=generator, dtype=torch.float32).to(spec.dtype))
        pieces.append(made)
        return made

    def walk(node: Segment | Row, above: list[Piece]) -> None:
        if isinstance(node, Row):
            rows.append(([*above, piece(node.past + node.new)], node.new))
            return
        mine = piece(node.num_tokens)
        for child in node.below:
            walk(child, [*above, mine])

    for root in roots:
        walk(root, [])
    if beside is None:
        pool = PagePool(spec, num_pages)
        pool.data.fill_(float("nan"))
    else:
        pool = beside.pool
    new_of = {id(path[-1]): new for path, new in rows}
    for p in pieces:
        for i in range(len(p.kv) - new_of.get(id(p), 0)):
            pool.data[p.pages[i // PAGE_TOKENS], :, :, :, i % PAGE_TOKENS] = p.kv[i]
    return Forest(pool, _step(rows), [path for path, _ in rows], [new for _, new in rows], free)


def _count_pages(nodes: list[Segment | Row]) -> int:
    total = 0
    for node in nodes:
        num_tokens = node.past + node.new if isinstance(node, Row) else node.num_tokens
        total += -(-num_tokens // PAGE_TOKENS) + (0 if isinstance(node, Row) else _count_pages(node.below))
    return total


def _ints(values: list[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _step(rows: list[tuple[list[Piece], int]]) -> Step:
    depth = max(len(path) for path, _ in rows) - 1
    starts = np.concatenate([[0], np.cumsum([new for _, new in rows])]).astype(np.int32)
    levels = []
    for index in range(depth + 1):
        qo, kv, indices, last = [0], [0], [], []  # type: list[int], list[int], list[int], list[int]
        previous: Piece | None = None
        for r, (path, _) in enumerate(rows):
            is_tail = index == depth
            here = path[-1] if is_tail else (path[index] if index < len(path) - 1 else None)
            if r > 0 and not is_tail and here is previous:
                qo[-1] = int(starts[r + 1])  # the same segment, or nothing again: one group
                continue
            previous = here
            qo.append(int(starts[r + 1]))
            indices.extend(here.pages if here else [])
            kv.append(len(indices))
            last.append((len(here.kv) - 1) % PAGE_TOKENS + 1 if here is not None and len(here.kv) else 0)
        levels.append(Level(_ints(qo), _ints(kv), _ints(indices), _ints(last)))
    slots, positions = [], []
    for path, new in rows:
        tail, before = path[-1], sum(len(p.kv) for p in path[:-1])
        for i in range(len(tail.kv) - new, len(tail.kv)):
            slots.append(tail.pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS)
            positions.append(before + i)
    none = _ints([])
    return Step(
        token_ids=np.zeros(len(slots), dtype=np.int32),
        positions=_ints(positions),
        write_slots=_ints(slots),
        row_indptr=starts,
        row_slots=np.arange(len(rows), dtype=np.int32),
        levels=tuple(levels),
        copy_src=none,
        copy_dst=none,
        copy_tokens=none,
    )


def new_kv(forest: Forest, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the step's new tokens, [T, kv_heads, head_dim] each."""
    rows = [path[-1].kv[len(path[-1].kv) - new :, layer] for path, new in zip(forest.paths, forest.new_tokens, strict=True)]
    packed = torch.cat(rows)
    return packed[:, 0].contiguous(), packed[:, 1].contiguous()


def dense(spec: AttentionSpec, forest: Forest, layer: int, q: torch.Tensor) -> torch.Tensor:
    """The same attention, from the dense paths in float64: no page, no level, no backend in it."""
    outs, start = [], 0
    for path, new in zip(forest.paths, forest.new_tokens, strict=True):
        outs.append(dense_row(spec, torch.cat([p.kv for p in path])[:, layer], q[start : start + new]))
        start += new
    return torch.cat(outs)


def dense_row(spec: AttentionSpec, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Causal attention of one row's last tokens: kv [tokens, 2, kv_heads, head_dim], q [new, heads, head_dim]."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = kv.double()[:, 0], kv.double()[:, 1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        seen = len(kv) - (len(q) - 1 - i)
        for head in range(spec.num_heads):
            scores = keys[:seen, head // group] @ q[i, head].double() * spec.scale
            out[i, head] = scores.softmax(0) @ values[:seen, head // group]
    return out


def attach(backend: type[AttentionBackend], spec: AttentionSpec, forest: Forest) -> AttentionBackend:
    """A backend over a forest's pool, with the pool's content in the backend's own order. Once a pool."""
    content = forest.pool.data.clone()
    instance = backend(spec, forest.pool)
    instance.write_pages(torch.arange(forest.pool.num_pages), content)
    return instance


def run(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    forest: Forest,
    seed: int = 1,
    instance: AttentionBackend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in every layer. Returns (got, expected), [layers, T, heads, head_dim] each, float64."""
    generator = torch.Generator().manual_seed(seed)
    instance = instance or attach(backend, spec, forest)
    instance.plan(forest.step)
    got, expected = [], []
    for layer in range(spec.num_layers):
        q = torch.randn((forest.num_tokens, spec.num_heads, spec.head_dim), generator=generator).to(spec.dtype)
        k, v = new_kv(forest, layer)
        out = instance.attend(layer, q, k, v)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        got.append(out.double())
        expected.append(dense(spec, forest, layer, q))
    return torch.stack(got), torch.stack(expected)
