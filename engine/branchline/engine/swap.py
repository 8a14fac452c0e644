"""Host memory that the K/V of work which yields is copied to, when that is cheaper than computing it again."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import PagePool
from branchline.engine.errors import ConfigError

# How much the last copy counts in the mean.
_NEWEST = 0.3


class SwapSpace:
    """Copies of pages, one contiguous copy a page. Belongs to the engine's thread.

    Attributes:
        saved_pages: pages copied out since the start.
    """

    def __init__(self, pool: PagePool, num_bytes: int) -> None:
        """Allocates `num_bytes`, pinned if the pool is on a GPU. Raises ConfigError if that holds no page."""
        page_bytes = pool.page_bytes(pool.spec)
        num_places = num_bytes // page_bytes
        if num_places < 1:
            raise ConfigError(
                f"scheduling.swap_bytes = {num_bytes}: one page takes {page_bytes}; give more, or 0 for no swap",
                param="scheduling.swap_bytes",
            )
        self._pool = pool
        on_gpu = pool.data.device.type != "cpu"
        self._places = torch.empty((num_places, *pool.data.shape[1:]), dtype=pool.data.dtype, pin_memory=on_gpu)
        self._free = list(range(num_places - 1, -1, -1))
        self._page_s = 0.0
        self.saved_pages = 0

    @property
    def num_free(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    def seconds(self, num_pages: int) -> float:
        """What copying so many pages out and back takes, from what it took so far (nothing, before the first time)."""
        return 2 * num_pages * self._page_s

    def save(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int64] | None:
        """Copy pages of the pool to places of the space; None, and nothing is done, if there aren't enough."""
        if len(pages) > len(self._free):
            return None
        places = np.array([self._free.pop() for _ in pages], np.int64)
        self._copy(self._places, places, self._pool.data, pages)
        self.saved_pages += len(pages)
        return places

    def load(self, places: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
        """Copy back, and free the places. Modifies the pages of the pool."""
        self._copy(self._pool.data, pages, self._places, places)
        self.drop(places)

    def drop(self, places: npt.NDArray[np.int64]) -> None:
        """Free the places."""
        self._free.extend(places.tolist())

    def _copy(
        self,
        dst: torch.Tensor,
        dst_pages: npt.NDArray[np.integer],
        src: torch.Tensor,
        src_pages: npt.NDArray[np.integer],
    ) -> None:
        began = time.perf_counter()
        for to, of in zip(dst_pages.tolist(), src_pages.tolist(), strict=True):
            dst[to].copy_(src[of], non_blocking=True)
        if self._pool.data.device.type != "cpu":
            torch.cuda.current_stream(self._pool.data.device).synchronize()
        taken = (time.perf_counter() - began) / max(len(dst_pages), 1)
        self._page_s = taken if self._page_s == 0.0 else (1 - _NEWEST) * self._page_s + _NEWEST * taken
