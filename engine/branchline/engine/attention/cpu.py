"""Attention on the CPU: torch's flash attention over each level's groups, results merged by log-sum-exp.

A level's K/V is read once for all the queries that share it (cascade attention: Ye et al. 2024, "Cascade inference"; Juravsky
et al. 2024, "Hydragen"), which come folded: `[groups, kv_heads, tokens * query heads per kv head, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import AttentionBackend, AttentionSpec, PagePool
from branchline.engine.step import Step

IntArray = npt.NDArray[np.int64]

# K/V that one call gathers at most, unless a single group has more: about a core's share of the last-level cache.
_GATHER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Batch:
    """Groups of one level with equally many query tokens and about as many pages: one flash attention call.

    Attributes:
        part: where its results go in the stacks that are merged.
        tokens: the groups' query tokens, in order: a slice if they lie together, else their numbers.
        num_groups, tokens_each: B groups of m tokens.
        source: [2 * B * kv_heads * pages] int64: blocks of the pool (one head of one page), for layer 0.
        num_seen: tokens of K/V of the longest group, S.
        first_hole: tokens of K/V of the shortest group.
        holes: [B, 1, S - first_hole, 1] bool: what lies behind a shorter group's end; None if all are equally long.
        mask: [B, 1, 1, S]: 0, or -inf over holes; None with `holes`.
    """

    part: int
    tokens: slice | torch.Tensor
    num_groups: int
    tokens_each: int
    source: torch.Tensor
    num_seen: int
    first_hole: int
    holes: torch.Tensor | None
    mask: torch.Tensor | None


class Backend(AttentionBackend):
    """Cascade attention by torch's CPU kernels, in float32, bfloat16 or float16; merging is in float32.

    A call gathers its K/V from the pages into a dense buffer first, as torch's kernel can't follow a page table: a copy of each
    level a layer. What lies behind the end of a group in its last page is cleared there, so that it isn't read.
    """

    max_levels = 8

    def __init__(self, spec: AttentionSpec, pool: PagePool) -> None:
        super().__init__(spec, pool)
        # A block is one head's K or V of one page and layer: page_tokens rows of head_dim, contiguous.
        self._blocks = pool.data.view(-1, spec.page_tokens * spec.head_dim)
        self._vectors = pool.data.view(-1, spec.head_dim)
        self._buffer = torch.empty((0, self._blocks.shape[1]), dtype=spec.dtype)
        self._batches: list[_Batch] = []
        self._chunks: list[tuple[int, int]] = []
        self._write_k = self._write_v = torch.empty(0, dtype=torch.int64)
        self._outs = torch.empty(0)
        self._log_sums = torch.empty(0)

    def plan(self, step: Step) -> None:
        spec = self.spec
        num_tokens, num_parts = len(step.token_ids), len(step.levels)
        pages, offsets = np.divmod(step.write_slots.astype(np.int64), spec.page_tokens)
        heads = np.arange(spec.num_kv_heads)
        block = pages[:, None] * (spec.num_layers * 2 * spec.num_kv_heads) + heads
        self._write_k = torch.from_numpy((block * spec.page_tokens + offsets[:, None]).reshape(-1))
        self._write_v = self._write_k + spec.num_kv_heads * spec.page_tokens
        lengths = np.diff(step.row_indptr)
        self._chunks = [(int(step.row_indptr[r]), int(step.row_indptr[r + 1])) for r in np.flatnonzero(lengths > 1)]
        self._batches = self._batches_of(step)
        # Tokens without anything at a level keep these values: weight 0.
        shape = (num_parts + bool(self._chunks), num_tokens, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        self._outs = torch.zeros((*shape, spec.head_dim))
        self._log_sums = torch.full(shape, float("-inf"))
        num_blocks = max((len(batch.source) for batch in self._batches), default=0)
        if num_blocks > len(self._buffer):
            self._buffer = torch.empty((num_blocks, self._blocks.shape[1]), dtype=spec.dtype)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        num_tokens, group = len(q), spec.num_heads // spec.num_kv_heads
        first = layer * 2 * spec.num_kv_heads
        vectors = self._vectors[first * spec.page_tokens :]
        vectors.index_copy_(0, self._write_k, k.reshape(-1, spec.head_dim))
        vectors.index_copy_(0, self._write_v, v.reshape(-1, spec.head_dim))
        blocks = self._blocks[first:]
        queries = q.reshape(num_tokens, spec.num_kv_heads, group, spec.head_dim)
        for batch in self._batches:
            self._attend_batch(batch, blocks, queries)
        for begin, end in self._chunks:
            self._attend_chunk(queries[begin:end], k[begin:end], v[begin:end], slice(begin, end))
        out = self._outs[0] if len(self._outs) == 1 else self._log_sums.softmax(dim=0)[..., None].mul(self._outs).sum(dim=0)
        return out.to(q.dtype, copy=True).view(num_tokens, spec.num_heads, spec.head_dim)

    def _attend_batch(self, batch: _Batch, blocks: torch.Tensor, queries: torch.Tensor) -> None:
        spec = self.spec
        num_groups, each = batch.num_groups, batch.tokens_each
        gathered = self._buffer[: len(batch.source)]
        torch.index_select(blocks, 0, batch.source, out=gathered)
        kv = gathered.view(2, num_groups, spec.num_kv_heads, -1, spec.head_dim)[..., : batch.num_seen, :]
        if batch.holes is not None:
            kv[..., batch.first_hole :, :].masked_fill_(batch.holes, 0.0)
        mine = queries[batch.tokens].view(num_groups, each, spec.num_kv_heads, -1, spec.head_dim)
        folded = mine.transpose(1, 2).reshape(num_groups, spec.num_kv_heads, -1, spec.head_dim)
        out, log_sums = _flash(folded, kv[0], kv[1], attn_mask=batch.mask, scale=spec.scale)
        shape = (num_groups, spec.num_kv_heads, each, -1)
        self._outs[batch.part, batch.tokens] = (
            out.reshape(*shape, spec.head_dim).transpose(1, 2).reshape(mine.shape).flatten(0, 1)
        )
        self._log_sums[batch.part, batch.tokens] = log_sums.reshape(shape).transpose(1, 2).flatten(0, 1)

    def _attend_chunk(self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: slice) -> None:
        """A prefill chunk over itself, causal. Folding would mix up the order, so a kv head's query heads are heads here."""
        # [kv_heads, query heads, tokens, head_dim], K/V the same for all query heads by a stride of 0
        mine = queries.permute(1, 2, 0, 3)
        keys = k.transpose(0, 1)[:, None].expand(-1, mine.shape[1], -1, -1)
        values = v.transpose(0, 1)[:, None].expand(-1, mine.shape[1], -1, -1)
        out, log_sums = _flash(mine, keys, values, is_causal=True, scale=self.spec.scale)
        self._outs[-1, tokens] = out.permute(2, 0, 1, 3).float()
        self._log_sums[-1, tokens] = log_sums.permute(2, 0, 1)

    def _batches_of(self, step: Step) -> list[_Batch]:
        groups = _groups_of(step, self.spec.page_tokens)
        block_bytes = self._blocks.shape[1] * self._blocks.itemsize
        keys = np.stack([groups.part, groups.num_tokens, _rounded_up(groups.num_pages)])
        order = np.lexsort((groups.begin, *keys))
        starts = np.flatnonzero(np.any(np.diff(keys[:, order], axis=1, prepend=-1), axis=0)) if order.size else order
        batches = []
        for same in np.split(order, starts[1:]) if order.size else []:
            group_bytes = int(groups.num_pages[same].max()) * 2 * self.spec.num_kv_heads * block_bytes
            at_once = max(1, _GATHER_BYTES // group_bytes)
            batches += [self._batch(groups.take(same[i : i + at_once])) for i in range(0, len(same), at_once)]
        return batches

    def _batch(self, groups: _Groups) -> _Batch:
        spec = self.spec
        num_groups, each = len(groups.part), int(groups.num_tokens[0])
        # A shorter group's table goes on with its last page, under the mask.
        column = np.minimum(np.arange(groups.num_pages.max()), groups.num_pages[:, None] - 1)
        pages = groups.pages[groups.first_page[:, None] + column].astype(np.int64)
        head = np.arange(2 * spec.num_kv_heads).reshape(2, 1, spec.num_kv_heads, 1)
        source = pages[None, :, None, :] * (spec.num_layers * 2 * spec.num_kv_heads) + head
        tokens = (groups.begin[:, None] + np.arange(each)).reshape(-1)
        together = tokens[-1] - tokens[0] == len(tokens) - 1 and bool((np.diff(tokens) == 1).all())
        shortest, longest = int(groups.num_seen.min()), int(groups.num_seen.max())
        holes = mask = None
        if shortest < longest:
            hole = torch.from_numpy(np.arange(longest) >= groups.num_seen[:, None])
            holes = hole[:, None, shortest:, None]
            mask = torch.zeros((num_groups, 1, 1, longest), dtype=spec.dtype)
            mask.masked_fill_(hole[:, None, None], float("-inf"))
        return _Batch(
            part=int(groups.part[0]),
            tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if together else torch.from_numpy(tokens),
            num_groups=num_groups,
            tokens_each=each,
            source=torch.from_numpy(source.reshape(-1)),
            num_seen=longest,
            first_hole=shortest,
            holes=holes,
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of all levels that have tokens and pages, [groups] each; `pages` is all levels' tables joined."""

    pages: npt.NDArray[np.int32]
    part: IntArray
    begin: IntArray
    num_tokens: IntArray
    first_page: IntArray
    num_pages: IntArray
    num_seen: IntArray

    def take(self, chosen: IntArray) -> _Groups:
        parts = (self.part, self.begin, self.num_tokens, self.first_page, self.num_pages, self.num_seen)
        return _Groups(self.pages, *(array[chosen] for array in parts))


def _groups_of(step: Step, page_tokens: int) -> _Groups:
    columns = []
    offset = 0
    for part, level in enumerate(step.levels):
        num_tokens = np.diff(level.qo_indptr).astype(np.int64)
        num_pages = np.diff(level.kv_indptr).astype(np.int64)
        num_seen = np.where(num_pages > 0, (num_pages - 1) * page_tokens + level.last_page_len, 0)
        if part == len(step.levels) - 1:
            # A chunk's own tokens are attended to as a chunk; here is what was in its tail before.
            num_seen = np.where(num_tokens > 1, num_seen - num_tokens, num_seen)
            num_pages = -(-num_seen // page_tokens)
        column = (
            np.full(len(num_tokens), part),
            level.qo_indptr[:-1],
            num_tokens,
            level.kv_indptr[:-1] + offset,
            num_pages,
            num_seen,
        )
        columns.append(np.stack(column).astype(np.int64)[:, (num_tokens > 0) & (num_seen > 0)])
        offset += len(level.kv_indices)
    pages = np.concatenate([level.kv_indices for level in step.levels])
    return _Groups(pages, *np.concatenate(columns, axis=1))


def _rounded_up(num_pages: IntArray) -> IntArray:
    """Page counts that may share a call: exact up to 8, then in steps of at most a quarter."""
    step = 1 << np.maximum(np.log2(np.maximum(num_pages, 1)).astype(np.int64) - 2, 0)
    rounded: IntArray = np.where(num_pages <= 8, num_pages, -(-num_pages // step) * step)
    return rounded


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the natural logarithm of each query's sum of exponentials: ([B, H, M, D], float32 [B, H, M])."""
    out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out, log_sums
