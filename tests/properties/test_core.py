"""The compiled core against its plain-Python twin: any operations, in any order and depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.properties.core_driver import Driver, Sizes

TOKENS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


class CoreMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(
        num_pages=st.integers(1, 60),
        page_tokens=st.integers(1, 16),
        max_branches=st.integers(1, 24),
        max_batch=st.integers(1, 12),
        max_step_tokens=st.integers(1, 80),
        max_levels=st.integers(1, 4),
        level_cost_pages=st.sampled_from([0, 1, 2, 8]),
        table=st.booleans(),
        zero_used=st.booleans(),
    )
    def build(self, **sizes: Any) -> None:
        sizes["table"] = sizes["table"] and sizes["max_levels"] == 1
        self.driver = Driver(Sizes(**sizes))

    def pick(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(sorted(self.driver.pairs)), label="branch"))

    @rule(tenant=st.integers(-1, 2))
    def root(self, tenant: int) -> None:
        self.driver.root(tenant)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.driver.fork(self.pick(data))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), count=st.integers(-1, 6))
    def fork_many(self, data: st.DataObject, count: int) -> None:
        self.driver.fork_many(self.pick(data), count)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.driver.release(self.pick(data))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def release_many(self, data: st.DataObject) -> None:
        self.driver.release_many(data.draw(st.lists(st.sampled_from(sorted(self.driver.pairs)), max_size=5)))

    @rule()
    def use_stale(self) -> None:
        self.driver.use_stale()

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), num_tokens=st.integers(-1, 120))
    def truncate(self, data: st.DataObject, num_tokens: int) -> None:
        self.driver.truncate(self.pick(data), num_tokens)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), slot=st.integers(-1, 12), token=st.integers(0, 1000))
    def join(self, data: st.DataObject, slot: int, token: int) -> None:
        self.driver.join(self.pick(data), slot, token)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.driver.leave(self.pick(data))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), slot=st.integers(-1, 12), tokens=TOKENS)
    def prefill(self, data: st.DataObject, slot: int, tokens: list[int]) -> None:
        self.driver.prefill(self.pick(data), slot, tokens)

    @rule(count=st.integers(-1, 3), num_pages=st.integers(-1, 30), tenant=st.integers(0, 2))
    def lend(self, count: int, num_pages: int, tenant: int) -> None:
        self.driver.lend(count, num_pages, tenant)

    @rule(count=st.integers(0, 3), twice=st.booleans())
    def give_back(self, count: int, twice: bool) -> None:
        self.driver.give_back(count, twice=twice)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), keep=st.integers(0, 60), others=st.lists(st.integers(0, 3), max_size=20), tenant=st.integers(0, 2))
    def match(self, data: st.DataObject, keep: int, others: list[int], tenant: int) -> None:
        self.driver.match(self.pick(data), keep, others, tenant)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        self.driver.insert(self.pick(data))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        self.driver.swap(self.pick(data))

    @rule(num_pages=st.integers(0, 10))
    def evict(self, num_pages: int) -> None:
        self.driver.evict(num_pages)

    @rule()
    def take_used(self) -> None:
        self.driver.take_used()

    @rule(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 4))
    def decode(self, seed: int, steps: int) -> None:
        for i in range(steps):
            self.driver.sample(seed + i)
            self.driver.step(commit=True)

    @rule()
    def step_fails(self) -> None:
        self.driver.step(commit=False)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "driver"):
            self.driver.verify()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


WEIGHTS = {
    "root": 1, "fork": 2, "fork_many": 1, "release": 2, "release_many": 0.3, "truncate": 0.5, "join": 3, "leave": 1,
    "prefill": 3, "step": 6, "undo": 0.5, "lend": 0.5, "give_back": 0.5, "match": 1, "insert": 1, "evict": 0.3,
    "take_used": 0.7, "swap": 0.5,
}  # fmt: skip


def random_walk(seed: int, operations: int, *, verify_every: int) -> Driver:
    """Operations drawn at random, with sizes and weights drawn too: some walks are deep, some wide, some short of pages."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    max_levels = draw(1, 4)
    sizes = Sizes(
        num_pages=draw(4, 150),
        page_tokens=draw(1, 16),
        max_branches=draw(2, 16),
        max_batch=draw(1, 10),
        max_step_tokens=draw(8, 64),
        max_levels=max_levels,
        level_cost_pages=int(rng.choice([0, 1, 4, 16])),
        table=max_levels == 1 and rng.random() < 0.5,
        zero_used=rng.random() < 0.3,
    )
    driver = Driver(sizes)
    vocabulary = int(rng.choice([2, 1000]))  # with two words prompts meet often
    weights = rng.dirichlet(np.array([*WEIGHTS.values()]) * 2)
    for i, name in enumerate(rng.choice([*WEIGHTS], operations, p=weights)):
        live = list(driver.pairs)
        if name == "step":
            driver.sample(draw(0, 2**31))
            driver.step(commit=True)
        elif name == "undo":
            driver.step(commit=False)
        elif name == "lend":
            driver.lend(draw(0, 2), draw(0, 20), draw(0, 2))
        elif name == "give_back":
            driver.give_back(draw(0, 2), twice=rng.random() < 0.2)
        elif name == "evict":
            driver.evict(draw(0, 10))
        elif name == "take_used":
            driver.take_used()
        elif name == "root" or not live:
            driver.root(draw(0, 2))
        else:
            one_of(driver, str(name), live[draw(0, len(live) - 1)], draw, vocabulary)
        if i % verify_every == 0:
            driver.verify()
    driver.verify()
    return driver


def one_of(driver: Driver, name: str, branch: int, draw: Callable[[int, int], int], vocabulary: int) -> None:
    """An operation on one branch."""

    def words(most: int) -> list[int]:
        return [draw(0, vocabulary - 1) for _ in range(draw(1, most))]

    live = list(driver.pairs)
    if name == "fork":
        driver.fork(branch)
    elif name == "fork_many":
        driver.fork_many(branch, draw(0, 4))
    elif name == "release":
        driver.release(branch)
    elif name == "release_many":
        driver.release_many([live[draw(0, len(live) - 1)] for _ in range(draw(0, 3))])
    elif name == "truncate":
        driver.truncate(branch, draw(0, 1 + driver.core.length(driver.pairs[branch][0])))
    elif name == "join":
        driver.join(branch, draw(0, driver.sizes.max_batch - 1), draw(0, vocabulary - 1))
    elif name == "leave":
        driver.leave(branch)
    elif name == "match":
        driver.match(branch, draw(0, driver.core.length(driver.pairs[branch][0])), words(20), draw(0, 2))
    elif name == "insert":
        driver.insert(branch)
    elif name == "swap":
        driver.swap(branch)
    else:
        driver.prefill(branch, draw(0, driver.sizes.max_batch - 1), words(30))


@pytest.mark.parametrize("seed", range(40))
def test_random_walks(seed: int) -> None:
    driver = random_walk(seed, 2600, verify_every=9)
    driver.release_many(list(driver.pairs))
    driver.give_back(len(driver.leases))
    driver.evict(driver.core.num_pages)
    driver.take_used()
    driver.verify()
    assert driver.core.num_free_pages == driver.core.num_pages
    assert driver.core.num_segments == 0
