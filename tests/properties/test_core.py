"""The compiled core against its plain-Python twin: any operations, in any order and depth."""

from __future__ import annotations

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
    )
    def build(self, **sizes: int) -> None:
        self.driver = Driver(Sizes(**sizes))

    def pick(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(sorted(self.driver.pairs)), label="branch"))

    @rule()
    def root(self) -> None:
        self.driver.root()

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


def random_walk(seed: int, operations: int, *, verify_every: int) -> Driver:
    """Operations drawn at random, with sizes and weights drawn too: some walks are deep, some wide, some short of pages."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    sizes = Sizes(
        num_pages=draw(4, 150),
        page_tokens=draw(1, 16),
        max_branches=draw(2, 16),
        max_batch=draw(1, 10),
        max_step_tokens=draw(8, 64),
        max_levels=draw(1, 4),
        level_cost_pages=int(rng.choice([0, 1, 4, 16])),
    )
    driver = Driver(sizes)
    names = ["root", "fork", "fork_many", "release", "release_many", "truncate", "join", "leave", "prefill", "step", "undo"]
    weights = rng.dirichlet(np.array([1, 2, 1, 2, 0.3, 0.5, 3, 1, 3, 6, 0.5]) * 2)
    for i, name in enumerate(rng.choice(names, operations, p=weights)):
        live = list(driver.pairs)
        if name == "step":
            driver.sample(draw(0, 2**31))
            driver.step(commit=True)
        elif name == "undo":
            driver.step(commit=False)
        elif name == "root" or not live:
            driver.root()
        else:
            branch = live[draw(0, len(live) - 1)]
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
                driver.join(branch, draw(0, sizes.max_batch - 1), draw(0, 1000))
            elif name == "leave":
                driver.leave(branch)
            else:
                driver.prefill(branch, draw(0, sizes.max_batch - 1), rng.integers(0, 1000, draw(1, 30)).tolist())
        if i % verify_every == 0:
            driver.verify()
    driver.verify()
    return driver


@pytest.mark.parametrize("seed", range(20))
def test_random_walks(seed: int) -> None:
    driver = random_walk(seed, 600, verify_every=3)
    driver.release_many(list(driver.pairs))
    driver.verify()
    assert driver.core.num_free_pages == driver.core.num_pages
