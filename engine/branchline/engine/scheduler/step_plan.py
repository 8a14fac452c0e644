"""What the scheduler hands to the one who computes a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.engine.scheduler.work import Work

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that the core has planned.

    Attributes:
        num_tokens: in all rows.
        slots, logit_tokens, positions: [N] of the rows that want a token: their slots, the packed index of their last token,
            and the position that the new token will have.
        chunks: the works that prefill, with how many tokens.
    """

    num_tokens: int
    slots: Int32Array
    logit_tokens: Int32Array
    positions: Int32Array
    chunks: list[tuple[Work, int]]

    @property
    def prefill_tokens(self) -> int:
        """Tokens of rows that prefill."""
        return sum(count for _, count in self.chunks)
