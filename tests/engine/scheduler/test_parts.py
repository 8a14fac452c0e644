"""The scheduler's parts, each by itself."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.errors import ConfigError, TenantLimitError
from branchline.engine.scheduler.lengths import OutputLengths
from branchline.engine.scheduler.policies.base import Policy
from branchline.engine.scheduler.policies.find import find_policy, policy_names
from branchline.engine.scheduler.queue import WaitingQueue
from branchline.engine.scheduler.step_times import StepTimes
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenants
from branchline.engine.scheduler.work import Rank, Work
from branchline.engine.types import QoS, Service


def work(tenants: Tenants, name: str = "", *, at: float = 0.0, priority: int = 0, qos: QoS = "standard") -> Work:
    return Work(
        strand=Strand(), tenant=tenants.get(name), submitted=at, service=Service(priority=priority, qos=qos), max_tokens=10
    )


# --- lengths ------------------------------------------------------------------------------------------------------------


def test_remaining_output_is_what_is_left_to_most_of_the_longer_ones() -> None:
    lengths = OutputLengths()
    assert lengths.remaining(0, 500, 0.75) == 500
    for _ in range(300):
        lengths.observe(20)
    assert 20 <= lengths.remaining(0, 500, 0.75) <= 23
    assert lengths.remaining(10, 500, 0.75) <= 13
    assert lengths.remaining(0, 8, 0.75) == 8
    # Nothing was ever longer than 40: all that is known is the bound.
    assert lengths.remaining(40, 500, 0.75) == 460
    for _ in range(100):
        lengths.observe(200)
    assert 155 <= lengths.remaining(40, 500, 0.5) <= 185
    assert lengths.remaining(0, 500, 0.5) <= 23


def test_old_outputs_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.observe(1000)
    for _ in range(3000):
        lengths.observe(10)
    assert lengths.remaining(0, 5000, 0.9) <= 12
    for _ in range(200_000):  # its weights stay finite
        lengths.observe(10)
    assert lengths.remaining(0, 5000, 0.9) <= 12


# --- step times ---------------------------------------------------------------------------------------------------------


def test_step_times_find_the_line() -> None:
    times, rng = StepTimes(), random.Random(0)
    assert times.prefill_within(0.1, 3) is None
    for _ in range(200):
        rows, tokens = rng.randrange(50), rng.choice((0, 0, 64, 200))
        times.observe(rows, tokens, 0.004 + 0.0005 * rows + 0.0002 * tokens)
    assert times.prefill_token_s == pytest.approx(0.0002, rel=0.05)
    assert times.prefill_within(0.05, 20) == pytest.approx((0.05 - 0.004 - 0.01) / 0.0002, rel=0.1)
    assert times.prefill_within(0.001, 20) == 0


def test_step_times_that_never_vary_give_no_nonsense() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(4, 0, 0.01)
    assert times.step_s == pytest.approx(0.01)
    assert times.prefill_token_s == pytest.approx(0.0, abs=1e-9)
    assert times.prefill_within(0.1, 4) is None


# --- tenants ------------------------------------------------------------------------------------------------------------


def test_a_minutes_tokens_come_back_with_time() -> None:
    tenant = Tenants(SchedulingConfig(default_tenant=TenantConfig(tokens_per_minute=600))).get("x")
    tenant.check_rate(0.0)
    tenant.charge(0.0, 650, 1.0)
    with pytest.raises(TenantLimitError, match="600 tokens a minute") as caught:
        tenant.check_rate(1.0)
    # It was full after a second: 50 are overdrawn, at 10 a second.
    assert caught.value.retry_after_s == pytest.approx(5.1)
    tenant.check_rate(6.2)
    tenant.charge(0.0, 100, 1000.0)
    tenant.check_rate(1000.0)


def test_tenants_have_settings_by_name_and_share_a_number_unless_isolated() -> None:
    config = SchedulingConfig(tenants={"big": TenantConfig(weight=4.0)}, isolate_tenants=False)
    tenants = Tenants(config)
    big, other = tenants.get("big"), tenants.get("other")
    assert (big.config.weight, other.config.weight) == (4.0, 1.0)
    assert tenants.get("big") is big
    assert tenants.core_number(big) == tenants.core_number(other) == 0
    big.charge(8.0, 8, 0.0)
    other.charge(8.0, 8, 0.0)
    assert (big.counter, other.counter) == (2.0, 8.0)


# --- the queue and the policies -----------------------------------------------------------------------------------------


def order(policy: str, works: list[Work], **config: float) -> list[int]:
    made = find_policy(SchedulingConfig(policy=policy, **config))  # type: ignore[arg-type]
    queue = WaitingQueue(made)
    for one in works:
        one.rank = made.order(one)
        queue.push(one)
    found = []
    while (head := queue.head(set())) is not None:
        queue.discard(head)
        found.append(works.index(head))
    assert len(queue) == 0
    return found


def test_policies_order_as_they_say() -> None:
    tenants = Tenants(SchedulingConfig())
    works = [
        work(tenants, at=0.0, qos="batch"),
        work(tenants, at=1.0),
        work(tenants, at=2.0, priority=1),
        work(tenants, at=3.0, qos="interactive"),
        work(tenants, at=90.0),
    ]
    assert order("fcfs", works) == [0, 1, 2, 3, 4]
    assert order("priority", works) == [3, 2, 1, 0, 4]
    assert order("priority", works, ageing_s=0.1) == [0, 1, 2, 3, 4]
    assert order("deadline", works) == [3, 1, 2, 4, 0]
    for expected, one in zip((50, 10, 4000, 30, 20), works, strict=True):
        one.expected_tokens = expected
    assert order("shortest-remaining", works) == [0, 1, 3, 2, 4]


def test_the_least_served_tenant_goes_first() -> None:
    tenants = Tenants(SchedulingConfig())
    works = [work(tenants, "a", at=0.0), work(tenants, "a", at=1.0), work(tenants, "b", at=5.0)]
    tenants.get("a").counter = 100.0
    assert order("fair", works) == [2, 0, 1]


def test_the_queue_passes_over_tenants_and_forgets_who_left() -> None:
    tenants = Tenants(SchedulingConfig())
    queue = WaitingQueue(find_policy(SchedulingConfig(policy="fcfs")))
    works = [work(tenants, "ab"[i % 2], at=float(i)) for i in range(1000)]
    for one in works:
        one.rank = (one.submitted,)
        queue.push(one)
    for one in works[:990]:
        queue.discard(one)
    assert queue.head({tenants.get("a")}) is works[991]
    assert queue.head(set()) is works[990]
    assert set(queue) == set(works[990:])
    assert sum(len(heap) for heap in queue._heaps.values()) < 200


@pytest.mark.parametrize("policy", policy_names())
def test_nobody_preempts_each_other(policy: str) -> None:
    made = find_policy(SchedulingConfig(policy=policy))
    rng = random.Random(1)
    tenants = Tenants(SchedulingConfig())
    for _ in range(3000):
        pair = [work(tenants, rng.choice("ab"), at=rng.random() * 20, priority=rng.randrange(-2, 3)) for _ in range(2)]
        for one in pair:
            one.tenant.running = rng.randrange(9)
            one.tenant.counter = float(rng.randrange(3))
            one.expected_tokens = rng.randrange(1, 300)
            one.rank = made.order(one)
        assert not (made.may_preempt(*pair) and made.may_preempt(*reversed(pair)))


class Backwards(Policy):
    """A policy of a user's own: last come, first served."""

    asked: ClassVar[int] = 0

    def order(self, work: Work) -> Rank:
        Backwards.asked += 1
        return (-work.submitted,)


def test_a_users_own_policy_is_found_by_import_path() -> None:
    tenants = Tenants(SchedulingConfig())
    works = [work(tenants, at=float(i)) for i in range(4)]
    assert order(f"{__name__}:Backwards", works) == [3, 2, 1, 0]


@pytest.mark.parametrize("policy", ["nonesuch", "no.such.module:Policy", f"{__name__}:nothing", f"{__name__}:work"])
def test_policies_that_are_none(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduling\.policy"):
        find_policy(SchedulingConfig(policy=policy))
