"""What the scheduler knows of a piece of work: computing a strand's pending tokens and, perhaps, generating after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.types import DEFAULT_SERVICE, Service

Rank = tuple[float, ...]
# A tenant's number, and the bytes of the tokens.
Prefix = tuple[int, bytes]
# Steps of priority that a class of service is worth.
CLASS_STEPS = {"interactive": 10, "standard": 0, "batch": -10}


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """One strand's turn.

    Attributes:
        submitted: monotonic seconds when its command came.
        max_tokens: that it may generate; 0: compute all pending tokens but the last.
        num_generated: so far; while it runs the scheduler counts by slot, and this is as it was when last settled.
        expected_tokens: estimate of what it still computes and generates.
        rank: the policy's order.
        slot: its place in the batch while it runs.
        decoding: its prefill is done; it is a decode row of the core's batch.
        started: when its first step began.
        preemptions: how often it yielded.
        preempted_s: how long it waited after that.
        yielded_at: since when it waits because it yielded.
        ticket: of its place in the queue; 0: it isn't there.
        in_flight: the prefix that it computes, or that it waits for (see `InFlight`).
    """

    strand: Strand
    tenant: Tenant
    submitted: float
    service: Service = DEFAULT_SERVICE
    max_tokens: int = 0
    num_generated: int = 0
    expected_tokens: int = 0
    rank: Rank = field(default=())
    slot: int | None = None
    decoding: bool = False
    started: float | None = None
    preemptions: int = 0
    preempted_s: float = 0.0
    yielded_at: float | None = None
    ticket: int = 0
    in_flight: Prefix | None = None

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds by which it must end."""
        return None if self.service.deadline_ms is None else self.submitted + self.service.deadline_ms / 1000

    @property
    def level(self) -> int:
        """Its priority, with what its class of service is worth."""
        return self.service.priority + CLASS_STEPS[self.service.qos]

    @property
    def prefill_left(self) -> int:
        """Pending tokens still to compute before it decodes or is done."""
        if self.decoding:
            return 0
        keep = 1 if self.max_tokens == 0 else 0
        return max(len(self.strand.pending) - keep, 0)

    @property
    def most_left(self) -> int:
        """Most tokens of K/V that it may still add to its strand's node."""
        if self.max_tokens == 0:
            return self.prefill_left
        # The last token that is generated stays pending: it takes no K/V here.
        return self.prefill_left + self.max_tokens - self.num_generated - (0 if self.decoding else 1)
