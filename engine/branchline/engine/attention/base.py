"""The contract of an attention backend. Adding one is one file beside this: `attention/<name>.py` with a class `Backend`."""

from __future__ import annotations

import abc
import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from branchline.engine._core import copy_pages
from branchline.engine.errors import ConfigError
from branchline.engine.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shapes of a model's attention. `scale` multiplies the logits (usually head_dim ** -0.5)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    scale: float
    dtype: torch.dtype
    device: torch.device


class PagePool:
    """The K/V memory of an engine: one allocation, page-major.

    `data` has shape [pages, layers, 2, kv_heads, page_tokens, head_dim] (2: K, then V; in int8 head_dim + 4, the bytes of
    each vector's scale), so that one page is one contiguous
    block of bytes (a swap or a transfer is one copy) and a layer's view is FlashInfer's HND layout. A backend may arrange the
    elements of each [page_tokens, head_dim] in an order of its own: others read and write through `AttentionBackend.read_pages`
    and `write_pages`.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int) -> None:
        self.spec = spec
        self.num_pages = num_pages
        shape = (num_pages, spec.num_layers, 2, spec.num_kv_heads, spec.page_tokens, self._width(spec))
        if spec.device.type == "cpu":
            self.data = _untouched_zeros(shape, spec.dtype)
        else:
            self.data = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    @staticmethod
    def page_bytes(spec: AttentionSpec) -> int:
        """Bytes of one page."""
        return spec.num_layers * 2 * spec.num_kv_heads * spec.page_tokens * PagePool._width(spec) * spec.dtype.itemsize

    @staticmethod
    def _width(spec: AttentionSpec) -> int:
        """Elements of a token's K or V of one head."""
        return spec.head_dim + (torch.float32.itemsize if spec.dtype == torch.int8 else 0)

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K/V of T tokens of one layer. Modifies the pages named and nothing else.

        Args:
            pages, offsets: [T] int64: token t goes to `data[pages[t], layer, :, :, offsets[t]]`.
            k, v: [T, kv_heads, head_dim].
        """
        # [pages, kv_heads, page_tokens, head_dim] -> tokens in front, so that the two index tensors are adjacent
        self.data[:, layer, 0].transpose(1, 2)[pages, offsets] = k
        self.data[:, layer, 1].transpose(1, 2)[pages, offsets] = v

    def copy_filled(self, step: Step) -> int:
        """Do the step's copy-on-write list: the filled tokens only. Modifies the destination pages. Returns bytes copied."""
        if len(step.copy_src) == 0:
            return 0
        if self.data.device.type == "cpu":
            return copy_pages(self.data, step.copy_src, step.copy_dst, step.copy_tokens)
        token_bytes = self.page_bytes(self.spec) // self.spec.page_tokens
        copied = 0
        for src, dst, filled in zip(step.copy_src.tolist(), step.copy_dst.tolist(), step.copy_tokens.tolist(), strict=True):
            self.data[dst, :, :, :, :filled] = self.data[src, :, :, :, :filled]
            copied += filled * token_bytes
        return copied


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the operating system hands out as it is written: a pool takes what its used pages take. Begins on
    a memory page. Raises ConfigError."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as err:
        raise ConfigError(
            f"the page pool would take {num_bytes / 2**30:.1f} GiB and the system gives no such block ({err}): "
            "lower pool_bytes or pool_tokens",
            param="pool_tokens",
        ) from err
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class AttentionBackend(abc.ABC):
    """Attention over the branch tree. One instance belongs to one engine and is used from its thread only.

    Attributes:
        max_levels: most hard levels (segments that end in a half-filled page) that the core may give it in one chain before
            it must copy the filled part of a page instead; at least 1.
    """

    max_levels: int

    def __init__(self, spec: AttentionSpec, pool: PagePool) -> None:
        self.spec = spec
        self.pool = pool

    def copy_pages(self, step: Step) -> int:
        """Do the step's copy-on-write list, of at least the filled tokens. Modifies the destination pages only. Called before
        the step's `plan`. Returns bytes copied."""
        return self.pool.copy_filled(step)

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy at least the first tokens of one page outside a step. Modifies the destination page only."""
        none = np.empty(0, np.int32)
        copies = (np.array([value], np.int32) for value in (source, destination, num_tokens))
        self.copy_pages(Step(none, none, none, none, none, (), *copies))

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """K/V of pages [n] int64, in the contract's order: a copy [n, layers, 2, kv_heads, page_tokens, head_dim] (of int8:
        in float32)."""
        return self.pool.data[pages]

    def write_pages(self, pages: torch.Tensor, kv: torch.Tensor) -> None:
        """The inverse of `read_pages`. Modifies the pages named, wholly, and nothing else."""
        self.pool.data[pages] = kv

    @abc.abstractmethod
    def plan(self, step: Step) -> None:
        """Take the arrays of the next forward. Borrows `step` until the next plan. Called once a step."""

    @abc.abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the step's new K/V of `layer` into the pool, then attend.

        Args:
            layer: index of the layer.
            q: [T, num_heads, head_dim], rope applied. Not modified.
            k, v: [T, num_kv_heads, head_dim], rope applied to k. Written at the step's `write_slots`.

        Returns:
            [T, num_heads, head_dim]: softmax(scale · q kᵀ) v over all the tokens that each query sees.
        """
