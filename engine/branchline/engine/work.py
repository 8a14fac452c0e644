"""What occupies a slot of the batch: computing a branch's pending tokens and, perhaps, generating after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchline.engine.branch import Branch
from branchline.engine.model.detokenizer import Detokenizer
from branchline.engine.model.sampler import SlotState
from branchline.engine.scheduler.work import Work as ScheduledWork
from branchline.engine.types import SamplingParams


@dataclass(slots=True, eq=False)
class Generation:
    """The generating part of a work.

    Attributes:
        end_tokens: ids that end it.
        prompt_tokens: the branch's length at the start.
        num_tokens: generated so far.
        sampling: the sampler's state while it has no slot; None before its first.
    """

    request: int
    params: SamplingParams
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    prompt_tokens: int
    num_tokens: int = 0
    first_token_at: float | None = None
    sampling: SlotState | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Work(ScheduledWork):
    """One branch's turn. `generation`: None: compute all pending tokens but the last."""

    branch: Branch = field()
    generation: Generation | None = None
