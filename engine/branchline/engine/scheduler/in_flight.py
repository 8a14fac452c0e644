"""Prefixes that somebody computes now: others who lack the same page wait for it instead of computing it too."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchline.engine._core import BranchTree
from branchline.engine.scheduler.kv_cache import KvCache
from branchline.engine.scheduler.queue import WaitingQueue
from branchline.engine.scheduler.work import Prefix, Work


@dataclass(slots=True)
class _Awaited:
    leader: Work
    held: list[Work] = field(default_factory=list)


class InFlight:
    """Works that wait because a running one, their leader, computes the first page that they lack. They keep their ranks, and
    look again after the leader's next chunk: who shares only the beginning of a long prompt waits for that alone."""

    def __init__(self, tree: BranchTree, cache: KvCache, queue: WaitingQueue, *, enabled: bool) -> None:
        self._tree = tree
        self._cache = cache
        self._queue = queue
        self._enabled = enabled
        self._awaited: dict[Prefix, _Awaited] = {}
        self._num_held = 0

    def __len__(self) -> int:
        """Works that are held."""
        return self._num_held

    def hold(self, work: Work) -> bool:
        """Take a work from the queue if another computes what it would compute first. Returns whether it did."""
        strand, page_tokens = work.strand, self._tree.page_tokens
        if strand.node is not None or not self._enabled or not self._awaited:
            return False
        found, _ = self._cache.peek(strand)
        end = (found // page_tokens + 1) * page_tokens
        if end >= len(strand.pending):
            return False
        prefix = strand.tenant, strand.pending[:end].tobytes()
        awaited = self._awaited.get(prefix)
        if awaited is None:
            return False
        self._queue.discard(work)
        work.in_flight = prefix
        awaited.held.append(work)
        self._num_held += 1
        return True

    def began(self, work: Work) -> None:
        """A running work computes what follows on the tokens that its strand holds."""
        if not self._enabled:
            return
        strand, page_tokens = work.strand, self._tree.page_tokens
        end = (strand.held(self._tree) // page_tokens + 1) * page_tokens
        tokens = strand.tokens(self._tree)
        prefix = strand.tenant, tokens[:end].tobytes()
        # One that computes the same already began when it couldn't be seen.
        if end < len(tokens) and prefix not in self._awaited:
            self._awaited[prefix] = _Awaited(work)
            work.in_flight = prefix

    def went_on(self, work: Work) -> None:
        """A chunk of a running work's prefill was computed. If others wait for it they are given what there is."""
        if work.in_flight is not None and self._awaited[work.in_flight].held:
            self._cache.insert(work.strand)
            self.ended(work)
            self.began(work)

    def ended(self, work: Work) -> None:
        """A running work prefills no more: those that waited for it go back to the queue."""
        if work.in_flight is None:
            return
        held = self._awaited.pop(work.in_flight).held
        work.in_flight = None
        self._num_held -= len(held)
        for other in held:
            other.in_flight = None
            self._queue.push(other)

    def remove(self, work: Work) -> None:
        """A held work is given up."""
        assert work.in_flight is not None
        self._awaited[work.in_flight].held.remove(work)
        work.in_flight = None
        self._num_held -= 1

    def led_by(self, work: Work) -> list[Work]:
        """The works that wait for a running one."""
        return [] if work.in_flight is None else self._awaited[work.in_flight].held
