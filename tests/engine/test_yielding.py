"""K/V that is given up and comes back: prefix cache, idle branches, preemption, swap. No token of any output changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import COMPUTED, assert_empty, load
from tests.engine.recorder import Recorder

from branchline.engine.engine import Engine
from branchline.engine.types import Append, Pin, Ready, Release, Service, TokenIds


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 to 90 tokens, of which many begin alike."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(250) for _ in range(60)) for _ in range(3)]
    return [
        rng.choice(stems)[: rng.randrange(1, 60)] + tuple(rng.randrange(250) for _ in range(rng.randrange(1, 30)))
        for _ in range(count)
    ]


def outputs(engine: Engine, asked: list[tuple[int, ...]]) -> list[list[int]]:
    """A session that asks everything at once, with two forks of each prompt; each answer is asked on. Every other request is
    greedy, the others are sampled with a seed."""
    client = Recorder(engine)
    requests = []
    for i, prompt in enumerate(asked):
        root = client.context(TokenIds(prompt))
        children = client.fork(root, 2)
        client.send(Append(children[0], TokenIds((i % 250, 3))))
        for branch in (root, *children):
            requests.append(client.generate(branch, max_tokens=24, ignore_eos=True, seed=i, temperature=i % 2))
            client.send(Append(branch, TokenIds((5,))))
            requests.append(client.generate(branch, max_tokens=9, ignore_eos=True, seed=i, temperature=i % 2))
    found = [client.output(request).tokens for request in requests]
    engine.close_session(client.session)
    assert_empty(engine)
    return found


def preempt_every(engine: Engine, steps: int) -> None:
    """Have half of the running work yield, and lose its K/V for good, before every so many steps."""
    scheduler = engine._loop.scheduler
    real, count = scheduler.begin, 0

    def begin(now: float) -> Any:
        nonlocal count
        count += 1
        if count % steps == 0 and scheduler.slots.works:
            for _ in range((len(scheduler.slots.works) + 1) // 2):
                scheduler._yield(scheduler._room.last_in_rank(), now)
            engine._loop._tree.evict(1 << 20)
        return real(now)

    scheduler.begin = begin  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=["native", "cpu"])
def computed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return COMPUTED[request.param]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, computed: dict[str, Any]) -> Iterator[list[list[int]]]:
    with load(tiny_model, scheduling={"prefix_cache": False}, **computed) as engine:
        yield outputs(engine, prompts(10))
        assert engine.stats().preemptions == 0


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("every", [1, 7])
def test_outputs_are_the_same_with_preemption_forced(
    tiny_model: Path, computed: dict[str, Any], undisturbed: list[list[int]], cache: bool, every: int
) -> None:
    with load(tiny_model, scheduling={"prefix_cache": cache}, **computed) as engine:
        preempt_every(engine, every)
        assert outputs(engine, prompts(10)) == undisturbed
        stats = engine.stats()
        assert stats.preemptions > 40
        assert stats.recomputed_tokens > 100


@pytest.mark.parametrize("budget", [128, 129, 1000])
def test_outputs_are_the_same_with_the_cache_and_any_chunk_size(
    tiny_model: Path, computed: dict[str, Any], undisturbed: list[list[int]], budget: int
) -> None:
    with load(tiny_model, max_step_tokens=budget, **computed) as engine:
        for _ in range(2):
            assert outputs(engine, prompts(10)) == undisturbed
        assert engine.stats().cached_tokens > 300


@pytest.mark.parametrize(
    ("policy", "swap_bytes"),
    [("fcfs", 0), ("priority", 0), ("fair", 0), ("deadline", 0), ("shortest-remaining", 0), ("fair", 1 << 20)],
)
def test_outputs_are_the_same_in_a_pool_that_is_too_small(
    tiny_model: Path, computed: dict[str, Any], undisturbed: list[list[int]], policy: str, swap_bytes: int
) -> None:
    scheduling = {"policy": policy, "overcommit": 3.0, "swap_bytes": swap_bytes}
    with load(tiny_model, pool_tokens=256, scheduling=scheduling, **computed) as engine:
        assert outputs(engine, prompts(10)) == undisturbed
        assert engine.stats().preemptions > 0


def test_work_that_yields_is_copied_away_and_back(tiny_model: Path, computed: dict[str, Any]) -> None:
    with load(tiny_model, scheduling={"swap_bytes": 1 << 20}, **computed) as engine:
        client = Recorder(engine)
        alone = client.run(client.context(TokenIds((9,) * 40)), max_tokens=60, ignore_eos=True).tokens
        scheduler = engine._loop.scheduler
        scheduler.seconds_to_compute = lambda num_tokens: 1.0 * num_tokens  # type: ignore[method-assign]
        preempt_every(engine, 5)
        assert client.run(client.context(TokenIds((9,) * 40)), max_tokens=60, ignore_eos=True).tokens == alone
        stats = engine.stats()
        assert stats.swapped_pages >= stats.preemptions - 1 > 5
        # The prompt was found or computed once; what was generated came back from swap space.
        assert stats.recomputed_tokens == 0
        engine.close_session(client.session)
        assert_empty(engine)
        assert scheduler.cache._swap is not None
        assert scheduler.cache._swap.num_free == (1 << 20) // engine.info.page_bytes


# --- the prefix cache ---------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_not_computed_again(tiny_model: Path, computed: dict[str, Any]) -> None:
    with load(tiny_model, **computed) as engine:
        client = Recorder(engine)
        prompt = tuple(range(100))
        first = client.run(client.context(TokenIds(prompt)), max_tokens=5).finished.usage
        client.send(Release((0,)))
        again = client.context(TokenIds(prompt))
        ready = client.wait(Ready, lambda event: event.branch == again)
        usage = client.run(again, max_tokens=5).finished.usage
        # Six full pages; the last tokens lie on a page that nothing filled.
        assert (first.shared_tokens, usage.shared_tokens) == (0, 96)
        assert (ready.num_tokens, ready.computed_tokens) == (100, 4)
        assert engine.stats().cached_tokens == 96


@pytest.mark.parametrize("shared", [15, 16, 17, 40, 47, 48, 49])
def test_a_prefix_that_ends_inside_a_page_is_found_too(tiny_model: Path, computed: dict[str, Any], shared: int) -> None:
    with load(tiny_model, **computed) as engine:
        client = Recorder(engine)
        prompt = tuple(range(80))
        client.run(client.context(TokenIds(prompt)), max_tokens=2)
        other = (*prompt[:shared], *(200 + i for i in range(20)))
        cached = client.run(client.context(TokenIds(other)), max_tokens=20, ignore_eos=True)
        assert cached.finished.usage.shared_tokens == shared
        with load(tiny_model, scheduling={"prefix_cache": False}, **computed) as fresh:
            expected = Recorder(fresh)
            assert cached.tokens == expected.run(expected.context(TokenIds(other)), max_tokens=20, ignore_eos=True).tokens


def test_the_same_prompt_asked_by_many_at_once_is_computed_once(tiny_model: Path) -> None:
    with load(tiny_model) as engine:
        client = Recorder(engine)
        prompt = tuple(range(200))
        requests = [client.generate(client.context(TokenIds(prompt)), max_tokens=4) for _ in range(20)]
        assert len({tuple(client.output(request).tokens) for request in requests}) == 1
        assert engine.stats().prefill_tokens < 2 * len(prompt)


def test_tenants_do_not_find_each_others_prefixes(tiny_model: Path) -> None:
    for isolate in (True, False):
        with load(tiny_model, scheduling={"isolate_tenants": isolate}) as engine:
            one, other = Recorder(engine, "one"), Recorder(engine, "other")
            one.run(one.context(TokenIds(tuple(range(100)))), max_tokens=2)
            usage = other.run(other.context(TokenIds(tuple(range(100)))), max_tokens=2).finished.usage
            assert usage.shared_tokens == (0 if isolate else 96)


# --- idle branches ------------------------------------------------------------------------------------------------------


def test_more_contexts_than_the_pool_holds_are_used_in_turn(tiny_model: Path, computed: dict[str, Any]) -> None:
    """Thirty contexts of 120 tokens in a pool of 640: nobody fails, and each says what it says alone."""
    contexts = [(i, *range(119)) for i in range(30)]
    with load(tiny_model, pool_tokens=8192, **computed) as engine:
        client = Recorder(engine)
        branches = [client.context(TokenIds(tokens)) for tokens in contexts]
        expected = [[client.run(branch, max_tokens=10).tokens for branch in branches] for _ in range(2)]
    with load(tiny_model, pool_tokens=640, **computed) as engine:
        client = Recorder(engine)
        branches = [client.context(TokenIds(tokens)) for tokens in contexts]
        assert [[client.run(branch, max_tokens=10).tokens for branch in branches] for _ in range(2)] == expected
        assert engine.stats().recomputed_tokens > 0
        forked = client.run(client.fork(branches[0])[0], max_tokens=10)
        assert forked.finished.usage.prompt_tokens == 140
        assert client.inspect(branches[3]).num_tokens == 140
        engine.close_session(client.session)
        assert_empty(engine)


def test_pinned_branches_keep_their_pages(tiny_model: Path) -> None:
    with load(tiny_model, pool_tokens=640, blocked_timeout_s=0.2) as engine:
        client = Recorder(engine)
        pinned = client.context(TokenIds(tuple(range(200))), pin=True)
        client.wait(Ready)
        for i in range(10):
            client.run(client.context(TokenIds((i,) * 150)), max_tokens=5)
        before = engine.stats().prefill_tokens
        client.run(pinned, max_tokens=5)
        assert engine.stats().prefill_tokens - before <= 1
        assert engine.stats().recomputed_tokens <= 1
        late = client.context(TokenIds((77,) * 500))
        assert client.failure(late).error.code == "pool_exhausted"
        client.send(Pin(pinned, False))
        assert client.run(client.context(TokenIds((77,) * 500)), max_tokens=5).tokens
        # Pinned again, it is brought back first.
        client.send(Pin(pinned))
        assert client.inspect(pinned).num_tokens == 205


# --- who yields ---------------------------------------------------------------------------------------------------------


def test_a_higher_priority_preempts_and_the_other_goes_on_unchanged(tiny_model: Path) -> None:
    with load(tiny_model, max_batch=1, max_step_tokens=256, scheduling={"policy": "priority"}) as engine:
        client = Recorder(engine)
        low = client.context(TokenIds(tuple(range(50))))
        expected = client.run(client.fork(low)[0], max_tokens=400, ignore_eos=True).tokens
        slow = client.generate(low, max_tokens=400, ignore_eos=True)
        client.wait_for_tokens(slow, 5)
        urgent = client.generate(
            client.context("urgent", service=Service(priority=5)), max_tokens=5, service=Service(priority=5)
        )
        client.output(urgent)
        assert not client.has_ended(slow)
        ended = client.output(slow)
        assert ended.tokens == expected
        assert ended.finished.timing.preemptions >= 1
        assert ended.finished.timing.preempted_s > 0
