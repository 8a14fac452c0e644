"""What occupies a slot of the batch: computing a branch's pending tokens and, perhaps, generating after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchline.engine.branch import Branch
from branchline.engine.model.detokenizer import Detokenizer
from branchline.engine.types import DEFAULT_SERVICE, SamplingParams, Service


@dataclass(slots=True, eq=False)
class Generation:
    """The generating part of a work.

    Attributes:
        max_tokens: bound on `tokens`.
        end_tokens: ids that end it.
        prompt_tokens, shared_tokens: the branch's length at the start, and how much of it lies in shared segments.
        tokens: generated so far.
    """

    request: int
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    prompt_tokens: int
    shared_tokens: int
    tokens: list[int] = field(default_factory=list)
    first_token_at: float | None = None


@dataclass(slots=True, eq=False)
class Work:
    """One branch's turn.

    Attributes:
        generation: None: compute all pending tokens but the last.
        submitted: monotonic seconds when its command came.
        service: how soon its command wants to be served.
        started: when its first step began.
        slot: its place in the batch while it runs.
        decoding: its prefill is done; it is a decode row of the core's batch.
    """

    branch: Branch
    generation: Generation | None
    submitted: float
    service: Service = DEFAULT_SERVICE
    started: float | None = None
    slot: int | None = None
    decoding: bool = False

    @property
    def prefill_left(self) -> int:
        """Pending tokens still to compute before it decodes or is done."""
        if self.decoding:
            return 0
        keep = 1 if self.generation is None else 0
        return max(len(self.branch.pending) - keep, 0)

    @property
    def tokens_left(self) -> int:
        """Most K/V tokens that it may still add to its branch."""
        if self.generation is None:
            return self.prefill_left
        # The last token that is generated stays pending: it takes no K/V here.
        return self.prefill_left + self.generation.max_tokens - len(self.generation.tokens) - (0 if self.decoding else 1)
