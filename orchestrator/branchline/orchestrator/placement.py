"""Which replica a new root goes to: the one that is expected to have answered first.

    expected = queue + prefill + decode
    queue    = waiting * output_tokens * decode_token_s        what waits there must be generated first
    prefill  = (tokens - shared tokens) * prefill_token_s      what its prefix cache lacks of the content
    decode   = output_tokens * decode_token_s * (running + 1)  each running row makes every step longer
             + one more `output_tokens * decode_token_s * running` where the free pages don't suffice: some must end first

So a replica that has the prefix wins until the work there would delay the request by more than computing the prefix again
costs: that is what 'overloaded' means here. The decode term takes rows as computed one after the other; a device that batches
better is less busy than it looks, which favours idle replicas. Rates are what the replicas measured lately, on average: they
are replicas of one engine, and by their own rates one that lately worked in larger batches would look faster than it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

import msgspec

from branchline.orchestrator.prefix import NO_PREFIX, Prefix, unpack
from branchline.orchestrator.protocol import LoadReply


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Of the replicas of one engine: see LoadReply."""

    prefill_token_s: float
    decode_token_s: float
    output_tokens: float


ASSUMED: Final = Rates(prefill_token_s=0.001, decode_token_s=0.01, output_tokens=128.0)
"""Until something was measured: of a small model on a CPU."""


def rates_of(loads: Sequence[LoadReply]) -> Rates:
    """The means of what was measured."""
    means = {}
    for name in Rates.__struct_fields__:
        known = [value for load in loads if (value := getattr(load, name)) is not None]
        means[name] = fmean(known) if known else getattr(ASSUMED, name)
    return Rates(**means)


@dataclass(slots=True)
class Candidate:
    """A replica as it said it was, and what was sent there since.

    Attributes:
        rates: of the replicas together.
        held: hashes of the prefixes that it holds or was sent.
        sent: contexts sent since; `sent_tokens`: those of their tokens that it lacked; `sent_hashes`: their prefixes.
    """

    load: LoadReply
    rates: Rates
    held: set[bytes] = field(default_factory=set)
    sent: int = 0
    sent_tokens: int = 0
    sent_hashes: set[bytes] = field(default_factory=set)

    @classmethod
    def of(cls, load: LoadReply, rates: Rates) -> Candidate:
        """A replica to which nothing was sent since it said this."""
        return cls(load, rates, set(unpack(load.prefixes)))

    def expected_s(self, prefix: Prefix = NO_PREFIX) -> float:
        """Seconds until a generation on a new root with this prefix is expected to have ended here."""
        load, rates = self.load, self.rates
        output_s = rates.output_tokens * rates.decode_token_s
        running = load.running + self.sent
        lacking = prefix.num_tokens - prefix.shared_tokens(self.held)
        # What others of the same prefix had computed here since is waited for, not computed again; on average half is done.
        own_sent = min(prefix.shared_tokens(self.sent_hashes), self.sent_tokens)
        prefill_tokens = lacking + self.sent_tokens - own_sent / 2
        expected_s = load.waiting * output_s + prefill_tokens * rates.prefill_token_s + output_s * (running + 1)
        if (lacking + self.sent_tokens + rates.output_tokens) / load.page_tokens > load.pages_free:
            expected_s += output_s * max(running, 1)
        return expected_s

    def send(self, prefix: Prefix = NO_PREFIX) -> None:
        """Count a root that goes here."""
        self.sent += 1
        self.sent_tokens += prefix.num_tokens - prefix.shared_tokens(self.held)
        self.held.update(prefix.hashes)
        self.sent_hashes.update(prefix.hashes)

    def is_full(self) -> bool:
        """Whether a new root would have to wait: for its turn, or for pages."""
        load = self.load
        return load.waiting > 0 or (self.sent_tokens + self.rates.output_tokens) / load.page_tokens > load.pages_free


class Placement:
    """Chooses among replicas by what they said last."""

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}

    def update(self, loads: Iterable[LoadReply]) -> None:
        """Take what all replicas that are up say now."""
        found = list(loads)
        rates = rates_of(found)
        self._candidates = {load.replica: Candidate.of(load, rates) for load in found}

    def candidates(self) -> dict[str, Candidate]:
        """Those that take new roots, by name."""
        return {name: candidate for name, candidate in self._candidates.items() if not candidate.load.draining}

    def is_draining(self, replica: str) -> bool:
        """Whether the replica said that it is about to stop."""
        candidate = self._candidates.get(replica)
        return candidate is not None and candidate.load.draining

    def place(self, prefix: Prefix = NO_PREFIX, among: Collection[str] | None = None) -> str | None:
        """The replica for a new root, which is counted as sent there; None: none is known (of `among`)."""
        found = [(name, c) for name, c in self.candidates().items() if among is None or name in among]
        if not found:
            return None
        name, best = min(
            found, key=lambda item: (item[1].expected_s(prefix), item[1].load.branches, item[1].load.sessions, item[0])
        )
        best.send(prefix)
        return name


def place(loads: Iterable[LoadReply], prefix: Prefix = NO_PREFIX) -> str | None:
    """The replica for one new root; None: all are draining, or there is none."""
    placement = Placement()
    placement.update(loads)
    return placement.place(prefix)
