"""Whatever comes: no deadlock, no starvation, no page lost, and a branch that yielded has the tokens that it would have had."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties.scheduler_driver import Driver

from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.scheduler.policies.find import policy_names

TENANTS = {"b": TenantConfig(weight=2.5, max_pages=80)}


def drive(seed: int, steps: int, config: SchedulingConfig, num_pages: int, max_batch: int, load: float) -> Driver:
    driver = Driver(seed, config, num_pages=num_pages, max_batch=max_batch, max_step_tokens=max_batch + 20, load=load)
    for _ in range(steps):
        driver.step()
    driver.drain()
    return driver


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(policy_names()),
    num_pages=st.sampled_from((1, 2, 5, 20, 33, 64, 200)),
    max_batch=st.sampled_from((1, 2, 8, 32)),
    load=st.sampled_from((0.3, 1.0, 4.0)),
    prefix_cache=st.booleans(),
    preemption=st.booleans(),
    isolate=st.booleans(),
    overcommit=st.sampled_from((1.0, 4.0)),
    most=st.booleans(),
    itl=st.sampled_from((None, 12.0)),
)
def test_nothing_is_lost_and_everything_ends(
    seed: int,
    policy: str,
    num_pages: int,
    max_batch: int,
    load: float,
    prefix_cache: bool,
    preemption: bool,
    isolate: bool,
    overcommit: float,
    most: bool,
    itl: float | None,
) -> None:
    config = SchedulingConfig(
        policy=policy,
        prefix_cache=prefix_cache,
        preemption=preemption,
        isolate_tenants=isolate,
        tenants=TENANTS if isolate else {},
        overcommit=overcommit,
        reserve="max" if most else "estimate",
        itl_target_ms=itl,
    ).validate()
    drive(seed, 250, config, num_pages, max_batch, load)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("num_pages", [23, 60, 400])
def test_four_times_overload_for_long(policy: str, num_pages: int) -> None:
    """50,000 steps in all pool sizes of a policy; 23 pages are what the longest request alone needs."""
    config = SchedulingConfig(policy=policy, overcommit=2.0)
    driver = drive(7, 50_000, config, num_pages, 16, 4.0)
    assert driver.outcomes["ended"] > 1000
    assert driver.outcomes["overloaded"] > 0


def test_overload_refuses_preempts_and_drops() -> None:
    """The driver reaches all of it; else the tests above would show little."""
    config = SchedulingConfig(policy="priority", overcommit=3.0)
    driver = drive(3, 1500, config, 60, 16, 4.0)
    assert set(driver.outcomes) >= {"ended", "computed", "cancelled", "overloaded", "deadline_exceeded"}
    counters = driver.scheduler.counters
    assert counters.preemptions > 50
    assert counters.recomputed_tokens > 50
    assert driver.scheduler.cache.cached_tokens > 500
