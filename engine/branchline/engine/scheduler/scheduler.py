"""Iteration-level scheduling of strands: who runs in the next step, with how many tokens, and who yields.

Admission is by memory. A work is admitted when a slot is free, and when the pages that nobody holds, less those that were
promised to what runs, hold what it still computes and what it is expected to generate. What it shares with others costs it
nothing. Where outputs turn out longer than expected and pages run out, the work of the lowest rank yields: its K/V is given up,
or copied away, and it waits at its old place. See `KvCache` for why that loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.engine._core import BranchTree, OutOfBranchesError, OutOfPagesError
from branchline.engine.config import SchedulingConfig
from branchline.engine.errors import (
    BranchlineError,
    EngineOverloadedError,
    PoolExhaustedError,
)
from branchline.engine.scheduler.deadlines import Deadlines
from branchline.engine.scheduler.in_flight import InFlight
from branchline.engine.scheduler.kv_cache import CopyPage, KvCache
from branchline.engine.scheduler.lengths import OutputLengths
from branchline.engine.scheduler.listener import Listener
from branchline.engine.scheduler.policies.find import find_policy
from branchline.engine.scheduler.queue import WaitingQueue
from branchline.engine.scheduler.rate import Rate
from branchline.engine.scheduler.room import Room
from branchline.engine.scheduler.slots import Slots
from branchline.engine.scheduler.step_plan import StepPlan
from branchline.engine.scheduler.step_times import StepTimes
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenant, Tenants
from branchline.engine.scheduler.work import Rank, Work
from branchline.engine.swap import SwapSpace

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class Counters:
    """Totals since the start; written by the engine's thread, read by any."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    dropped: int = 0
    ended: int = 0


class Scheduler:
    """Waiting and running work of one engine, and the core's batch. Belongs to the engine's thread.

    A step is `begin`, the model's forward, `end`.
    """

    def __init__(
        self,
        tree: BranchTree,
        config: SchedulingConfig,
        listener: Listener,
        *,
        max_batch: int,
        max_step_tokens: int,
        max_waiting: int = 1 << 30,
        blocked_timeout_s: float = 10.0,
        copy_page: CopyPage,
        swap: SwapSpace | None = None,
    ) -> None:
        self._tree = tree
        self._config = config
        self._listener = listener
        self._max_step_tokens = max_step_tokens
        self._max_waiting = max_waiting
        self._blocked_timeout_s = blocked_timeout_s
        self._policy = find_policy(config)
        self.tenants = Tenants(config)
        self.cache = KvCache(tree, keep=config.prefix_cache, copy_page=copy_page, swap=swap)
        self.lengths = OutputLengths()
        self.times = StepTimes()
        self.counters = Counters()
        self.queue = WaitingQueue(self._policy)
        self.slots = Slots(max_batch)
        self._room = Room(tree, config, self._policy, self.tenants, self.cache, self.slots, self.lengths)
        self._prefilling: dict[Work, None] = {}
        self._in_flight = InFlight(tree, self.cache, self.queue, enabled=config.prefix_cache)
        self._deadlines = Deadlines(self.slots, self.lengths, self.times)
        self._blocked_since: float | None = None
        self._over_limit_since: dict[Tenant, float] = {}
        self._began = 0.0
        self._ends = Rate()

    @property
    def num_waiting(self) -> int:
        """Works that have no slot."""
        return len(self.queue) + len(self._in_flight)

    @property
    def num_running(self) -> int:
        """Works that have one."""
        return len(self.slots.works)

    # --- work comes and goes ----------------------------------------------------------------------------------------

    def require_room(self, more: int) -> None:
        """Raises EngineOverloadedError if so many works more would be too many to wait. Any thread."""
        waiting = self.num_waiting
        if waiting + more > self._max_waiting:
            rate = self._ends.per_second(self._began)
            raise EngineOverloadedError(
                f"{waiting} requests wait already and {more} more came: at most {self._max_waiting} may; retry later",
                retry_after_s=min(max((waiting + more - self._max_waiting) / rate, 1.0), 60.0) if rate > 0 else 1.0,
            )

    def check_fits(self, strand: Strand, num_tokens: int) -> None:
        """See `Room.check_fits`."""
        self._room.check_fits(strand, num_tokens)

    def add(self, work: Work, now: float) -> None:
        """Let a work wait for its turn. Raises TenantLimitError when its tenant's tokens of this minute are used up."""
        work.tenant.check_rate(now)
        if work.tenant.works == 0:
            self.slots.charge_all(self.tenants.all, now)
        self.tenants.work_came(work.tenant)
        self._deadlines.add(work)
        self._enqueue(work)

    def remove(self, work: Work, now: float, *, ended: bool = False) -> None:
        """Take a work out, whatever it is doing. Its strand keeps what is computed and generated.

        Args:
            ended: its output ended by itself: its length is learnt from.
        """
        self._forget(work)
        if work.slot is None:
            self._unqueue(work)
            return
        self._vacate(work, now)
        self.cache.park(work.strand)
        self.counters.ended += 1
        if ended:
            self.lengths.observe(work.num_generated)
        self._ends.count(now)

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> StepPlan | None:
        """Decide what runs, and plan the step. None: nothing runs."""
        self._began = now
        for work, missed in self._deadlines.missed(now):
            self._drop(work, missed, now)
        while True:
            if self.num_waiting:
                self._admit(now)
            if not self.slots.works:
                return None
            chunks = self._chunks()
            for work, count in chunks:
                assert work.strand.node is not None
                assert work.slot is not None
                self._tree.prefill(work.strand.node, work.slot, work.strand.pending[:count])
                self.slots.samples[work.slot] = work.max_tokens > 0 and count == work.prefill_left
            num_tokens = self._plan(chunks, now)
            if num_tokens is not None:
                return self._planned(num_tokens, chunks)

    def end(self, plan: StepPlan, tokens: Int32Array, now: float) -> None:
        """The step is computed.

        Args:
            tokens: [N] what was sampled for `plan.slots`.
        """
        tree = self._tree
        tree.next_tokens[plan.slots] = tokens
        tree.commit()
        if len(plan.slots):
            self.slots.sampled(plan.slots)
        prefilled = 0
        for work, count in plan.chunks:
            prefilled += count
            self._chunk_computed(work, count, now)
        self.times.observe(len(plan.slots), prefilled, now - self._began)

    def abort(self, plan: StepPlan) -> None:
        """The step failed: nothing of it stays. Its works run on; the caller removes those that are lost."""
        self._tree.rollback()

    def seconds_to_compute(self, num_tokens: int) -> float:
        """Of prefilling so many tokens, from what steps took so far."""
        return num_tokens * self.times.prefill_token_s

    # --- inside -----------------------------------------------------------------------------------------------------

    def _planned(self, num_tokens: int, chunks: list[tuple[Work, int]]) -> StepPlan:
        tree = self._tree
        row_slots = tree.row_slots[: tree.num_rows]
        rows = np.flatnonzero(self.slots.samples[row_slots])
        logit_tokens = tree.row_indptr[1:][rows] - 1
        return StepPlan(num_tokens, row_slots[rows], logit_tokens, tree.positions[logit_tokens] + 1, chunks)

    def _plan(self, chunks: list[tuple[Work, int]], now: float) -> int | None:
        """Have the core plan; who is in the way yields. None: nothing is left to plan. Takes those from `chunks`."""
        while True:
            try:
                return self._tree.plan()
            except OutOfPagesError as err:
                if self.cache.reclaim(self.cache.available + 1):
                    continue
                victim = self._room.last_in_rank()
                queued = [i for i, (work, _) in enumerate(chunks) if work is victim]
                for i in queued:
                    assert victim.strand.node is not None
                    self._tree.leave(victim.strand.node)
                    del chunks[i]
                if len(self.slots.works) == 1:
                    self._drop(victim, self._exhausted(f"no page is free for the next token ({err})"), now)
                    return None
                self._yield(victim, now)

    def _admit(self, now: float) -> None:
        self.slots.charge_all(self.tenants.all, now)
        passed_over: set[Tenant] = set()
        while True:
            work = self.queue.head(passed_over)
            if work is None:
                break
            if self._in_flight.hold(work):
                continue
            if self._room.is_over_limit(work):
                passed_over.add(work.tenant)
                if self._is_stuck(work.tenant, now):
                    self._drop(work, self._room.over_limit(work), now)
                continue
            self._over_limit_since.pop(work.tenant, None)
            victims = self._room.find(work)
            if victims is None:
                break
            for victim in victims:
                self._yield(victim, now)
            self.queue.discard(work)
            self._start(work, now)
        self._refuse_if_blocked(now)

    def _is_stuck(self, tenant: Tenant, now: float) -> bool:
        """Whether a tenant has been at its limit for long although nothing of it runs: its pinned branches hold the pages."""
        if tenant.running:
            self._over_limit_since.pop(tenant, None)
            return False
        return now - self._over_limit_since.setdefault(tenant, now) >= self._blocked_timeout_s

    def _refuse_if_blocked(self, now: float) -> None:
        """Nothing runs that could free pages, and what waits doesn't fit: wait a while for a release."""
        head = None if self.slots.works else self.queue.head(set())
        if head is None:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif now - self._blocked_since >= self._blocked_timeout_s:
            self._blocked_since = None
            self._drop(head, self._exhausted(f"{self._room.pages_wanted(head)} pages are needed"), now)

    def _exhausted(self, what: str) -> PoolExhaustedError:
        return PoolExhaustedError(
            f"{what}, {self.cache.available} of {self._tree.num_pages} can be had and pinned branches hold the rest: "
            "unpin or release some, ask for fewer tokens, or give the engine a larger pool"
        )

    def _start(self, work: Work, now: float) -> None:
        strand = work.strand
        self.cache.unpark(strand)
        try:
            self.cache.bring_back(strand)
        except OutOfBranchesError as err:
            self._forget(work)
            self.counters.dropped += 1
            self._listener.dropped(work, None, EngineOverloadedError(f"no branch is free ({err}): release some"))
            return
        self.slots.take(work, self._room.tokens_promised(work))
        work.started = now if work.started is None else work.started
        if work.yielded_at is not None:
            work.preempted_s += now - work.yielded_at
            work.yielded_at = None
        self._listener.admitted(work)
        if work.max_tokens and len(strand.pending) == 1:
            self._start_decoding(work, int(strand.pending[0]))
        elif work.prefill_left:
            self._prefilling[work] = None
            self._in_flight.began(work)
        else:
            self._computed(work, now)

    def _start_decoding(self, work: Work, next_token: int) -> None:
        assert work.strand.node is not None
        assert work.slot is not None
        self._tree.join(work.strand.node, work.slot, next_token)
        work.strand.pending = work.strand.pending[:0]
        work.decoding = True
        self.slots.samples[work.slot] = True

    def _chunks(self) -> list[tuple[Work, int]]:
        """What prefills in the next step: who goes first takes as much of the budget as it can."""
        if not self._prefilling:
            return []
        decoding = len(self.slots.works) - len(self._prefilling)
        budget = self._max_step_tokens - decoding
        if self._config.itl_target_ms is not None and decoding:
            within = self.times.prefill_within(self._config.itl_target_ms / 1000, decoding)
            # At least a page, so that no prefill stands still.
            budget = budget if within is None else min(budget, max(within, self._tree.page_tokens))
        chunks = []
        for work in sorted(self._prefilling, key=self._prefill_rank):
            count = min(work.prefill_left, budget)
            if count <= 0:
                break
            budget -= count
            chunks.append((work, count))
        return chunks

    def _prefill_rank(self, work: Work) -> tuple[float, Rank]:
        """Its own, or that of the first of those who wait for what it computes."""
        share = self._policy.share
        return min((share(each.tenant), each.rank) for each in (work, *self._in_flight.led_by(work)))

    def _chunk_computed(self, work: Work, count: int, now: float) -> None:
        strand, slot = work.strand, work.slot
        assert slot is not None
        length = strand.held(self._tree)
        again = max(min(strand.computed, length) - (length - count), 0)
        self.counters.recomputed_tokens += again
        strand.computed = max(strand.computed, length)
        strand.pending = strand.pending[count:]
        self.slots.prefilled(slot, count, again)
        if work.prefill_left:
            self._in_flight.went_on(work)
            return
        del self._prefilling[work]
        self.cache.insert(strand)
        self._in_flight.ended(work)
        if work.max_tokens:
            self._start_decoding(work, int(self._tree.next_tokens[slot]))
        else:
            self._computed(work, now)

    def _computed(self, work: Work, now: float) -> None:
        self.remove(work, now)
        self._listener.computed(work)

    def _vacate(self, work: Work, now: float) -> None:
        """Take a running work off its slot."""
        assert work.slot is not None
        if work.decoding:
            assert work.strand.node is not None
            work.strand.pending = self._tree.next_tokens[work.slot : work.slot + 1].copy()
            self._tree.leave(work.strand.node)
            work.strand.computed = max(work.strand.computed, work.strand.held(self._tree))
            work.decoding = False
        self._prefilling.pop(work, None)
        self._in_flight.ended(work)
        self.slots.give(work, now)

    def _yield(self, work: Work, now: float) -> None:
        """A running work gives its slot and its pages up, and waits at its rank."""
        slot = work.slot
        assert slot is not None
        self._vacate(work, now)
        if not work.strand.pinned and not self.cache.copy_away(work.strand, self.seconds_to_compute):
            self.cache.give_up(work.strand)
        work.preemptions += 1
        work.yielded_at = now
        self.counters.preemptions += 1
        self._listener.yielded(work, slot)
        self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        found, _ = self.cache.peek(work.strand)
        work.expected_tokens = len(work.strand.pending) - found + self._room.expected_output(work)
        work.rank = self._policy.order(work)
        self.cache.park(work.strand)
        self.queue.push(work)

    def _unqueue(self, work: Work) -> None:
        if work.ticket:
            self.queue.discard(work)
            return
        self._in_flight.remove(work)

    def _forget(self, work: Work) -> None:
        self._deadlines.discard(work)
        self.tenants.work_went(work.tenant)

    def _drop(self, work: Work, err: BranchlineError, now: float) -> None:
        """A work can't be done: it is taken out."""
        slot = work.slot
        self.counters.dropped += 1
        self.remove(work, now)
        self._listener.dropped(work, slot, err)
