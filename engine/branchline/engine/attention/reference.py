"""Attention in plain torch, one row at a time: slow and obviously right. The other backends are held against it."""

from __future__ import annotations

import numpy as np
import torch

from branchline.engine.attention.base import AttentionBackend, AttentionSpec, PagePool
from branchline.engine.step import Level, Step


class Backend(AttentionBackend):
    """Gathers a row's whole K/V from its levels, then takes a masked softmax in float32 (float64 stays float64)."""

    max_levels = 64

    def __init__(self, spec: AttentionSpec, pool: PagePool) -> None:
        super().__init__(spec, pool)
        self._write_pages = torch.empty(0, dtype=torch.int64, device=spec.device)
        self._write_offsets = self._write_pages
        self._rows: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []

    def plan(self, step: Step) -> None:
        device, page_tokens = self.spec.device, self.spec.page_tokens
        slots = torch.from_numpy(step.write_slots.astype(np.int64)).to(device)
        self._write_pages, self._write_offsets = slots // page_tokens, slots % page_tokens
        self._rows = []
        for begin, end in zip(step.row_indptr[:-1].tolist(), step.row_indptr[1:].tolist(), strict=True):
            seen = np.concatenate([_group_slots(level, begin, page_tokens) for level in step.levels])
            at = torch.from_numpy(seen).to(device)
            self._rows.append((begin, end, at // page_tokens, at % page_tokens))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.pool.write(layer, self._write_pages, self._write_offsets, k, v)
        spec, out = self.spec, torch.empty_like(q)
        math_dtype = torch.promote_types(q.dtype, torch.float32)
        repeats = spec.num_heads // spec.num_kv_heads
        for begin, end, pages, offsets in self._rows:
            num_new, num_seen = end - begin, len(pages)
            keys = self.pool.data[pages, layer, 0, :, offsets].to(math_dtype).repeat_interleave(repeats, dim=1)
            values = self.pool.data[pages, layer, 1, :, offsets].to(math_dtype).repeat_interleave(repeats, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(math_dtype), keys) * spec.scale
            # The i-th of n new tokens sees all but the last n - 1 - i.
            hidden = torch.ones(num_new, num_seen, dtype=torch.bool, device=q.device).triu(num_seen - num_new + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out


def _group_slots(level: Level, token: int, page_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Slots (page * page_tokens + offset) of the K/V of the level's group that holds the step's token number `token`."""
    group = int(np.searchsorted(level.qo_indptr, token, side="right")) - 1
    pages = level.kv_indices[level.kv_indptr[group] : level.kv_indptr[group + 1]].astype(np.int64)
    slots = (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
    num_tokens = max(len(pages) - 1, 0) * page_tokens + int(level.last_page_len[group])
    return slots[:num_tokens]
