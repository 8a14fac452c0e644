"""The scheduler on the real core: bounds that hold while work waits."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from branchline.engine._core import BranchTree
from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.errors import BranchlineError
from branchline.engine.scheduler.rate import Rate
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.work import Work
from branchline.engine.types import Service

PAGE_TOKENS = 4


class Bench:
    """A scheduler over a tree, with works that generate all that they may."""

    def __init__(self, config: SchedulingConfig, *, max_batch: int, max_step_tokens: int, num_pages: int = 4000) -> None:
        self.tree = BranchTree(num_pages, page_tokens=PAGE_TOKENS, max_batch=max_batch, max_step_tokens=max_step_tokens)
        self.scheduler = Scheduler(
            self.tree, config, self, max_batch=max_batch, max_step_tokens=max_step_tokens, copy_page=lambda *_: None
        )
        self.steps = 0
        self.started: dict[Work, int] = {}
        self.ended: list[Work] = []

    def admitted(self, work: Work) -> None:
        self.started.setdefault(work, self.steps)

    def yielded(self, work: Work, slot: int) -> None: ...
    def computed(self, work: Work) -> None:
        self.ended.append(work)

    def dropped(self, work: Work, slot: int | None, err: BranchlineError) -> None:
        raise AssertionError(err)

    def add(self, tokens: list[int], tenant: str = "", *, max_tokens: int = 1, priority: int = 0) -> Work:
        who = self.scheduler.tenants.get(tenant)
        strand = Strand(pending=np.array(tokens, np.int32), tenant=self.scheduler.tenants.core_number(who))
        work = Work(strand=strand, tenant=who, submitted=self.now, max_tokens=max_tokens, service=Service(priority=priority))
        self.scheduler.add(work, self.now)
        return work

    @property
    def now(self) -> float:
        return self.steps * 0.01

    def step(self) -> None:
        self.steps += 1
        plan = self.scheduler.begin(self.now)
        if plan is None:
            return
        works = [self.scheduler.slots.works[slot] for slot in plan.slots.tolist()]
        self.scheduler.end(plan, np.zeros(len(works), np.int32), self.now + 0.009)
        for work in works:
            self.scheduler.slots.count(work)
            if work.num_generated >= work.max_tokens:
                self.scheduler.remove(work, self.now, ended=True)
                self.scheduler.cache.release(work.strand)
                self.ended.append(work)
        self.tree.check()


@pytest.mark.parametrize("preemption", [True, False])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_backlogged_tenants_are_served_alike_for_their_weight(preemption: bool, weight: float) -> None:
    """The bound of Sheng et al. 2024: counters of tenants that always have work differ by at most twice the larger of a
    prompt's cost and of all that a batch can generate."""
    longest_prompt, longest_output, max_batch = 60, 40, 8
    config = SchedulingConfig(policy="fair", preemption=preemption, tenants={"b": TenantConfig(weight=weight)})
    bench = Bench(config, max_batch=max_batch, max_step_tokens=80)
    rng = random.Random(4)
    tenants = [bench.scheduler.tenants.get(name) for name in "ab"]
    bound = 2 * max(longest_prompt, 2 * max_batch * longest_output)
    for step in range(1500):
        for tenant in tenants:
            while tenant.works < 20:
                # The one has few long requests, the other many short ones.
                long = tenant.name == "a"
                prompt = [rng.randrange(200) for _ in range(rng.randrange(30, longest_prompt) if long else 5)]
                bench.add(prompt, tenant.name, max_tokens=rng.randrange(1, longest_output) if long else 6)
        bench.step()
        if step > 50:
            bench.scheduler.slots.charge_all(bench.scheduler.tenants.all, bench.now)
            assert abs(tenants[0].counter - tenants[1].counter) <= bound
    assert min(tenant.counter for tenant in tenants) > 10 * bound / 2


def test_who_shares_a_page_with_a_long_prompt_waits_for_that_page_alone() -> None:
    bench = Bench(SchedulingConfig(), max_batch=4, max_step_tokens=20)
    template = list(range(8))
    bench.add(template + [50 + i % 100 for i in range(1000)])
    bench.step()
    short = bench.add([*template, 40, 41, 42, 43, 44], priority=1)
    twin = bench.add([*template, *(50 + i % 100 for i in range(30)), 7], priority=1)
    bench.step()
    assert {short, twin}.isdisjoint(bench.started)
    bench.step()
    bench.step()
    assert bench.started[short] <= 4
    assert bench.started[twin] <= 5
    assert short in bench.ended
    # Neither computed what the long one had.
    assert short.strand.cached >= 8
    assert twin.strand.cached >= 36


def test_who_waits_for_a_prefix_lends_its_rank_to_the_one_that_computes_it() -> None:
    bench = Bench(SchedulingConfig(policy="priority"), max_batch=4, max_step_tokens=20)
    prompt = list(range(60))
    low = bench.add(prompt, priority=-10)
    bench.step()
    middle = bench.add([100 + i % 50 for i in range(400)])
    bench.step()
    high = bench.add([*prompt, 1], priority=10)
    for _ in range(4):
        bench.step()
    assert low in bench.ended or low.decoding
    assert middle.prefill_left > 300
    for _ in range(3):
        bench.step()
    assert high in bench.ended


def test_work_that_yields_keeps_its_rank_where_what_it_lost_can_be_found() -> None:
    config = SchedulingConfig(policy="shortest-remaining")
    bench = Bench(config, max_batch=1, max_step_tokens=3000)
    long = bench.add(list(range(2000)), max_tokens=60)
    bench.step()
    bench.step()
    before = long.rank
    bench.scheduler._yield(long, bench.now)
    assert long.expected_tokens < 100
    assert long.rank < before


def test_a_rate_rises_and_falls() -> None:
    rate = Rate()
    assert rate.per_second(5.0) == 0.0
    for at in itertools.count(0.0, 0.1):
        rate.count(at)
        if at > 100:
            break
    assert rate.per_second(100.0) == pytest.approx(10.0, rel=0.05)
    assert rate.per_second(130.0) < 1.0
    # Many at once count as many, however they are spaced.
    burst = Rate()
    for _ in range(50):
        burst.count(1.0)
    assert burst.per_second(1.0) == pytest.approx(5.0)
