"""The engine through its own interface, on a tiny random model: forks, order, errors, nothing lost, nothing leaked."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import COMPUTED, assert_empty
from tests.engine.engines import load as load_engine
from tests.engine.recorder import Recorder

from branchline.engine.engine import Engine
from branchline.engine.errors import (
    ConfigError,
    EngineClosedError,
    EngineOverloadedError,
    SessionNotFoundError,
)
from branchline.engine.types import (
    Append,
    Attach,
    Cancel,
    Chat,
    Command,
    Context,
    Delta,
    Failed,
    Finished,
    Fork,
    Forked,
    Generate,
    Message,
    Ready,
    Release,
    SamplingParams,
    Text,
    TokenIds,
)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


def load(model: Path, **settings: Any) -> Engine:
    """Here a fresh sequence is to be a fresh one: tests of the prefix cache have their own engines."""
    return load_engine(model, scheduling={"prefix_cache": False}, **settings)


@pytest.fixture(scope="module", params=COMPUTED)
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(tiny_model, **COMPUTED[request.param]) as engine:
        assert engine.info.attention == request.param
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Recorder]:
    recorder = Recorder(engine)
    yield recorder
    engine.close_session(recorder.session)
    assert_empty(engine)


# --- forks say what fresh sequences say ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 18, 31, 32, 33, 34])
def test_fork_equals_fresh_sequence(client: Recorder, num_tokens: int) -> None:
    """Children of a prefix of any length generate what a separate context with the same tokens generates."""
    prefix = tuple(range(40, 40 + num_tokens))
    root = client.context(TokenIds(prefix))
    children = client.fork(root, 3)
    requests = []
    for i, child in enumerate(children):
        client.send(Append(child, TokenIds((7 + i, 9))))
        requests.append(client.generate(child, max_tokens=40))
    parent = client.generate(root, max_tokens=40)
    forked = [client.output(request).tokens for request in [*requests, parent]]
    tails: list[tuple[int, ...]] = [(7, 9), (8, 9), (9, 9), ()]
    fresh = [client.run(client.context(TokenIds(prefix + tail)), max_tokens=40).tokens for tail in tails]
    assert forked == fresh


def test_nested_forks_and_wide_fan_out(client: Recorder) -> None:
    """Five levels deep, 64 wide at the last: each leaf's tokens equal those of its own history in a fresh context."""
    history: tuple[int, ...] = tuple(range(1, 20))
    branch = client.context(TokenIds(history))
    for level in range(5):
        (branch,) = client.fork(branch, 1)
        added = tuple(range(50 + level, 50 + level + 7))
        client.send(Append(branch, TokenIds(added)))
        history += added
    leaves = client.fork(branch, 64)
    requests = []
    for i, leaf in enumerate(leaves):
        client.send(Append(leaf, TokenIds((i, 3))))
        requests.append(client.generate(leaf, max_tokens=20))
    outputs = [client.output(request).tokens for request in requests]
    for i in (0, 1, 31, 63):
        assert outputs[i] == client.run(client.context(TokenIds((*history, i, 3))), max_tokens=20).tokens
    assert len({tuple(tokens) for tokens in outputs}) > 32


def test_parent_and_siblings_go_on_after_a_fork_in_mid_generation(client: Recorder) -> None:
    """A branch that is forked while it generates isn't disturbed, and the child goes on from where it stood."""
    root = client.context(PROMPT)
    undisturbed = client.run(client.context(PROMPT), max_tokens=200, ignore_eos=True).tokens
    request = client.generate(root, max_tokens=200, ignore_eos=True)
    client.wait(Delta, lambda delta: delta.request == request)
    (child,) = client.fork(root)
    child_request = client.generate(child, max_tokens=200, ignore_eos=True)
    assert client.output(request).tokens == undisturbed
    child_tokens = client.output(child_request).tokens
    # The fork waits for the parent's generation, as commands of one branch take effect in order.
    longer = client.run(client.context(PROMPT), max_tokens=400, ignore_eos=True).tokens
    assert child_tokens == longer[200:]


def test_siblings_do_not_see_each_other(client: Recorder) -> None:
    root = client.context(PROMPT)
    alone = client.run(*client.fork(root, 1), max_tokens=30).tokens
    first, second = client.fork(root, 2)
    client.send(Append(first, Text("something else entirely")))
    requests = client.generate(first, max_tokens=30), client.generate(second, max_tokens=30)
    assert client.output(requests[1]).tokens == alone
    assert client.output(requests[0]).tokens != alone


def test_batched_streams_equal_separate_runs(client: Recorder) -> None:
    prompts = [PROMPT[: 5 + 11 * i] for i in range(8)]
    together = [client.generate(client.context(prompt), max_tokens=50) for prompt in prompts]
    outputs = [client.output(request).tokens for request in together]
    assert outputs == [client.run(client.context(prompt), max_tokens=50).tokens for prompt in prompts]


@pytest.mark.parametrize("max_step_tokens", [128, 129, 1000])
def test_chunked_prefill_changes_nothing(tiny_model: Path, client: Recorder, max_step_tokens: int) -> None:
    prompt = PROMPT * 4
    expected = client.run(client.context(prompt), max_tokens=30).tokens
    with load(tiny_model, max_step_tokens=max_step_tokens) as engine:
        other = Recorder(engine)
        assert other.run(other.context(prompt), max_tokens=30).tokens == expected


# --- sharing is real ----------------------------------------------------------------------------------------------------


def test_a_fork_shares_the_pages_of_its_prefix(client: Recorder) -> None:
    root = client.context(TokenIds(tuple(range(200)) * 2))
    client.wait(Ready, lambda ready: ready.branch == root)
    before = client.engine.stats()
    children = client.fork(root, 100)
    infos = [client.inspect(child) for child in children]
    after = client.engine.stats()
    assert after.pages_free == before.pages_free
    assert after.copied_bytes == before.copied_bytes
    assert after.forks == before.forks + 100
    assert {(info.num_tokens, info.shared_pages, info.private_pages) for info in infos} == {(400, 25, 0)}


def test_ready_tells_what_was_computed(client: Recorder) -> None:
    root = client.context(TokenIds(tuple(range(100))))
    ready = client.wait(Ready, lambda event: event.branch == root)
    assert (ready.num_tokens, ready.computed_tokens) == (100, 100)
    (child,) = client.fork(root)
    client.send(Append(child, TokenIds((1, 2, 3))))
    ready = client.wait(Ready, lambda event: event.branch == child)
    assert (ready.num_tokens, ready.computed_tokens) == (103, 3)
    usage = client.run(child, max_tokens=4).finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.shared_tokens) == (103, 4, 99)


def test_a_deep_chain_of_forks_in_one_batch(client: Recorder) -> None:
    depth = 400
    commands: list[Command] = [Context(0, TokenIds((1, 2, 3)))]
    for i in range(depth):
        commands += [Fork(i, i + 1), Append(i + 1, TokenIds((i % 250,)))]
    commands.append(Generate(depth, 0, SamplingParams(temperature=0, max_tokens=5)))
    client.send(*commands)
    tokens = client.output(0).tokens
    client._next_branch, client._next_request = depth + 1, 1
    flat = client.context(TokenIds((1, 2, 3, *(i % 250 for i in range(depth)))))
    assert client.run(flat, max_tokens=5).tokens == tokens
    client.send(Release(tuple(range(depth + 1))))


# --- order, release, cancel ---------------------------------------------------------------------------------------------


def test_children_live_on_when_their_parent_is_released_at_once(client: Recorder) -> None:
    """Everything goes out in one batch, so the parent is released before its own prefill has begun."""
    expected = client.run(client.context(PROMPT), max_tokens=20).tokens
    root, child, grandchild = client._next_branch, client._next_branch + 1, client._next_branch + 2
    client._next_branch += 3
    client.send(
        Context(root, Text(PROMPT)),
        Fork(root, child),
        Fork(child, grandchild),
        Release((root, child)),
        Generate(grandchild, 900, SamplingParams(temperature=0, max_tokens=20)),
    )
    assert client.output(900).tokens == expected
    client.send(Release((grandchild,)))


def test_append_after_generation_continues_it(client: Recorder) -> None:
    branch = client.context(TokenIds((5, 6, 7)))
    first = client.run(branch, max_tokens=10, ignore_eos=True).tokens
    client.send(Append(branch, TokenIds((8, 9))))
    second = client.run(branch, max_tokens=10, ignore_eos=True).tokens
    fresh = client.run(client.context(TokenIds((5, 6, 7, *first, 8, 9))), max_tokens=10, ignore_eos=True).tokens
    assert second == fresh


def test_cancel_stops_a_generation_and_keeps_what_came(client: Recorder) -> None:
    branch = client.context(PROMPT)
    expected = client.run(client.context(PROMPT), max_tokens=600, ignore_eos=True).tokens
    request = client.generate(branch, max_tokens=600, ignore_eos=True)
    client.wait(Delta, lambda delta: delta.request == request)
    client.send(Cancel(branch))
    output = client.output(request)
    assert output.reason == "cancelled"
    assert 1 <= len(output.tokens) < 600
    more = client.run(branch, max_tokens=600 - len(output.tokens), ignore_eos=True)
    assert output.tokens + more.tokens == expected


def test_cancel_of_queued_generations(client: Recorder) -> None:
    branch = client.context(PROMPT)
    running = client.generate(branch, max_tokens=1000, ignore_eos=True)
    queued = [client.generate(branch, max_tokens=10) for _ in range(3)]
    client.wait(Delta, lambda delta: delta.request == running)
    client.send(Cancel(branch))
    assert {client.output(request).reason for request in [running, *queued]} == {"cancelled"}


def test_release_stops_within_two_steps(client: Recorder) -> None:
    branch = client.context(PROMPT)
    request = client.generate(branch, max_tokens=2000, ignore_eos=True)
    client.wait(Delta, lambda delta: delta.request == request)
    client.send(Release((branch,)))
    assert client.output(request).reason == "cancelled"
    stats = client.engine.stats()
    assert (stats.running, stats.branches) == (0, 0)


def test_release_ends_generations_that_wait(client: Recorder) -> None:
    branch = client.context(PROMPT)
    running = client.generate(branch, max_tokens=2000, ignore_eos=True)
    waiting = client.generate(branch, max_tokens=5)
    client.wait(Delta, lambda delta: delta.request == running)
    client.send(Release((branch,)))
    assert {client.output(request).reason for request in (running, waiting)} == {"cancelled"}


def test_closing_a_session_frees_everything_in_any_state(engine: Engine) -> None:
    for state in range(6):
        client = Recorder(engine)
        root = client.context(PROMPT * 5)
        if state >= 1:
            children = client.fork(root, 5)
            for child in children:
                client.generate(child, max_tokens=500, ignore_eos=True)
        if state >= 2:
            client.wait(Ready)
        if state >= 3:
            client.wait(Delta)
        if state >= 4:
            client.send(Release((root,)))
        if state >= 5:
            client.send(Cancel(children[0]), Append(children[1], Text("x" * 5000)))
        engine.close_session(client.session)
        assert_empty(engine)
        with pytest.raises(SessionNotFoundError):
            client.send(Release((root,)))


def test_attach_forks_a_branch_of_another_session(client: Recorder) -> None:
    root = client.context(PROMPT)
    expected = client.run(*client.fork(root), max_tokens=20).tokens
    other = Recorder(client.engine)
    other.send(Attach(0, client.session, root))
    assert other.run(0, max_tokens=20).tokens == expected
    client.send(Release((root,)))
    assert other.run(0, max_tokens=5).tokens
    other.send(Attach(1, client.session, root))
    assert other.failure(1).error.code == "released_branch"
    other.send(Attach(2, client.session, 10_000))
    assert other.failure(2).error.code == "unknown_branch"
    other.send(Attach(3, "0" * 32, 0))
    assert other.failure(3).error.code == "unknown_branch"
    client.engine.close_session(other.session)


# --- chat ---------------------------------------------------------------------------------------------------------------


def message(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def test_chat_turns_append_only_what_is_new(client: Recorder) -> None:
    """A second turn on a branch equals one rendered whole, and computes only what is new."""
    question, follow_up = message("user", "hello there"), message("user", "and then?")
    branch = client.context(Chat(messages=(question,), add_generation_prompt=True))
    reply = client.run(branch, max_tokens=12, ignore_eos=True)
    client.send(Append(branch, Chat(messages=(follow_up,), add_generation_prompt=True)))
    second = client.run(branch, max_tokens=12)
    turns = [event.computed_tokens for event in client.events if isinstance(event, Ready) and event.branch == branch]
    tokens = client.engine.count_tokens
    whole = tokens(Chat(messages=(question,), add_generation_prompt=True)), len(reply.tokens)
    assert turns[0] == whole[0]
    assert turns[1] == tokens(Text("<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"))
    assert second.finished.usage.prompt_tokens == whole[0] + whole[1] + turns[1]


# --- bad input: a typed error on the branch concerned, nothing else is touched ------------------------------------------


def test_errors_name_the_branch_and_leave_others_alone(client: Recorder) -> None:
    good = client.context(PROMPT)
    request = client.generate(good, max_tokens=100, ignore_eos=True)
    too_long = client.context(TokenIds((1,) * 5000))
    assert client.failure(too_long).error.code == "context_length_exceeded"
    child = client.fork(too_long)[0]
    assert client.failure(child).error.code == "failed_branch"
    failed = client.generate(too_long, max_tokens=3)
    assert client.failure(too_long, failed).error.code == "failed_branch"
    foreign = client.context(TokenIds((1, 2, 9999)))
    assert client.failure(foreign).error.code == "invalid_parameter"
    client.send(Release((4242,)))
    assert client.failure(4242).error.code == "unknown_branch"
    client.send(Generate(4242, 777))
    assert client.failure(4242, 777).error.code == "unknown_branch"
    assert len(client.output(request).tokens) == 100


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
def test_parameters_out_of_range(client: Recorder, params: dict[str, Any], param: str) -> None:
    branch = client.context(PROMPT)
    request = client.generate(branch, **params)
    error = client.failure(branch, request).error
    assert (error.code, error.param) == ("invalid_parameter", param)
    assert client.run(branch, max_tokens=3).tokens


def test_use_after_release(client: Recorder) -> None:
    branch = client.context(PROMPT)
    client.send(Release((branch,)))
    request = client.generate(branch, max_tokens=3)
    assert client.failure(branch, request).error.code == "released_branch"
    child = client.fork(branch)[0]
    assert client.failure(child).error.code == "released_branch"
    client.send(Append(branch, Text("x")))
    client.send(Release((branch,)))
    client.inspect(client.context(PROMPT))
    failures = [event for event in client.events if isinstance(event, Failed) and event.branch == branch]
    assert [event.error.code for event in failures] == ["released_branch"] * 3


def test_an_id_cannot_be_minted_twice(client: Recorder) -> None:
    branch = client.context(PROMPT)
    client.send(Context(branch, Text("again")))
    assert client.failure(branch).error.code == "duplicate_branch"


def test_prompt_and_output_must_fit_the_context(client: Recorder) -> None:
    branch = client.context(TokenIds((1,) * 4000))
    request = client.generate(branch, max_tokens=97)
    error = client.failure(branch, request).error
    assert error.code == "context_length_exceeded"
    assert "4000" in error.message
    assert "4096" in error.message
    output = client.run(branch, max_tokens=96, ignore_eos=True)
    assert len(output.tokens) == 96
    request = client.generate(branch)
    assert client.failure(branch, request).error.code == "context_length_exceeded"


def test_empty_branch_cannot_generate(client: Recorder) -> None:
    branch = client.context("")
    request = client.generate(branch, max_tokens=2)
    assert client.failure(branch, request).error.code == "invalid_request"


# --- memory -------------------------------------------------------------------------------------------------------------


def test_pool_too_small_for_the_prompt(tiny_model: Path) -> None:
    with load(tiny_model, pool_tokens=256) as engine:
        client = Recorder(engine)
        branch = client.context(TokenIds((1,) * 300))
        error = client.failure(branch).error
        assert error.code == "pool_too_small"
        assert "19 pages" in error.message
        assert "16 in all" in error.message
        fits = client.context(TokenIds((1,) * 200))
        request = client.generate(fits, max_tokens=100)
        assert client.failure(fits, request).error.code == "pool_too_small"
        assert client.run(fits, max_tokens=50, ignore_eos=True).tokens
        engine.close_session(client.session)
        assert_empty(engine)


def test_more_work_than_memory_waits_for_its_turn(tiny_model: Path) -> None:
    """Forty requests over a pool that holds about four: all end with the right tokens, nobody overtakes."""
    with load(tiny_model, pool_tokens=640) as engine:
        client = Recorder(engine)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for i in range(40):
            client.send(Context(i, TokenIds((i + 1,) * 50)), Generate(i, i, params))
            if i % 5 == 4:
                client.send(Release((i,)))
        kept = [i for i in range(40) if i % 5 != 4]
        for i in kept:
            assert len(client.output(i).tokens) == 60
            client.send(Release((i,)))
        ended = [event.request for event in client.events if isinstance(event, Finished) and event.reason == "length"]
        assert set(kept) <= set(ended)
        # At most six fit at once, so one that came eight later can't have ended earlier.
        order = {request: place for place, request in enumerate(ended)}
        assert all(order[i] < order[j] for i in kept for j in kept if j - i >= 8)
        engine.close_session(client.session)
        assert_empty(engine)


def test_pool_held_by_pinned_branches_is_a_clear_error(tiny_model: Path) -> None:
    with load(tiny_model, pool_tokens=256, blocked_timeout_s=0.2) as engine:
        client = Recorder(engine)
        held = client.context(TokenIds((1,) * 200), pin=True)
        client.wait(Ready)
        blocked = client.context(TokenIds((2,) * 200))
        error = client.failure(blocked).error
        assert error.code == "pool_exhausted"
        assert "release" in error.message
        client.send(Release((held,)))
        assert client.run(client.context(TokenIds((2,) * 200)), max_tokens=5).tokens
        engine.close_session(client.session)
        assert_empty(engine)


def test_queue_is_bounded(tiny_model: Path) -> None:
    with load(tiny_model, max_waiting=10, max_batch=1) as engine:
        client = Recorder(engine)
        branches = [client.context(PROMPT) for _ in range(12)]
        with pytest.raises(EngineOverloadedError, match="at most 10"):
            client.send(*(Generate(branch, i) for i, branch in enumerate(branches)))
        client.send(*(Generate(branch, i, SamplingParams(max_tokens=3)) for i, branch in enumerate(branches[:10])))
        for i in range(10):
            assert client.output(i).tokens


# --- sampling through the engine ----------------------------------------------------------------------------------------


def test_seeded_sampling_does_not_depend_on_the_batch(client: Recorder) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "max_tokens": 40, "ignore_eos": True}
    root = client.context(PROMPT)
    crowd = [client.generate(branch, temperature=1.0, max_tokens=80, ignore_eos=True) for branch in client.fork(root, 20)]
    together = client.run(client.context("abc"), **params).tokens
    for request in crowd:
        client.output(request)
    assert client.run(client.context("abc"), **params).tokens == together


def test_siblings_with_one_seed_differ(client: Recorder) -> None:
    root = client.context(PROMPT)
    requests = [client.generate(child, temperature=1.0, seed=5, max_tokens=30) for child in client.fork(root, 4)]
    assert len({tuple(client.output(request).tokens) for request in requests}) == 4


def test_logprobs(client: Recorder) -> None:
    output = client.run(client.context(PROMPT), max_tokens=5, logprobs=3, ignore_eos=True)
    assert len(output.deltas) >= 5
    for delta in output.deltas[:5]:
        assert delta.logprobs is not None
        (position,) = delta.logprobs
        assert position.chosen.token == delta.tokens[0] == position.top[0].token
        assert len(position.top) == 3
        assert 0 >= position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob


def test_stop_string_and_stop_token(client: Recorder) -> None:
    free = client.run(client.context(PROMPT), max_tokens=60, ignore_eos=True)
    text = free.text
    stop = text[20:22]
    stopped = client.run(client.context(PROMPT), max_tokens=60, ignore_eos=True, stop=(stop,))
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.reason, stopped.finished.stop) == ("stop", stop)
    token = free.tokens[10]
    stopped = client.run(client.context(PROMPT), max_tokens=60, ignore_eos=True, stop_token_ids=(token,))
    assert stopped.tokens == free.tokens[: free.tokens.index(token) + 1]
    assert (stopped.reason, stopped.finished.stop) == ("stop", token)


# --- the engine's own life ----------------------------------------------------------------------------------------------


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model) as engine:
        client = Recorder(engine)
        branch = client.context(PROMPT)
        client.wait(Ready)
        expected = client.run(client.fork(branch)[0], max_tokens=30, ignore_eos=True).tokens
        runner = engine._loop._runner
        real, calls = runner.run, 0

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 6:
                raise RuntimeError("a kernel failed")
            return real(*args)

        monkeypatch.setattr(runner, "run", failing)
        request = client.generate(branch, max_tokens=30, ignore_eos=True)
        error = client.failure(branch, request).error
        assert error.code == "engine_step_failed"
        assert "a kernel failed" in error.message
        engine.check()
        assert client.run(branch, max_tokens=30, ignore_eos=True).tokens == expected
        engine.close_session(client.session)
        assert_empty(engine)


def test_silent_sessions_are_closed(tiny_model: Path) -> None:
    with load(tiny_model, session_timeout_s=0.3) as engine:
        client = Recorder(engine)
        client.context(PROMPT)
        client.wait(Ready)
        for _ in range(10):
            time.sleep(0.1)
            engine.touch(client.session)
        assert engine.stats().sessions == 1
        deadline = time.monotonic() + 5
        while engine.stats().sessions and time.monotonic() < deadline:
            time.sleep(0.05)
        assert_empty(engine)
        with pytest.raises(SessionNotFoundError):
            engine.touch(client.session)


def test_closed_engine_refuses(tiny_model: Path) -> None:
    engine = load(tiny_model)
    client = Recorder(engine)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        client.send(Context(0, Text("x")))
    with pytest.raises(EngineClosedError):
        engine.open_session(lambda _: None)


def test_a_raising_sink_closes_its_own_session_only(engine: Engine, client: Recorder) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("client bug")

    session = engine.open_session(broken)
    engine.submit(session, (Context(0, Text("x")), Generate(0, 0)))
    assert client.run(client.context(PROMPT), max_tokens=20).tokens
    with pytest.raises(SessionNotFoundError):
        engine.touch(session)


def test_one_batch_a_step_for_all_branches(client: Recorder) -> None:
    root = client.context(PROMPT)
    requests = [client.generate(child, max_tokens=20, ignore_eos=True) for child in client.fork(root, 50)]
    for request in requests:
        client.output(request)
    largest = max(len([event for event in batch if isinstance(event, Delta)]) for batch in client.batches)
    assert largest >= 50
    assert client.wait(Forked).count == 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool_tokns": 5}, "did you mean 'pool_tokens'"),
        ({"max_batch": 0}, "max_batch = 0"),
        ({"max_batch": 64, "max_step_tokens": 32}, "at least max_batch"),
        ({"dtype": "int3"}, "int3"),
        ({"pool_bytes": 10}, "one page takes"),
        ({"attention": "nonesuch"}, "nonesuch"),
        ({"context_length": 100_000}, "context_length"),
    ],
)
def test_settings_out_of_range(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny_model, **settings)


def test_a_dropped_engine_stops_its_thread(tiny_model: Path) -> None:
    engine = load(tiny_model)
    client = Recorder(engine)
    client.run(client.context(PROMPT), max_tokens=3)
    thread = engine._thread
    client.engine = None  # type: ignore[assignment]
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_interpreter_exits_cleanly_with_a_busy_engine(tiny_model: Path) -> None:
    program = f"""
from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.types import Context, Generate, SamplingParams, TokenIds
engine = Engine.load(EngineConfig(model={str(tiny_model)!r}, pool_tokens=8192))
session = engine.open_session(lambda events: None)
engine.submit(session, (Context(0, TokenIds((1, 2))), Generate(0, 0, SamplingParams(max_tokens=4000, ignore_eos=True))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
