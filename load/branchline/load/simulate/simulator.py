"""The engine's own scheduler and core on a virtual clock, with a model whose steps take a given time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from branchline.engine._core import BranchTree, OutOfBranchesError
from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.errors import BranchlineError
from branchline.engine.scheduler.listener import Listener
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.slots import INPUT_COST, OUTPUT_COST
from branchline.engine.scheduler.step_plan import StepPlan
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.work import Work
from branchline.load.simulate.fairness import FairnessGap
from branchline.load.simulate.outcome import Fate, Outcome
from branchline.load.simulate.step_time import StepTime, kv_tokens_read
from branchline.load.simulate.trace import NO_PARENT, Trace

# Virtual seconds until the scheduler is asked again when nothing can run.
_BLOCKED_CHECK_S = 0.05
# If nothing could run for so long nothing ever will: the scheduler itself gives up far sooner.
_STALLED_S = 3600.0


class StalledError(RuntimeError):
    """Work waits and nothing ever runs: a deadlock of the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """The engine's sizes (defaults: the product's, see EngineConfig) and how fast its steps are."""

    num_pages: int = 2048
    page_tokens: int = 16
    max_batch: int = 512
    max_step_tokens: int = 1024
    max_waiting: int = 4096
    max_branches: int = 65536
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    step_time: StepTime = field(default_factory=StepTime)


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedWork(Work):
    """`request`: its index in the trace."""

    request: int


class Simulator(Listener):
    """One run of a trace. `run` does it all; or call `step` until it returns False.

    What a client does is as in the engine: a request's strand is new, or forked off its parent's; it is released when the
    request ends, a context's when all that were forked from it have ended.

    Attributes:
        now: virtual seconds.
    """

    def __init__(self, trace: Trace, engine: SimulatedEngine) -> None:
        self.trace = trace
        self.now = 0.0
        self.outcome = Outcome.empty(trace)
        self.tree = BranchTree(
            engine.num_pages,
            page_tokens=engine.page_tokens,
            max_branches=engine.max_branches,
            max_batch=engine.max_batch,
            max_step_tokens=engine.max_step_tokens,
        )
        self.scheduler = Scheduler(
            self.tree,
            engine.scheduling,
            self,
            max_batch=engine.max_batch,
            max_step_tokens=engine.max_step_tokens,
            max_waiting=engine.max_waiting,
            copy_page=lambda source, destination, num_tokens: None,  # there is no K/V
        )
        self._step_time = engine.step_time
        self._tenants = [self.scheduler.tenants.get(name) for name in trace.tenants]
        settings: dict[str, TenantConfig] = engine.scheduling.tenants
        default = engine.scheduling.default_tenant
        self._fairness = FairnessGap([settings.get(name, default).weight for name in trace.tenants])
        self._request_of = np.zeros(engine.max_batch, np.int64)  # by slot
        self._works: dict[int, SimulatedWork] = {}
        self._next, self._last = 0, len(trace)
        self._cancels: list[tuple[float, int]] = []
        self._strands: dict[int, Strand] = {}
        self._orphans: dict[int, list[int]] = {}  # requests that wait for their parent, by it
        self._children_left = np.bincount(trace.parent[trace.parent >= 0], minlength=len(trace)).tolist()
        self._computed: list[int] = []
        self._blocked_s = 0.0

    def run(self) -> Outcome:
        """Simulate until every request has ended. Raises StalledError."""
        while self.step():
            pass
        return self.finish()

    def step(self) -> bool:
        """One step, or the wait for an arrival. False: everything has ended. Raises StalledError."""
        self._arrivals()
        plan = self.scheduler.begin(self.now)
        if plan is not None:
            self._blocked_s = 0.0
            self._run(plan)
            return True
        if self._computed:  # works that found everything in the cache
            return True
        return self._wait()

    def stop_arrivals(self) -> None:
        """Nothing arrives any more: `step` goes on until what came has ended."""
        self._last = self._next

    def finish(self) -> Outcome:
        """Count what is left, and give back all that the simulation still holds."""
        outcome, scheduler = self.outcome, self.scheduler
        outcome.duration_s = self.now
        outcome.cached_tokens = scheduler.cache.cached_tokens
        outcome.recomputed_tokens = scheduler.counters.recomputed_tokens
        outcome.preemptions = scheduler.counters.preemptions
        outcome.fairness_gap = self._fairness.largest
        outcome.service = self._fairness.service
        if not self._works:
            for strand in self._strands.values():
                scheduler.cache.release(strand)
            self._strands.clear()
            self.tree.check()
            self.tree.evict(self.tree.num_pages)
            outcome.lost_pages = self.tree.num_pages - self.tree.num_free_pages
        return outcome

    # --- what the scheduler tells -----------------------------------------------------------------------------------

    def admitted(self, work: Work) -> None:
        assert isinstance(work, SimulatedWork)
        assert work.slot is not None
        self._request_of[work.slot] = work.request

    def yielded(self, work: Work, slot: int) -> None:
        pass

    def computed(self, work: Work) -> None:
        assert isinstance(work, SimulatedWork)
        self._computed.append(work.request)

    def dropped(self, work: Work, slot: int | None, err: BranchlineError) -> None:
        assert isinstance(work, SimulatedWork)
        self._end(work.request, Fate.DROPPED)

    # --- requests come and go ---------------------------------------------------------------------------------------

    def _arrivals(self) -> None:
        while self._computed:
            self._end(self._computed.pop(), Fate.COMPLETED)
        trace = self.trace
        while self._next < self._last and trace.arrival_s[self._next] <= self.now:
            request, self._next = self._next, self._next + 1
            if trace.cancel_s[request] != np.inf:
                heapq.heappush(self._cancels, (float(trace.arrival_s[request] + trace.cancel_s[request]), request))
            parent = int(trace.parent[request])
            if parent == NO_PARENT or self.outcome.fate[parent] != Fate.OPEN:
                self._start(request, float(trace.arrival_s[request]))
            else:
                self._orphans.setdefault(parent, []).append(request)
        while self._cancels and self._cancels[0][0] <= self.now:
            _, request = heapq.heappop(self._cancels)
            if self.outcome.fate[request] == Fate.OPEN:
                work = self._works.get(request)
                if work is not None:
                    self.scheduler.remove(work, self.now)
                self._end(request, Fate.CANCELLED)

    def _start(self, request: int, arrived: float) -> None:
        trace, scheduler = self.trace, self.scheduler
        if self.outcome.fate[request] != Fate.OPEN:  # cancelled while it waited for its parent
            return
        self.outcome.arrived_s[request] = arrived
        max_tokens = int(trace.max_tokens[request])
        tenant = self._tenants[trace.tenant[request]]
        try:
            scheduler.require_room(1)
            strand = self._strand(request)
            self._strands[request] = strand
            scheduler.check_fits(strand, len(strand.pending) + max(max_tokens - 1, 0))
            work = SimulatedWork(
                strand=strand,
                tenant=tenant,
                submitted=arrived,
                service=trace.services[trace.service[request]],
                max_tokens=max_tokens,
                request=request,
            )
            scheduler.add(work, self.now)
        except (BranchlineError, OutOfBranchesError):
            self._end(request, Fate.REFUSED)
            return
        self._works[request] = work
        self.outcome.prompt_tokens += int(trace.prompt_tokens[request])

    def _strand(self, request: int) -> Strand:
        trace, tokens = self.trace, self.trace.prompt(request)
        parent = int(trace.parent[request])
        if parent == NO_PARENT:
            return Strand(pending=tokens, tenant=self.scheduler.tenants.core_number(self._tenants[trace.tenant[request]]))
        origin = self._strands.get(parent)
        if origin is None:
            raise BranchlineError(f"request {parent}, of which {request} would be forked, came to nothing")
        pending = np.concatenate((origin.pending, tokens))
        if origin.node is None:
            return Strand(pending=pending, tenant=origin.tenant, computed=origin.computed)
        held = self.tree.length(origin.node)
        node = self.tree.fork(origin.node)
        return Strand(node=node, pending=pending, tenant=origin.tenant, computed=held, inherited=held)

    def _end(self, request: int, fate: Fate) -> None:
        """Takes the request's strand back, unless others are to be forked from it."""
        work = self._works.pop(request, None)
        if work is not None and work.started is not None:
            self.outcome.started_s[request] = work.started
        self.outcome.fate[request] = fate
        self.outcome.ended_s[request] = self.now
        if fate != Fate.COMPLETED or not self._children_left[request]:
            self._release(request)
        parent = int(self.trace.parent[request])
        if parent != NO_PARENT:
            self._children_left[parent] -= 1
            if not self._children_left[parent] and self.outcome.fate[parent] != Fate.OPEN:
                self._release(parent)
        for child in self._orphans.pop(request, ()):
            self._start(child, self.now)

    def _release(self, request: int) -> None:
        strand = self._strands.pop(request, None)
        if strand is not None:
            self.scheduler.cache.release(strand)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        trace, outcome, count = self.trace, self.outcome, len(self._tenants)
        requests = self._request_of[plan.slots]
        decode_rows = plan.num_tokens - plan.prefill_tokens
        self.now += self._step_time.seconds(decode_rows, plan.prefill_tokens, kv_tokens_read(self.tree))
        self.scheduler.end(plan, trace.outputs(requests, plan.positions), self.now)
        outcome.steps += 1
        outcome.computed_tokens += plan.prefill_tokens
        generated = outcome.generated[requests] + 1
        outcome.generated[requests] = generated
        is_first = generated == 1
        outcome.first_s[requests[is_first]] = self.now
        outcome.gaps_s.append((self.now - outcome.last_s[requests[~is_first]]).astype(np.float32))
        outcome.last_s[requests] = self.now
        cost = np.bincount(trace.tenant[requests], minlength=count).astype(np.float64) * OUTPUT_COST
        for work, tokens in plan.chunks:
            assert isinstance(work, SimulatedWork)
            cost[trace.tenant[work.request]] += INPUT_COST * tokens
        self._fairness.serve(cost)
        if count > 1:
            self._fairness.observe(np.array([tenant.works > tenant.running for tenant in self._tenants]))
        for request in requests[generated == trace.output_tokens[requests]].tolist():
            self.scheduler.remove(self._works[request], self.now, ended=True)
            self._end(request, Fate.COMPLETED)

    def _wait(self) -> bool:
        """Nothing runs: go on to what happens next."""
        trace = self.trace
        times = [float(trace.arrival_s[self._next])] if self._next < self._last else []
        if self._cancels:
            times.append(self._cancels[0][0])
        if self.scheduler.num_waiting:
            times.append(self.now + _BLOCKED_CHECK_S)
        if not times:
            return False
        soonest = max(min(times), self.now)
        if self.scheduler.num_waiting:
            self._blocked_s += soonest - self.now
            if self._blocked_s > _STALLED_S:
                raise StalledError(f"{self.scheduler.num_waiting} works wait, and nothing ran for {self._blocked_s:.0f} s")
        self.now = soonest
        return True
