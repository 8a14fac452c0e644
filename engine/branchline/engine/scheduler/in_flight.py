"""Prefixes that somebody computes now: others who lack the same wait for it instead of computing it too."""

from __future__ import annotations

from branchline.engine.scheduler.kv_cache import KvCache
from branchline.engine.scheduler.queue import WaitingQueue
from branchline.engine.scheduler.work import Work


class InFlight:
    """Works that wait because a running one computes the first page that they lack. They keep their ranks."""

    def __init__(self, cache: KvCache, queue: WaitingQueue, page_tokens: int, *, enabled: bool) -> None:
        self._cache = cache
        self._queue = queue
        self._page_tokens = page_tokens
        self._enabled = enabled
        self._held: dict[tuple[int, int, bytes], list[Work]] = {}
        self._num_held = 0

    def __len__(self) -> int:
        """Works that are held."""
        return self._num_held

    def hold(self, work: Work) -> bool:
        """Take a work from the queue if another computes what it would compute first. Returns whether it did."""
        strand, page_tokens = work.strand, self._page_tokens
        work.in_flight = None
        if strand.node is not None or not self._enabled or len(strand.pending) <= page_tokens:
            return False
        found, _ = self._cache.peek(strand)
        if found + page_tokens >= len(strand.pending):
            return False
        work.in_flight = strand.tenant, found, strand.pending[found : found + page_tokens].tobytes()
        held = self._held.get(work.in_flight)
        if held is None:
            return False
        self._queue.discard(work)
        held.append(work)
        self._num_held += 1
        return True

    def began(self, work: Work) -> None:
        """A work that wasn't held prefills now."""
        if work.in_flight is not None:
            self._held.setdefault(work.in_flight, [])

    def ended(self, work: Work) -> None:
        """A work doesn't prefill any more: those that waited for it go back to the queue."""
        if work.in_flight is None:
            return
        held = self._held.pop(work.in_flight, [])
        work.in_flight = None
        self._num_held -= len(held)
        for other in held:
            self._queue.push(other)

    def remove(self, work: Work) -> None:
        """A held work is given up."""
        assert work.in_flight is not None
        self._held[work.in_flight].remove(work)
        self._num_held -= 1
