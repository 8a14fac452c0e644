"""The sampler with the compiled kernels: no row is sorted, and rows are shared out over the engine's threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine import _kernels
from branchline.engine.model.sampler import Int32Array, Sampler


class NativeSampler(Sampler):
    """Takes logits on the CPU. Chooses what `Sampler` does, but where a number falls within rounding of two tokens' border."""

    def __init__(self, vocab_size: int, max_batch: int, threads: _kernels.ThreadPool) -> None:
        super().__init__(vocab_size, max_batch)
        self._threads = threads

    def _choose(
        self, logits: torch.Tensor, slots: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        tokens, bad = np.empty(len(slots), np.int32), np.empty(len(slots), np.bool_)
        _kernels.sample(
            logits.numpy(),
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._keys[slots],
            positions.astype(np.int64),
            tokens,
            bad,
            self._threads,
        )
        return tokens, bad
