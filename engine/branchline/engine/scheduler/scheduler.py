"""Who runs in the next step: admission by memory, first come first served, prefill in chunks under a token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from branchline.engine._core import BranchTree
from branchline.engine.work import Work


class Scheduler:
    """Waiting and running work of one engine.

    A work is admitted when a slot is free and the free pages, less what the running works may still need, hold all the
    tokens that it may add. So a running work never lacks a page, and one that waits is never overtaken.
    """

    def __init__(self, tree: BranchTree, max_batch: int, max_step_tokens: int) -> None:
        self._tree = tree
        self._max_step_tokens = max_step_tokens
        self._free_slots = list(range(max_batch - 1, -1, -1))
        self.waiting: deque[Work] = deque()
        self.running: dict[int, Work] = {}
        self._prefilling: dict[int, Work] = {}

    def add(self, work: Work) -> None:
        """Put a work at the end of the queue."""
        self.waiting.append(work)

    def remove(self, work: Work) -> None:
        """Take a work out, wherever it is; its slot is free again. Does not touch the core's batch."""
        if work.slot is None:
            self.waiting.remove(work)
            return
        del self.running[work.slot]
        self._prefilling.pop(work.slot, None)
        self._free_slots.append(work.slot)
        work.slot = None

    def started_decoding(self, work: Work) -> None:
        """The work's prefill is done and its row has joined the core's batch."""
        assert work.slot is not None
        del self._prefilling[work.slot]
        work.decoding = True

    def pages_wanted(self, work: Work) -> int:
        """Pages that the work may still take."""
        node = work.branch.node
        assert node is not None
        return self._tree.pages_needed(node, work.tokens_left)

    def admit(self) -> list[Work]:
        """Give slots to the works at the head of the queue that fit. Returns them, in order."""
        if not self.waiting or not self._free_slots:
            return []
        spare = self._tree.num_free_pages - sum(self.pages_wanted(work) for work in self.running.values())
        admitted = []
        while self.waiting and self._free_slots:
            wanted = self.pages_wanted(self.waiting[0])
            if wanted > spare:
                break
            work = self.waiting.popleft()
            spare -= wanted
            work.slot = self._free_slots.pop()
            self.running[work.slot] = self._prefilling[work.slot] = work
            admitted.append(work)
        return admitted

    def chunks(self) -> Iterator[tuple[Work, int]]:
        """The works that prefill in the next step, with the number of their pending tokens to compute; oldest first."""
        budget = self._max_step_tokens - (len(self.running) - len(self._prefilling))
        for work in self._prefilling.values():
            count = min(work.prefill_left, budget)
            if count <= 0:
                break
            budget -= count
            yield work, count

    def youngest(self) -> Work:
        """The running work that was submitted last. Raises ValueError if none runs."""
        return max(self.running.values(), key=lambda work: work.submitted)
