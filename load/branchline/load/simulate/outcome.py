"""What became of each request."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchline.load.simulate.trace import Floats, Ints, Trace


class Fate(enum.IntEnum):
    """How a request ended."""

    OPEN = 0  # it hasn't
    COMPLETED = 1
    REFUSED = 2  # the queue was full, a limit was reached, or it can never fit
    DROPPED = 3  # its deadline couldn't be met any more, or no page could be had
    CANCELLED = 4  # its client took it back


@dataclass(slots=True, kw_only=True, eq=False)
class Outcome:
    """A simulation's results; arrays are [N], by request; times are virtual seconds, NaN where there is none.

    Attributes:
        fate: `Fate` values.
        arrived_s: when it could start: at its arrival, or when its parent had ended.
        started_s, first_s, last_s, ended_s: when its first step began; its first and its latest token came; it ended.
        generated: tokens.
        gaps_s: [tokens - first tokens] time between a request's tokens, in which it may have been preempted.
        prompt_tokens: of all that were admitted, without what branches inherit.
        cached_tokens: of these, found in the prefix cache.
        computed_tokens: prefill tokens that steps computed.
        recomputed_tokens: of these, computed before and given up.
        fairness_gap: see `FairnessGap`.
        service: [tenants] see there.
        lost_pages: that nobody holds and that aren't free, when all is released.
    """

    trace: Trace
    fate: npt.NDArray[np.int8]
    arrived_s: Floats
    started_s: Floats
    first_s: Floats
    last_s: Floats
    ended_s: Floats
    generated: Ints
    gaps_s: list[npt.NDArray[np.float32]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    duration_s: float = 0.0
    fairness_gap: float = 0.0
    service: Floats = field(default_factory=lambda: np.empty(0))
    lost_pages: int = 0

    @classmethod
    def empty(cls, trace: Trace) -> Outcome:
        """Nothing has happened yet."""
        count = len(trace)
        arrived, started, first, last, ended = (np.full(count, np.nan) for _ in range(5))
        return cls(
            trace=trace,
            fate=np.zeros(count, np.int8),
            arrived_s=arrived,
            started_s=started,
            first_s=first,
            last_s=last,
            ended_s=ended,
            generated=np.zeros(count, np.int64),
        )

    def count(self, fate: Fate) -> int:
        """Requests with that fate."""
        return int(np.count_nonzero(self.fate == fate))

    def ttft_s(self, chosen: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Seconds to the first token, of the `chosen` requests that got one."""
        times = self.first_s - self.arrived_s
        return times[~np.isnan(times) & (True if chosen is None else chosen)]

    def goodput(self, begin_s: float, end_s: float) -> float:
        """Generated tokens a second of requests that were completed in that time."""
        within = (self.fate == Fate.COMPLETED) & (self.ended_s > begin_s) & (self.ended_s <= end_s)
        return float(self.generated[within].sum()) / (end_s - begin_s)

    def longest_wait_s(self) -> float:
        """From when it could start until its first step, of all that got one."""
        waits = self.started_s - self.arrived_s
        return 0.0 if np.isnan(waits).all() else float(np.nanmax(waits))

    def digest(self) -> str:
        """Equal for equal schedules: of every request's fate, tokens and times, to the last bit."""
        parts = (self.fate, self.generated, self.started_s, self.first_s, self.last_s, self.ended_s)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
