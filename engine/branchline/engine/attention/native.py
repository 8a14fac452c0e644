"""Attention on the CPU: the compiled kernels of `_kernels.TreeAttention`, straight on the pages of K/V.

The pool's bytes are laid out for the kernels: see `AttentionShape` in engine/kernels/include/branchline/kernels/attention.hpp.
"""

from __future__ import annotations

from typing import Literal

import torch

from branchline.engine import _kernels
from branchline.engine.attention.base import AttentionBackend, AttentionSpec, PagePool
from branchline.engine.errors import ConfigError
from branchline.engine.step import Step

_BLOCK_TOKENS = 16
_KV_DTYPES: dict[torch.dtype, Literal["float32", "bfloat16", "int8"]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
}


class Backend(AttentionBackend):
    """Tree attention over K/V in float32, bfloat16 or int8. Queries, new K/V and results are computed with in float32.

    A row's result depends on its own query and K/V alone, bit for bit: not on the number of threads, the other rows of the
    step, or how its K/V is cut into levels and pages.
    """

    max_levels = 8

    def __init__(
        self, spec: AttentionSpec, pool: PagePool, *, threads: _kernels.ThreadPool | None = None, isa: str = ""
    ) -> None:
        """`threads`: None: as many as torch uses. `isa`: one of `_kernels.attention_isas()`; "": the machine's best.

        Raises:
            ConfigError: a dtype, head_dim or page_tokens that the kernels can't take.
        """
        super().__init__(spec, pool)
        kv_dtype = _KV_DTYPES.get(spec.dtype)
        if kv_dtype is None:
            raise ConfigError(
                f"attention = 'native' keeps K/V in float32, bfloat16 or int8, not {str(spec.dtype).removeprefix('torch.')}: "
                "choose another dtype, or attention = 'cpu'",
                param="dtype",
            )
        try:
            self._attention = _kernels.TreeAttention(
                num_layers=spec.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                page_tokens=spec.page_tokens,
                scale=spec.scale,
                kv_dtype=kv_dtype,
                isa=isa,
            )
        except ValueError as err:
            param = "page_tokens" if spec.page_tokens % _BLOCK_TOKENS else "attention"
            raise ConfigError(f"attention = 'native': {err}; attention = 'cpu' takes any", param=param) from err
        self._threads = threads or _kernels.ThreadPool(torch.get_num_threads())
        self._bytes = pool.data.view(-1).view(torch.uint8)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._attention.isa

    def plan(self, step: Step) -> None:
        levels = [(level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len) for level in step.levels]
        self._attention.plan(step.write_slots, step.row_indptr, levels, self.pool.num_pages)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float32)
        keys, values = _packed(k), _packed(v)
        if keys.stride(0) != values.stride(0):
            # a clone, as `contiguous` leaves the strides of a single token as they are
            keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
        self._attention.attend(layer, _packed(q), keys, values, out, self._bytes, self._threads)
        return out.to(q.dtype)

    def copy_pages(self, step: Step) -> int:
        """Copies whole pages: a page's keys lie token by token in the lanes, so that its filled part isn't one run of bytes."""
        source, destination = (torch.from_numpy(pages).long() for pages in (step.copy_src, step.copy_dst))
        self.pool.data[destination] = self.pool.data[source]
        return len(source) * PagePool.page_bytes(self.spec)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        content = self.pool.data[pages]
        keys, values = self._orders()
        shape = (*content.shape[:2], *content.shape[3:-1], self.spec.head_dim)
        # keys: […, blocks, head_dim / width, 16, width]; values: […, blocks, 16 / width, head_dim, width], the last one first
        own_keys, own_values = (self._numbers(content[:, :, part]) for part in (0, 1))
        keys_in_order = own_keys.reshape(-1, *keys).transpose(1, 2).reshape(-1, _BLOCK_TOKENS, self.spec.head_dim)
        values_in_order = own_values.reshape(-1, *values).flip(3).transpose(2, 3).reshape(-1, _BLOCK_TOKENS, self.spec.head_dim)
        if self.spec.dtype == torch.int8:
            keys_in_order, values_in_order = (
                ordered.float() * self._scales(content[:, :, part])[:, :, None]
                for part, ordered in enumerate((keys_in_order, values_in_order))
            )
        return torch.stack([keys_in_order.reshape(shape), values_in_order.reshape(shape)], dim=2)

    def write_pages(self, pages: torch.Tensor, kv: torch.Tensor) -> None:
        keys, values = self._orders()
        parts, scales = [kv[:, :, 0], kv[:, :, 1]], []
        if self.spec.dtype == torch.int8:
            parts, scales = map(list, zip(*(_rounded(part.float()) for part in parts), strict=True))
        own_keys = parts[0].reshape(-1, keys[1], keys[0], keys[2]).transpose(1, 2)
        own_values = parts[1].reshape(-1, values[0], values[2], values[1]).transpose(2, 3).flip(3)
        blocks = [own.reshape(-1, _BLOCK_TOKENS * self.spec.head_dim) for own in (own_keys, own_values)]
        if scales:
            rows = [scale.reshape(-1, _BLOCK_TOKENS).view(torch.int8) for scale in scales]
            blocks = [torch.cat([codes, row], dim=1) for codes, row in zip(blocks, rows, strict=True)]
        shape = self.pool.data[pages][:, :, 0].shape
        self.pool.data[pages] = torch.stack([block.reshape(shape) for block in blocks], dim=2)

    def _numbers(self, part: torch.Tensor) -> torch.Tensor:
        """K or V of pages without the scales: [blocks, 16 · head_dim]."""
        blocks = part.reshape(-1, _BLOCK_TOKENS * part.shape[-1])
        return blocks[:, : _BLOCK_TOKENS * self.spec.head_dim]

    def _scales(self, part: torch.Tensor) -> torch.Tensor:
        """[blocks, 16] float32."""
        blocks = part.reshape(-1, _BLOCK_TOKENS * part.shape[-1])
        return blocks[:, _BLOCK_TOKENS * self.spec.head_dim :].contiguous().view(torch.float32)

    def _orders(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of a block of K and of V: see `AttentionShape` in attention.hpp."""
        width = 2 if self.spec.dtype == torch.bfloat16 else 1
        head_dim = self.spec.head_dim
        return (head_dim // width, _BLOCK_TOKENS, width), (_BLOCK_TOKENS // width, head_dim, width)


def _rounded(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales (float32) of vectors […, head_dim]; where one isn't finite, zeros and NaN."""
    scales = vectors.abs().amax(-1) / 127
    scales = torch.where(vectors.isfinite().all(-1), scales, torch.nan)
    codes = (vectors / scales[..., None]).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8)
    return codes, scales


def _packed(vectors: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] float32 with each token's vectors side by side."""
    vectors = vectors.float()
    _, heads, head_dim = vectors.shape
    if vectors.stride(2) == 1 and (heads == 1 or vectors.stride(1) == head_dim):
        return vectors
    return vectors.contiguous()
