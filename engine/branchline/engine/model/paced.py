"""Steps that take at least so long: a load test's stand-in for a bigger model or a slower device."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.model.runner import Runner
from branchline.engine.step import Step


class PacedRunner(Runner):
    """Runs the steps of another runner at a steady rate: while there is work, one every `min_step_s`."""

    def __init__(self, runner: Runner, min_step_s: float) -> None:
        self._runner = runner
        self._min_step_s = min_step_s
        self._due = 0.0

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]  # nobody sets it
        """See `Runner`."""
        return self._runner.copied_bytes

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        """See `Runner.copy_page`."""
        self._runner.copy_page(source, destination, num_tokens)

    def run(self, step: Step, logit_tokens: npt.NDArray[np.integer]) -> torch.Tensor:
        """See `Runner.run`. What comes between two steps counts as part of their time, so that it doesn't slow the rate."""
        began = time.monotonic()
        logits = self._runner.run(step, logit_tokens)
        now = time.monotonic()
        self._due = min(began + self._min_step_s, max(self._due + self._min_step_s, now))
        if self._due > now:
            time.sleep(self._due - now)
        return logits
