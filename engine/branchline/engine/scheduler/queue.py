"""Work that waits, in the order that a policy gives it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Set

from branchline.engine.scheduler.policies.base import Policy
from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.scheduler.work import Rank, Work

_Entry = tuple[Rank, int, Work]
# Entries of work that left are cleared away when there are more of them than of work, and more than this.
_FEW = 64


class WaitingQueue:
    """One heap a tenant; the policy's share decides between their heads. Everything is O(log n) or O(tenants that wait)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heaps: dict[Tenant, list[_Entry]] = {}
        self._ticket = 0
        self._stale = 0
        self.by_class: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.by_class.total()

    def __iter__(self) -> Iterator[Work]:
        """All that waits, in no order."""
        return (work for heap in list(self._heaps.values()) for _, ticket, work in list(heap) if work.ticket == ticket)

    def push(self, work: Work) -> None:
        """Put a work in at its rank."""
        self._ticket += 1
        work.ticket = self._ticket
        # Equal ranks: first in, first out.
        heapq.heappush(self._heaps.setdefault(work.tenant, []), (work.rank, work.ticket, work))
        self.by_class[work.service.qos] += 1

    def discard(self, work: Work) -> None:
        """Take a work out, wherever it stands. Its entry stays until it comes to the head."""
        work.ticket = 0
        self.by_class[work.service.qos] -= 1
        self._stale += 1
        if self._stale > max(len(self), _FEW):
            self._clear_away()

    def head(self, passed_over: Set[Tenant]) -> Work | None:
        """The work that goes first, of the tenants that aren't passed over."""
        best: tuple[float, Rank, int] | None = None
        found = None
        share: Callable[[Tenant], float] = self._policy.share
        for tenant in list(self._heaps):
            heap = self._heaps[tenant]
            while heap and heap[0][2].ticket != heap[0][1]:
                heapq.heappop(heap)
                self._stale -= 1
            if not heap:
                del self._heaps[tenant]
            elif tenant not in passed_over:
                rank, ticket, work = heap[0]
                key = (share(tenant), rank, ticket)
                if best is None or key < best:
                    best, found = key, work
        return found

    def _clear_away(self) -> None:
        for tenant, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if entry[2].ticket == entry[1]]
            if kept:
                heapq.heapify(kept)
                self._heaps[tenant] = kept
            else:
                del self._heaps[tenant]
        self._stale = 0
