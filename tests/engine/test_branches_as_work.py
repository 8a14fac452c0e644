"""Adopt, race, pin, tenants, deadlines and cancellation, through the engine's own interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import assert_empty, load
from tests.engine.recorder import Recorder
from tests.engine.scheduler.test_parts import Backwards

from branchline.engine.engine import Engine
from branchline.engine.types import (
    Adopt,
    Adopted,
    Append,
    Cancel,
    Failed,
    Finished,
    Generate,
    Info,
    Inspect,
    Pin,
    Race,
    Raced,
    Ready,
    Release,
    SamplingParams,
    Service,
    TokenIds,
)

PROMPT = TokenIds(tuple(range(60)))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Recorder]:
    recorder = Recorder(engine)
    yield recorder
    engine.close_session(recorder.session)
    assert_empty(engine)


def available(engine: Engine) -> int:
    stats = engine.stats()
    return stats.pages_free + stats.pages_cached


# --- adopt --------------------------------------------------------------------------------------------------------------


def test_the_parent_goes_on_where_the_adopted_child_stood(client: Recorder) -> None:
    root = client.context(PROMPT)
    child, twin = client.fork(root, 2)
    for branch in (child, twin):
        client.send(Append(branch, TokenIds((1, 2, 3))))
        client.run(branch, max_tokens=10, ignore_eos=True)
    before = client.engine.stats()
    client.send(Adopt(root, child))
    adopted = client.wait(Adopted)
    assert (adopted.branch, adopted.child, adopted.num_tokens) == (root, child, 73)
    assert client.engine.stats().copied_bytes == before.copied_bytes
    assert client.engine.stats().branches == before.branches - 1
    assert client.run(root, max_tokens=20).tokens == client.run(twin, max_tokens=20).tokens
    client.send(Inspect(child, 99))
    assert client.failure(child, 99).error.code == "released_branch"


def test_adopt_waits_for_what_runs_on_both(client: Recorder) -> None:
    root = client.context(PROMPT)
    (child,) = client.fork(root)
    first = client.generate(root, max_tokens=30, ignore_eos=True)
    second = client.generate(child, max_tokens=50, ignore_eos=True)
    client.send(Adopt(root, child))
    on = client.generate(root, max_tokens=5, ignore_eos=True)
    assert client.output(on).finished.usage.prompt_tokens == 110
    order = [event for event in client.events if isinstance(event, Finished | Adopted)]
    places = {getattr(event, "request", "adopted"): place for place, event in enumerate(order)}
    assert places[first] < places["adopted"]
    assert places[second] < places["adopted"] < places[on]


def test_adopt_of_itself_of_strangers_and_of_failed_branches(client: Recorder) -> None:
    root = client.context(PROMPT)
    client.send(Adopt(root, root))
    assert client.failure(root).error.code == "invalid_request"
    client.events.clear()
    client.send(Adopt(root, 77))
    assert client.failure(root).error.code == "unknown_branch"
    client.events.clear()
    bad = client.context(TokenIds((1,) * 5000))
    assert client.failure(bad).error.code == "context_length_exceeded"
    client.send(Adopt(root, bad))
    assert client.failure(root).error.code == "failed_branch"


def test_releasing_the_parent_releases_the_child_that_it_would_adopt(client: Recorder) -> None:
    root = client.context(PROMPT)
    (child,) = client.fork(root)
    client.wait(Ready)
    request = client.generate(child, max_tokens=3000, ignore_eos=True)
    client.wait_for_tokens(request, 2)
    client.send(Adopt(root, child), Release((root,)))
    assert client.output(request).reason == "cancelled"
    assert client.engine.stats().branches == 0


def test_appends_are_answered_before_an_adopt(client: Recorder) -> None:
    root = client.context(PROMPT)
    (child,) = client.fork(root)
    client.run(child, max_tokens=5, ignore_eos=True)
    client.send(Append(root, TokenIds((1, 2, 3))), Append(child, TokenIds((4, 5))), Adopt(root, child))
    assert client.inspect(root).num_tokens == 67
    lengths = [(event.branch, event.num_tokens) for event in client.events if isinstance(event, Ready)]
    assert sorted(lengths) == [(root, 60), (root, 63), (child, 67)]


def test_the_pin_stays_with_the_branch_that_adopts(tiny_model: Path) -> None:
    with load(tiny_model, pool_tokens=640) as engine:
        client = Recorder(engine)
        root = client.context(TokenIds(tuple(range(150))), pin=True)
        (child,) = client.fork(root)
        client.send(Append(child, TokenIds((1, 2))), Adopt(root, child))
        client.inspect(root)
        for i in range(10):
            client.run(client.context(TokenIds((i,) * 150)), max_tokens=5)
        client.run(root, max_tokens=5)
        # What nobody else held was kept, too.
        assert engine.stats().recomputed_tokens == 0
        engine.close_session(client.session)
        assert_empty(engine)


# --- race ---------------------------------------------------------------------------------------------------------------


def test_the_first_to_end_win_and_the_others_go_at_once(client: Recorder) -> None:
    root = client.context(PROMPT)
    client.wait(Ready)
    free = available(client.engine)
    runners = client.fork(root, 8)
    requests = [client.generate(branch, max_tokens=20 + 60 * i, ignore_eos=True) for i, branch in enumerate(runners)]
    client.send(Race(tuple(runners), 900, 2))
    raced = client.wait(Raced)
    assert raced.winners == tuple(runners[:2])
    assert raced.losers == tuple(runners[2:])
    assert [client.output(request).reason for request in requests] == ["length"] * 2 + ["cancelled"] * 6
    # None went on past the step at which the race was over.
    assert max(len(client.output(request).tokens) for request in requests) <= 81
    client.send(Release(raced.winners))
    client.inspect(root)
    assert available(client.engine) == free


def test_a_race_that_too_few_can_win_is_over_too(client: Recorder) -> None:
    root = client.context(PROMPT)
    runners = client.fork(root, 4)
    requests = [client.generate(branch, max_tokens=500, ignore_eos=True) for branch in runners]
    client.send(Race(tuple(runners), 900, 2))
    for request in requests:
        client.wait_for_tokens(request, 2)
    client.send(Cancel(runners[0]), Release((runners[1],)), Cancel(runners[2]))
    raced = client.wait(Raced)
    assert raced.winners == (runners[3],)
    assert set(raced.losers) == {runners[0], runners[2]}


def test_bad_races_change_nothing(client: Recorder) -> None:
    root = client.context(PROMPT)
    first, second = client.fork(root, 2)
    for command, code in [
        (Race((first, second), 900, 3), "invalid_parameter"),
        (Race((), 900), "invalid_parameter"),
        (Race((first, 55), 900), "unknown_branch"),
        (Race((first, first), 900), "invalid_request"),
    ]:
        client.events.clear()
        client.send(command)
        assert client.wait(Failed).error.code == code
    assert client.run(first, max_tokens=3).tokens == client.run(second, max_tokens=3).tokens


def test_a_loser_that_was_to_be_adopted_fails_its_parent(client: Recorder) -> None:
    root = client.context(PROMPT)
    loser, winner = client.fork(root, 2)
    client.wait(Ready)
    client.generate(loser, max_tokens=300, ignore_eos=True)
    client.generate(winner, max_tokens=3, ignore_eos=True)
    client.send(Race((loser, winner), 900, 1), Adopt(root, loser))
    assert client.wait(Raced).winners == (winner,)
    assert client.failure(root).error.code == "released_branch"


def test_a_race_in_which_a_branch_has_failed_before(client: Recorder) -> None:
    good = client.context(PROMPT)
    bad = client.context(TokenIds((1,) * 5000))
    client.failure(bad)
    client.send(Race((bad, good), 900, 2))
    client.generate(good, max_tokens=3, ignore_eos=True)
    raced = client.wait(Raced)
    assert (raced.winners, raced.losers) == ((good,), (bad,))


# --- tenants and deadlines ----------------------------------------------------------------------------------------------


def test_a_tenants_limits(tiny_model: Path) -> None:
    tenants = {"small": {"max_branches": 3, "max_pages": 10, "tokens_per_minute": 400}}
    with load(tiny_model, scheduling={"tenants": tenants}) as engine:
        client, other = Recorder(engine, "small"), Recorder(engine)
        root = client.context(PROMPT)
        children = client.fork(root, 3)
        failed = client.failure(children[0]).error
        assert failed.code == "tenant_limit"
        assert "limit is 3" in failed.message
        assert client.failure(client.context(TokenIds((1,) * 161))).error.code == "tenant_limit"
        client.send(Release(tuple(children)))
        second = client.fork(root, 2)
        for branch in second:
            client.run(branch, max_tokens=50, ignore_eos=True)
        request = client.generate(root, max_tokens=60, ignore_eos=True)
        client.output(request)
        # 60 + 160 tokens; the last request may overdraw what is left.
        late = client.generate(root, max_tokens=250, ignore_eos=True)
        assert client.failure(root, late).error.code == "tenant_limit"
        assert len(other.run(other.context(PROMPT), max_tokens=300, ignore_eos=True).tokens) == 300


def test_a_tenant_at_its_limit_of_pages_waits_and_others_do_not(tiny_model: Path) -> None:
    with load(tiny_model, scheduling={"tenants": {"small": {"max_pages": 12}}, "reserve": "max"}) as engine:
        client, other = Recorder(engine, "small"), Recorder(engine)
        requests = [client.generate(client.context(TokenIds((i,) * 40)), max_tokens=60, ignore_eos=True) for i in range(6)]
        assert len(other.run(other.context(PROMPT), max_tokens=10, ignore_eos=True).tokens) == 10
        assert all(len(client.output(request).tokens) == 60 for request in requests)
        starts = sorted(client.output(request).finished.timing.queue_s for request in requests)
        assert starts[-1] > 0


def test_pinned_branches_count_for_a_tenants_pages(tiny_model: Path) -> None:
    tenants = {"small": {"max_pages": 10}}
    with load(tiny_model, blocked_timeout_s=0.2, scheduling={"tenants": tenants}) as engine:
        client, other = Recorder(engine, "small"), Recorder(engine)
        pinned = client.context(TokenIds((1,) * 100), pin=True)
        client.inspect(pinned)
        late = client.context(TokenIds((2,) * 100))
        assert other.run(other.context(PROMPT), max_tokens=5, ignore_eos=True).tokens
        error = client.failure(late).error
        assert error.code == "tenant_limit"
        assert "unpin" in error.message
        client.send(Pin(pinned, False))
        assert client.run(client.context(TokenIds((2,) * 100)), max_tokens=5, ignore_eos=True).tokens


def test_tokens_per_minute_says_when_to_try_again(tiny_model: Path) -> None:
    with load(tiny_model, scheduling={"default_tenant": {"tokens_per_minute": 60}}) as engine:
        client = Recorder(engine)
        branch = client.context(TokenIds((1,) * 10))
        client.run(branch, max_tokens=100, ignore_eos=True)
        late = client.generate(branch, max_tokens=5)
        error = client.failure(branch, late).error
        assert error.code == "tenant_limit"
        assert error.retry_after_s is not None
        assert 40 < error.retry_after_s < 60


def test_what_can_not_meet_its_deadline_is_dropped(tiny_model: Path) -> None:
    with load(tiny_model, max_batch=1) as engine:
        client = Recorder(engine)
        client.run(client.context(PROMPT), max_tokens=50, ignore_eos=True)
        long = client.generate(client.context(PROMPT), max_tokens=3000, ignore_eos=True)
        client.wait_for_tokens(long, 1)
        late = client.context("late")
        request = client.generate(late, max_tokens=5, service=Service(deadline_ms=1.0))
        error = client.failure(late, request).error
        assert error.code == "deadline_exceeded"
        assert not client.has_ended(long)
        assert engine.stats().dropped == 1
        client.send(Cancel(1))
        # The branch is as it was, and can be used.
        assert client.run(late, max_tokens=5, ignore_eos=True).tokens


def test_deadlines_and_timings_count_from_when_the_command_came(tiny_model: Path) -> None:
    """Also while it waits for its branch's turn."""
    with load(tiny_model) as engine:
        client = Recorder(engine)
        root = client.context(PROMPT)
        client.run(root, max_tokens=50, ignore_eos=True)
        first = client.generate(root, max_tokens=2000, ignore_eos=True)
        late = client.generate(root, max_tokens=5, service=Service(deadline_ms=20.0))
        last = client.generate(root, max_tokens=1, ignore_eos=True)
        assert client.failure(root, late).error.code == "deadline_exceeded"
        long, short = client.output(first).finished.timing, client.output(last).finished.timing
        assert short.total_s > 0.9 * long.total_s


def test_service_out_of_range(client: Recorder) -> None:
    root = client.context(PROMPT)
    request = client.generate(root, max_tokens=5, service=Service(priority=1000))
    error = client.failure(root, request).error
    assert (error.code, error.param) == ("invalid_parameter", "priority")


# --- cancellation in every state ----------------------------------------------------------------------------------------


def settle(client: Recorder, branch: int) -> Info:
    return client.inspect(branch)


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "preempted", "swapped", "held"])
@pytest.mark.parametrize("how", ["cancel", "release"])
def test_cancellation_frees_everything(tiny_model: Path, state: str, how: str) -> None:
    scheduling: dict[str, Any] = {"policy": "priority", "swap_bytes": 1 << 20 if state == "swapped" else 0}
    slots = 1 if state in ("queued", "preempted", "swapped") else 8
    with load(
        tiny_model, max_batch=slots, max_step_tokens=8 if state in ("prefilling", "held") else 256, scheduling=scheduling
    ) as engine:
        client = Recorder(engine)
        if state == "swapped":
            engine._loop.scheduler.seconds_to_compute = lambda num_tokens: 1e3  # type: ignore[method-assign]
        branch = client.context(TokenIds(tuple(range(250)) * 4) if state in ("prefilling", "held") else PROMPT)
        other = client.context(TokenIds(tuple(range(250)) * 4) if state == "held" else TokenIds((7,) * 30))
        if state in ("queued",):
            blocking = client.generate(other, max_tokens=3500, ignore_eos=True, service=Service(priority=1))
            client.wait_for_tokens(blocking, 1)
        request = client.generate(other if state == "held" else branch, max_tokens=3000, ignore_eos=True)
        if state in ("decoding", "preempted", "swapped"):
            client.wait_for_tokens(request, 20)
        if state in ("preempted", "swapped"):
            client.generate(other, max_tokens=3500, ignore_eos=True, service=Service(priority=9))
            while engine.stats().preemptions == 0:
                assert not client.has_ended(request)
                time.sleep(0.0005)
        target = other if state == "held" else branch
        client.send(Cancel(target) if how == "cancel" else Release((target,)))
        ended = client.wait(Finished, lambda event: event.request == request)
        assert ended.reason == "cancelled"
        engine.close_session(client.session)
        assert_empty(engine)
        if state == "swapped":
            swap = engine._loop.scheduler.cache._swap
            assert swap is not None
            assert swap.saved_pages > 0
            assert swap.num_free == (1 << 20) // engine.info.page_bytes


# --- fairness -----------------------------------------------------------------------------------------------------------


def test_a_storm_delays_another_tenant_by_a_step_and_a_chunk(tiny_model: Path) -> None:
    """500 branches of one tenant fill the batch; another's interactive request has its first token two steps later."""
    with load(tiny_model, max_batch=128, max_step_tokens=256, pool_tokens=65536) as engine:
        storm, other = Recorder(engine, "storm"), Recorder(engine, "other")
        root = storm.context(TokenIds(tuple(range(200))))
        for child in storm.fork(root, 500):
            storm.send(Append(child, TokenIds((child % 250, 1, 2))))
            storm.generate(child, max_tokens=400, ignore_eos=True)
        storm.wait_for_tokens(100, 5)
        scheduler = engine._loop.scheduler
        begun: list[int] = []
        real = scheduler.add

        def add(work: Any, now: float) -> None:
            begun.append(engine.stats().steps)
            real(work, now)

        scheduler.add = add  # type: ignore[method-assign]
        interactive = Service(qos="interactive")
        steps: list[int] = []
        sink = other._sink

        def counted(events: Any) -> None:
            steps.append(engine.stats().steps)
            sink(events)

        engine._loop.sessions[other.session].sink = counted
        request = 0
        other.send(Generate(other.context(PROMPT, service=interactive), request, SamplingParams(max_tokens=1), interactive))
        other.output(request)
        assert steps[-1] - begun[0] <= 2
        assert engine.stats().running > 100
        engine.close_session(storm.session)
        engine.close_session(other.session)
        assert_empty(engine)


def test_a_users_own_policy_runs_the_engine(tiny_model: Path) -> None:
    """Last come, first served, by import path; it's asked when work comes, never for a token."""
    path = "tests.engine.scheduler.test_parts:Backwards"
    with load(tiny_model, max_batch=1, max_step_tokens=256, scheduling={"policy": path}) as engine:
        client = Recorder(engine)
        branches = [client.context(TokenIds((i + 1,) * 20)) for i in range(6)]
        for branch in branches:
            client.inspect(branch)
        Backwards.asked = 0
        client.send(*(Generate(branch, branch, SamplingParams(max_tokens=50, ignore_eos=True)) for branch in branches))
        for branch in branches:
            client.output(branch)
        ended = [event.request for event in client.events if isinstance(event, Finished)]
        assert ended == branches[::-1]
        assert Backwards.asked == 6
