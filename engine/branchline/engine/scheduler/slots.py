"""The batch's slots: which work runs where, and what is counted of it step by step, in arrays by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.scheduler.work import Work

Slot = npt.NDArray[np.int32]
# What a token costs its tenant's share: as in Sheng et al. 2024, output tokens twice as much as input tokens.
INPUT_COST = 1.0
OUTPUT_COST = 2.0


class Slots:
    """Running work by slot. What steps count lies in arrays, so that a step costs the same few operations however much runs.

    Attributes:
        works: by slot.
        samples: [max_batch] bool: the slot's row wants a token in the next step.
        left: [max_batch] tokens of K/V for which it was promised pages and that it hasn't added yet; 0 where nothing runs.
    """

    def __init__(self, max_batch: int) -> None:
        self.works: dict[int, Work] = {}
        self.samples = np.zeros(max_batch, np.bool_)
        self.left = np.zeros(max_batch, np.int64)
        self._free = list(range(max_batch - 1, -1, -1))
        self._generated = np.zeros(max_batch, np.int64)
        self._cost = np.zeros(max_batch)
        self._tokens = np.zeros(max_batch, np.int64)
        self._tenants = np.zeros(max_batch, np.int64)

    @property
    def num_free(self) -> int:
        """Slots in which nothing runs."""
        return len(self._free)

    def take(self, work: Work, promised: int) -> None:
        """Give the work a slot, and K/V for `promised` tokens."""
        slot = work.slot = self._free.pop()
        self.works[slot] = work
        self.samples[slot] = False
        self.left[slot] = promised
        self._generated[slot] = work.num_generated
        self._tenants[slot] = work.tenant.number
        work.tenant.running += 1

    def give(self, work: Work, now: float) -> None:
        """Take the work's slot away."""
        slot = work.slot
        assert slot is not None
        self.count(work)
        if self._tokens[slot]:
            work.tenant.charge(float(self._cost[slot]), int(self._tokens[slot]), now)
        self._cost[slot] = 0.0
        self._tokens[slot] = 0
        del self.works[slot]
        self._free.append(slot)
        self.samples[slot] = False
        self.left[slot] = 0
        work.slot = None
        work.tenant.running -= 1

    def count(self, work: Work) -> None:
        """Bring the work's own count up to date."""
        work.num_generated = int(self._generated[work.slot])

    def charge_all(self, tenants: list[Tenant], now: float) -> None:
        """Bring the tenants' counts up to date. `tenants`: all, by number."""
        tokens = np.bincount(self._tenants, weights=self._tokens)
        costs = np.bincount(self._tenants, weights=self._cost)
        for number in np.flatnonzero(tokens).tolist():
            tenants[number].charge(float(costs[number]), int(tokens[number]), now)
        self._cost[:] = 0.0
        self._tokens[:] = 0

    def computed(self, slot: int, num_tokens: int) -> None:
        """A chunk of the slot's prefill was computed."""
        self.left[slot] = max(self.left[slot] - num_tokens, 0)
        self._cost[slot] += INPUT_COST * num_tokens
        self._tokens[slot] += num_tokens

    def sampled(self, slots: Slot, refill: int) -> None:
        """Each of these got a token. One that outgrew its promise is promised `refill` tokens more."""
        self._generated[slots] += 1
        self._cost[slots] += OUTPUT_COST
        self._tokens[slots] += 1
        left = self.left[slots] - 1
        left[left < 0] = refill
        self.left[slots] = left

    def promised_pages(self, page_tokens: int) -> int:
        """Pages that running work was promised and hasn't taken, at most."""
        return int(((self.left + (page_tokens - 1)) // page_tokens).sum())
