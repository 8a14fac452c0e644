"""Whatever clients send and whenever work must yield: every answer is the one that the commands mean, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.engine.engines import COMPUTED, assert_empty, load
from tests.engine.recorder import Recorder
from tests.properties.engine_driver import MOST_TOKENS, Driver

from branchline.engine.engine import Engine
from branchline.engine.scheduler.policies.find import policy_names
from branchline.engine.types import TokenIds

SETTINGS = settings(
    max_examples=8,
    # The same programs each time: torch's sums depend on the batch, and among ever new programs some would meet a near tie.
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
SCHEDULES = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(policy_names()),
        "overcommit": st.sampled_from((1.0, 3.0)),
        "reserve": st.sampled_from(("estimate", "max")),
        "prefix_cache": st.booleans(),
        "isolate_tenants": st.booleans(),
        "swap_bytes": st.sampled_from((0, 1 << 16, 1 << 20)),
        "itl_target_ms": st.sampled_from((None, 1.0)),
    }
)


@pytest.fixture(scope="module", params=["native", "cpu"])
def computed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return COMPUTED[request.param]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, computed: dict[str, Any]) -> Iterator[Engine]:
    """Has room for everything and keeps nothing: what it answers is right by the tests of the engine."""
    with load(tiny_model, pool_tokens=65536, scheduling={"prefix_cache": False, "preemption": False}, **computed) as engine:
        yield engine
        assert engine.stats().preemptions == 0


def continuations(engine: Engine) -> Callable[[list[tuple[list[int], int]]], list[list[int]]]:
    """What the engine generates after prompts, greedily."""

    def run(asked: list[tuple[list[int], int]]) -> list[list[int]]:
        client = Recorder(engine)
        requests = [
            client.generate(client.context(TokenIds(tuple(prompt))), max_tokens=count, ignore_eos=True)
            for prompt, count in asked
        ]
        outputs = [client.output(request).tokens for request in requests]
        engine.close_session(client.session)
        return outputs

    return run


def disturbance(engine: Engine, every: int | None) -> Callable[[], None]:
    """Checks the core; and has half of the running work yield, and lose its K/V for good, before every so many steps."""
    scheduler, tree, steps = engine._loop.scheduler, engine._loop._tree, 0

    def before_step() -> None:
        nonlocal steps
        steps += 1
        tree.check()
        if every is not None and steps % every == 0 and scheduler.slots.works:
            for _ in range((len(scheduler.slots.works) + 1) // 2):
                scheduler._yield(scheduler._room.last_in_rank(), scheduler._began)
            tree.evict(1 << 20)

    return before_step


def limits(scheduling: dict[str, Any], pool_tokens: int, max_batch: int, chunk: int, every: int | None) -> dict[str, Any]:
    """Settings of an engine. What loses its K/V all the time must be able to compute it in one step."""
    if every is not None:
        scheduling["itl_target_ms"], chunk = None, MOST_TOKENS
    return {
        "scheduling": scheduling,
        "pool_tokens": pool_tokens,
        "max_batch": max_batch,
        "max_step_tokens": max_batch + chunk,
    }


def assert_nothing_left(engine: Engine, driver: Driver) -> None:
    """Sessions are closed: no page, place, slot or count is held."""
    for client in driver.clients:
        engine.close_session(client.session)
    assert_empty(engine)
    scheduler = engine._loop.scheduler
    assert scheduler.slots.num_free == engine._loop._config.max_batch
    assert scheduler.cache.num_parked == 0
    assert all(tenant.works == tenant.running == tenant.branches == 0 for tenant in scheduler.tenants.all)
    assert not scheduler._in_flight._awaited
    assert not scheduler._deadlines._works
    assert not scheduler._prefilling
    swap = scheduler.cache._swap
    assert swap is None or swap.num_free == len(swap._places)


@SETTINGS
@given(
    seed=st.integers(0, 2**32),
    scheduling=SCHEDULES,
    pool_tokens=st.sampled_from((700, 1500, 8192)),
    max_batch=st.sampled_from((1, 3, 16)),
    chunk=st.sampled_from((1, 17, 200)),
    every=st.sampled_from((None, None, 1, 7)),
    copying_is_quicker=st.booleans(),
)
def test_any_commands_give_the_answers_that_they_mean(
    tiny_model: Path,
    computed: dict[str, Any],
    plain: Engine,
    seed: int,
    scheduling: dict[str, Any],
    pool_tokens: int,
    max_batch: int,
    chunk: int,
    every: int | None,
    copying_is_quicker: bool,
) -> None:
    with load(tiny_model, **limits(scheduling, pool_tokens, max_batch, chunk, every), **computed) as engine:
        if copying_is_quicker:
            engine._loop.scheduler.seconds_to_compute = lambda num_tokens: 1.0 * num_tokens  # type: ignore[method-assign]
        driver = Driver(engine, seed, 120, calm=False, seeded=False, before_step=disturbance(engine, every))
        driver.run()
        driver.check(continuations(plain))
        assert_nothing_left(engine, driver)


@SETTINGS
@given(
    seed=st.integers(0, 2**32),
    scheduling=SCHEDULES,
    pool_tokens=st.sampled_from((700, 8192)),
    max_batch=st.sampled_from((2, 16)),
    chunk=st.sampled_from((1, 17, 200)),
    every=st.sampled_from((None, 1, 7)),
)
def test_sampled_outputs_are_those_of_an_engine_with_room_for_everything(
    tiny_model: Path,
    computed: dict[str, Any],
    plain: Engine,
    seed: int,
    scheduling: dict[str, Any],
    pool_tokens: int,
    max_batch: int,
    chunk: int,
    every: int | None,
) -> None:
    undisturbed = Driver(plain, seed, 80, calm=True, seeded=True)
    undisturbed.run()
    undisturbed.check(continuations(plain))
    assert_nothing_left(plain, undisturbed)
    with load(tiny_model, **limits(scheduling, pool_tokens, max_batch, chunk, every), **computed) as engine:
        driver = Driver(engine, seed, 80, calm=True, seeded=True, before_step=disturbance(engine, every))
        driver.run()
        driver.check(continuations(plain))
        for client, twin in zip(driver.clients, undisturbed.clients, strict=True):
            assert [asked.tokens for asked in client.asked] == [asked.tokens for asked in twin.asked]
        assert_nothing_left(engine, driver)
