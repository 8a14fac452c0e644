"""Four times more than the engine can do, with cancellations, priorities, deadlines, forks and pools down to the smallest: the
simulator's clients on the real scheduler and core. Every request ends, no page is lost, the core is whole after every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.scheduler.policies.find import policy_names
from branchline.engine.types import Service
from branchline.load.simulate.compare import saturation_rate, with_policy
from branchline.load.simulate.outcome import Fate
from branchline.load.simulate.simulator import SimulatedEngine, Simulator
from branchline.load.simulate.trace import NO_PARENT, Trace, make_trace

# Of the longest family: a context of 64 tokens, a prompt of 48 and 32 generated ones.
LEAST_PAGES = 9
SERVICES = (
    Service(qos="interactive"), Service(), Service(qos="batch"), Service(priority=5), Service(priority=-3),
    Service(qos="interactive", deadline_ms=4000), Service(deadline_ms=20000),
)  # fmt: skip


def unruly(count: int, seed: int, *, cancelled: float = 0.15) -> Trace:
    """Random requests of three tenants, half of them branches of contexts, some of them taken back after a while."""
    rng = np.random.default_rng(seed)
    is_context = rng.random(count) < 0.1
    latest = np.maximum.accumulate(np.where(is_context, np.arange(count), -1))
    has_parent = ~is_context & (latest >= 0) & (rng.random(count) < 0.5)
    blocks = [np.arange(n) + 10 * w for n, w in zip(rng.integers(0, 4, count), rng.integers(0, 3, count), strict=True)]
    tenant = rng.integers(0, 3, count)
    outputs = rng.integers(1, 33, count)
    return make_trace(
        "unruly",
        arrival_s=np.cumsum(rng.exponential(1.0, count)),
        prompt_tokens=np.where(is_context, 64, rng.integers(1, 49, count)),
        output_tokens=np.where(is_context, 0, outputs),
        max_tokens=np.where(is_context, 0, np.minimum(outputs + rng.integers(0, 9, count), 32)),
        tenant=np.where(has_parent, tenant[latest], tenant),
        tenants=("amber", "birch", "cedar"),
        service=rng.integers(0, len(SERVICES), count),
        services=SERVICES,
        parent=np.where(has_parent, latest, NO_PARENT),
        cancel_s=np.where(rng.random(count) < cancelled, rng.exponential(3.0, count), np.inf),
        blocks=[ids if at % 2 else ids[:0] for at, ids in enumerate(blocks)],
    )


def overload(policy: str, num_pages: int, steps: int, seed: int) -> None:
    config = SchedulingConfig(policy=policy, overcommit=1.5, ageing_s=1.0, tenants={"birch": TenantConfig(weight=2.0)})
    engine = SimulatedEngine(num_pages=num_pages, max_batch=16, max_step_tokens=64, max_waiting=48, scheduling=config)
    steady = unruly(200, seed, cancelled=0.0)
    rate = saturation_rate(replace(steady, service=np.ones_like(steady.service)), with_policy(engine, "fcfs"))
    # Of four requests one can be served in time: a step or more each.
    trace = unruly(4 * steps, seed).at_rate(4 * rate)
    simulator = Simulator(trace, engine)
    simulated = 0
    while simulated < steps and simulator.step():
        simulated = simulator.outcome.steps
        simulator.tree.check()
        assert simulator.scheduler.num_waiting <= 48 + 16  # those that yielded were let in once
    # It is an overload.
    assert np.count_nonzero(trace.arrival_s <= simulator.now) > 2 * simulator.outcome.count(Fate.COMPLETED) > 0
    simulator.stop_arrivals()
    while simulator.step():
        simulator.tree.check()
    outcome = simulator.finish()
    seen = ~np.isnan(outcome.ended_s)
    assert not np.isnan(outcome.ended_s[~np.isnan(outcome.arrived_s)]).any()
    assert (outcome.fate[seen] != Fate.OPEN).all()
    assert outcome.lost_pages == 0
    assert simulator.tree.num_branches == 0
    done = outcome.fate == Fate.COMPLETED
    assert (outcome.generated[done] == trace.output_tokens[done]).all()
    assert outcome.count(Fate.CANCELLED) > 0


@pytest.mark.parametrize("num_pages", [LEAST_PAGES, 40])
@pytest.mark.parametrize("policy", policy_names())
def test_overload(policy: str, num_pages: int) -> None:
    overload(policy, num_pages, 400, seed=num_pages)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_pages", [LEAST_PAGES, 40])
@pytest.mark.parametrize("policy", policy_names())
def test_overload_for_50_000_steps(policy: str, num_pages: int) -> None:
    overload(policy, num_pages, 50_000, seed=1)
