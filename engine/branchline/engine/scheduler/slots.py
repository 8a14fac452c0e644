"""The batch's slots: which work runs where, and what is counted of it step by step, in arrays by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.scheduler.work import Work

# What a token costs its tenant's share: as in Sheng et al. 2024, output tokens twice as much as input tokens.
INPUT_COST = 1.0
OUTPUT_COST = 2.0


class Slots:
    """Running work by slot. A step adds to one array, whatever runs; all else is worked out when somebody asks.

    Attributes:
        works: by slot.
        version: changes whenever other work runs.
        samples: [max_batch] bool: the slot's row wants a token in the next step.
    """

    def __init__(self, max_batch: int) -> None:
        self.works: dict[int, Work] = {}
        self.version = 0
        self.samples = np.zeros(max_batch, np.bool_)
        self._free = list(range(max_batch - 1, -1, -1))
        # Of the work in each slot: tokens of K/V that it was promised pages for, tokens prefilled and generated since it has
        # the slot, and what of these its tenant pays and was charged for (not what was lost and is computed again);
        # generated before.
        self._runs = np.zeros(max_batch, np.bool_)
        self._promised = np.zeros(max_batch, np.int64)
        self._prefilled = np.zeros(max_batch, np.int64)
        self._generated = np.zeros(max_batch, np.int64)
        self._paid_prefill = np.zeros(max_batch, np.int64)
        self._prefilled_charged = np.zeros(max_batch, np.int64)
        self._generated_charged = np.zeros(max_batch, np.int64)
        self._generated_before = np.zeros(max_batch, np.int64)
        self._tenants = np.zeros(max_batch, np.int64)

    @property
    def num_free(self) -> int:
        """Slots in which nothing runs."""
        return len(self._free)

    def take(self, work: Work, promised: int) -> None:
        """Give the work a slot, and K/V for `promised` tokens."""
        slot = work.slot = self._free.pop()
        self.works[slot] = work
        self.version += 1
        self.samples[slot] = False
        self._runs[slot] = True
        self._promised[slot] = promised
        self._generated_before[slot] = work.num_generated
        for counts in (
            self._prefilled,
            self._paid_prefill,
            self._generated,
            self._prefilled_charged,
            self._generated_charged,
        ):
            counts[slot] = 0
        self._tenants[slot] = work.tenant.number
        work.tenant.running += 1

    def give(self, work: Work, now: float) -> None:
        """Take the work's slot away."""
        slot = work.slot
        assert slot is not None
        self.count(work)
        prefilled = int(self._paid_prefill[slot] - self._prefilled_charged[slot])
        generated = int(self._generated[slot] - self._generated_charged[slot])
        work.tenant.charge(INPUT_COST * prefilled + OUTPUT_COST * generated, prefilled + generated, now)
        self._prefilled_charged[slot], self._generated_charged[slot] = self._paid_prefill[slot], self._generated[slot]
        del self.works[slot]
        self.version += 1
        self._free.append(slot)
        self.samples[slot] = False
        self._runs[slot] = False
        work.slot = None
        work.tenant.running -= 1

    def count(self, work: Work) -> None:
        """Bring the work's own count up to date."""
        slot = work.slot
        work.num_generated = int(self._generated_before[slot] + self._generated[slot])

    def charge_all(self, tenants: list[Tenant], now: float) -> None:
        """Bring the tenants' counts up to date. `tenants`: all, by number."""
        prefilled = self._paid_prefill - self._prefilled_charged
        generated = self._generated - self._generated_charged
        inputs = np.bincount(self._tenants, weights=prefilled)
        outputs = np.bincount(self._tenants, weights=generated)
        for number in np.flatnonzero(inputs + outputs).tolist():
            tokens_in, tokens_out = float(inputs[number]), float(outputs[number])
            tenants[number].charge(INPUT_COST * tokens_in + OUTPUT_COST * tokens_out, int(tokens_in + tokens_out), now)
        self._prefilled_charged[:] = self._paid_prefill
        self._generated_charged[:] = self._generated

    def prefilled(self, slot: int, num_tokens: int, again: int) -> None:
        """A chunk of the slot's prefill was computed, `again` tokens of it because they had been lost."""
        self._prefilled[slot] += num_tokens
        self._paid_prefill[slot] += num_tokens - again

    def sampled(self, slots: npt.NDArray[np.int32]) -> None:
        """Each of these got a token."""
        self._generated[slots] += 1

    def promised_pages(self, page_tokens: int) -> int:
        """Pages that running work was promised and hasn't taken, at most. One that outgrew its promise has one more."""
        left = self._promised - self._prefilled - self._generated
        np.maximum(left, 1, out=left)
        left += page_tokens - 1
        left //= page_tokens
        return int(left[self._runs].sum())

    def promised_to(self, work: Work, page_tokens: int) -> int:
        """Those of them that are this work's."""
        slot = work.slot
        left = max(int(self._promised[slot] - self._prefilled[slot] - self._generated[slot]), 1)
        return -(-left // page_tokens)
