"""Drives the real scheduler and the real core with random work, and checks after every step that nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from branchline.engine._core import BranchTree
from branchline.engine.config import SchedulingConfig
from branchline.engine.errors import BranchlineError, EngineOverloadedError
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.work import Work
from branchline.engine.types import QoS, Service

PAGE_TOKENS = 4
VOCABULARY = 40
# A work that isn't done after so many steps of the driver is starved.
PATIENCE_STEPS = 20_000


@dataclass(slots=True, eq=False)
class Job:
    """One request of the driver: how many tokens it will generate, and what its strand must hold then."""

    work: Work
    prompt: tuple[int, ...]
    output_tokens: int
    born: int
    given: list[int] = field(default_factory=list)


class Driver:
    """Work arrives, is cancelled and ends at random, `load` times as fast as it can be done."""

    def __init__(
        self, seed: int, config: SchedulingConfig, *, num_pages: int, max_batch: int, max_step_tokens: int, load: float
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.load = load
        self.tree = BranchTree(
            num_pages, page_tokens=PAGE_TOKENS, max_branches=4096, max_batch=max_batch, max_step_tokens=max_step_tokens
        )
        self.scheduler = Scheduler(
            self.tree,
            config,
            self,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            max_waiting=200,
            copy_page=lambda *_: None,
        )
        self.now = 0.0
        self.steps = 0
        self.jobs: dict[Work, Job] = {}
        self.outcomes: Counter[str] = Counter()
        self.first_served: Counter[str] = Counter()
        self._stems = [self._tokens(self.rng.randrange(1, 40)) for _ in range(6)]
        self._trees: list[Strand] = []

    # --- what the scheduler tells -----------------------------------------------------------------------------------

    def admitted(self, work: Work) -> None:
        assert work in self.jobs

    def yielded(self, work: Work, slot: int) -> None:
        assert work.slot is None

    def computed(self, work: Work) -> None:
        job = self.jobs.pop(work)
        assert work.strand.length(self.tree) == len(job.prompt)
        self._end(job, "computed")

    def dropped(self, work: Work, slot: int | None, err: BranchlineError) -> None:
        self._end(self.jobs.pop(work), err.code)

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Arrivals, cancels, a step of the scheduler, ends; then every invariant is checked."""
        rng = self.rng
        self.steps += 1
        capacity = len(self.scheduler.slots.works) + self.scheduler.slots.num_free
        while rng.random() < min(self.load * capacity / 30, 0.9):
            self._arrive()
        for work in list(self.jobs):
            if rng.random() < 0.001:
                self.scheduler.remove(work, self.now)
                self._end(self.jobs.pop(work), "cancelled")
        self._step()
        self.tree.check()
        for job in self.jobs.values():
            assert self.steps - job.born < PATIENCE_STEPS, f"starved: {job.work}"

    def drain(self) -> None:
        """No more arrivals: all that is there must end, and every page must be free or cached."""
        began = self.steps
        while self.jobs:
            self.steps += 1
            self._step()
            assert self.steps - began < PATIENCE_STEPS, "deadlock"
        for strand in self._trees:
            self.scheduler.cache.release(strand)
        self.tree.check()
        assert self.tree.num_branches == 0
        assert self.scheduler.cache.available == self.tree.num_pages
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert all(tenant.works == tenant.running == 0 for tenant in self.scheduler.tenants.all)

    def _step(self) -> None:
        plan = self.scheduler.begin(self.now)
        if plan is None:
            # Nothing may wait while nothing runs, but for pages that idle pinned branches hold: there are none.
            assert self.scheduler.num_waiting == 0
            self.now += 0.01
            return
        self.now += 0.01 + 0.0002 * plan.num_tokens
        works = [self.scheduler.slots.works[slot] for slot in plan.slots.tolist()]
        tokens = np.array([self.rng.randrange(VOCABULARY) for _ in works], np.int32)
        self.scheduler.end(plan, tokens, self.now)
        for work, token in zip(works, tokens.tolist(), strict=True):
            job = self.jobs[work]
            job.given.append(token)
            if len(job.given) >= job.output_tokens:
                self.scheduler.remove(work, self.now, ended=True)
                del self.jobs[work]
                held = work.strand.tokens(self.tree).tolist()
                assert held == [*job.prompt, *job.given], "a preempted branch lost or repeated tokens"
                self._end(job, "ended")

    def _arrive(self) -> None:
        rng = self.rng
        tenant = self.scheduler.tenants.get(rng.choice("aab"))
        strand = self._strand(self.scheduler.tenants.core_number(tenant))
        max_tokens = rng.choice((0, 1, 3, 12, 40, 90))
        prompt = tuple(strand.tokens(self.tree).tolist())
        qos: QoS = rng.choice(("interactive", "standard", "batch"))
        service = Service(priority=rng.randrange(-3, 4), qos=qos, deadline_ms=rng.choice((None, None, None, 3000.0)))
        work = Work(strand=strand, tenant=tenant, submitted=self.now, service=service, max_tokens=max_tokens)
        job = Job(work, prompt, rng.randrange(1, max_tokens + 1) if max_tokens else 0, self.steps)
        try:
            self.scheduler.require_room(1)
            self.scheduler.check_fits(strand, len(strand.pending) + max_tokens)
        except BranchlineError as err:
            if err.code == EngineOverloadedError.code and not err.retry_after_s:
                raise AssertionError("it doesn't say when to try again") from err
            self._end(job, err.code)
        else:
            self.jobs[work] = job
            self.scheduler.add(work, self.now)

    def _strand(self, tenant: int) -> Strand:
        """A fresh prompt, or a branch of an idle one."""
        rng = self.rng
        new = rng.choice(self._stems)[: rng.randrange(1, 40)] + self._tokens(rng.randrange(1, 12))
        idle = [strand for strand in self._trees if strand.tenant == tenant and strand.node is not None]
        if idle and rng.random() < 0.4 and self.tree.num_branches < 3000:
            parent = rng.choice(idle)
            assert parent.node is not None
            pending = np.concatenate((parent.pending, np.array(new[:8], np.int32)))
            held = self.tree.length(parent.node)
            child = Strand(node=self.tree.fork(parent.node), pending=pending, tenant=tenant, computed=held, inherited=held)
            self.scheduler.cache.park(child)
            return child
        return Strand(pending=np.array(new, np.int32), tenant=tenant)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCABULARY) for _ in range(count))

    def _end(self, job: Job, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in ("ended", "computed") and len(self._trees) < 12 and self.rng.random() < 0.3:
            self._trees.append(job.work.strand)
            return
        self.scheduler.cache.release(job.work.strand)
        if self._trees and self.rng.random() < 0.1:
            self.scheduler.cache.release(self._trees.pop(self.rng.randrange(len(self._trees))))
