"""What the SDK promises, the same over every transport."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from tests.agents.harness import Way, run, until
from tests.agents.scripted_app import RemoteEngine

from branchline.agents import (
    Branch,
    BranchHandle,
    BranchlineError,
    ConnectError,
    Message,
    SamplingParams,
    Session,
    SessionClosedError,
    connect,
)
from branchline.agents.testing import ScriptedEngine
from branchline.engine.errors import (
    ContextLengthError,
    FailedBranchError,
    ForeignHandleError,
    InvalidParameterError,
    ReleasedBranchError,
    UnknownBranchError,
)
from branchline.orchestrator.protocol import APP_NAME, ENGINE_DEPLOYMENT


async def nothing_runs(way: Way) -> None:
    await until(lambda: way.engine.stats().running == 0, "the engine stopped generating")


def test_a_generation_gives_the_whole_result(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            assert session.info.name == "scripted"
            result = await session.context("one two three").generate(temperature=0)
            assert result.text == str(result) == " heard 3 words, the last is three."
            assert len(result.tokens) == 7
            assert result.reason == "stop"
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 7)
            assert result.timing.total_s >= result.timing.first_token_s > 0

    run(main())


def test_a_stream_joined_is_the_result(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            stream = session.context("one two").stream()
            pieces = [piece async for piece in stream]
            assert len(pieces) == 7
            assert "".join(pieces) == (await stream.result()).text == " heard 2 words, the last is two."
            assert stream.done
            assert stream.tokens == (await stream.result()).tokens

    run(main())


def test_forks_are_used_without_a_single_await(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("the document")
            children = root.fork(8)
            generations = [child.append(f" question{i}").generate() for i, child in enumerate(children)]
            sent_before = session.num_sends
            results = await asyncio.gather(*generations)
            assert [result.text.split()[-1] for result in results] == [f"question{i}." for i in range(8)]
            assert (sent_before, session.num_sends) == (0, 1)

    run(main())


def test_fork_gives_one_or_a_list(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("a b c")
            child, (only,) = root.fork(), root.fork(1)
            assert isinstance(child, Branch)
            assert len({root.id, child.id, only.id}) == 3
            assert await child.ready() is child
            assert child.forked is not None
            assert child.forked.parent == root.id
            info = await only.inspect()
            assert (info.num_tokens, info.shared_tokens, info.depth) == (3, 3, 1)
            for wrong in (0, -1, True, 2.0, "2"):
                with pytest.raises(InvalidParameterError, match="n = "):
                    root.fork(wrong)  # type: ignore[arg-type]

    run(main())


def test_adopt_makes_the_childs_state_the_parents(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("one two")
            child, other = root.fork(2)
            child.append(" three")
            answer = child.generate(max_tokens=2)
            assert root.adopt(child) is root
            assert child.released
            assert (await root.append(" end").generate()).text.endswith("the last is end.")
            assert (await answer).text == " heard 3"
            assert (await root.inspect()).num_tokens > (await other.inspect()).num_tokens + 3
            with pytest.raises(ReleasedBranchError):
                child.generate()
            with pytest.raises(ReleasedBranchError):
                root.adopt(child)
            with pytest.raises(InvalidParameterError, match="itself"):
                root.adopt(root)
            async with way.connect() as elsewhere:
                with pytest.raises(ForeignHandleError):
                    root.adopt(elsewhere.context("a"))

    run(main())


def test_a_race_keeps_the_first_and_releases_the_others(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("one two")
            runners = root.fork(4)
            generations = [runner.generate(max_tokens=2 + 2 * i) for i, runner in enumerate(runners)]
            assert await session.race(runners, 2) == runners[:2]
            assert [runner.released for runner in runners] == [False, False, True, True]
            reasons = [(await generation).reason for generation in generations]
            assert reasons[:2] == ["length", "length"]
            assert set(reasons[2:]) <= {"cancelled", "length", "stop"}
            with pytest.raises(ReleasedBranchError):
                await session.race(runners)
            with pytest.raises(InvalidParameterError, match="winners = 3"):
                await session.race(runners[:2], 3)
            with pytest.raises(InvalidParameterError, match="winners = 1"):
                await session.race([])

    run(main())


def test_prune_releases_those_that_it_is_told_to(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("one two")
            branches = root.fork(5)
            kept = session.prune(branches, lambda branch: branch.id % 2 == 0)
            assert [branch.released for branch in branches] == [branch not in kept for branch in branches]
            assert all(branch.id % 2 for branch in kept)
            assert (await kept[0].generate()).text
            await until(lambda: way.engine.stats().branches == 1 + len(kept), "the pruned branches are gone")

    run(main())


def test_service_is_checked_at_the_call_and_travels(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("one two", pin=True, priority=3, qos="interactive", deadline_ms=60_000.0)
            result = await root.append(" x", qos="batch").generate(temperature=0, priority=-5, qos="standard")
            assert result.timing.preemptions == 0
            assert (await root.pin().unpin().inspect()).num_tokens > 3
            with pytest.raises(InvalidParameterError, match="priority = 101"):
                root.generate(priority=101)
            with pytest.raises(InvalidParameterError, match="qos"):
                root.append("y", qos="urgent")  # type: ignore[arg-type]
            with pytest.raises(InvalidParameterError, match="did you mean 'priority'"):
                root.generate(priorty=1)  # type: ignore[call-arg]
            with pytest.raises(InvalidParameterError, match="unknown parameter 'speed'"):
                session.context("y", speed=1)  # type: ignore[call-arg]
            with pytest.raises(InvalidParameterError, match="deadline_ms"):
                root.generate(deadline_ms=0.0)

    run(main())


def test_five_hundred_forks_are_one_batch(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = await session.context("a b").ready()
            sends = session.num_sends
            children = [root.fork() for _ in range(500)]
            generations = [child.append(f" {i}").generate(max_tokens=2) for i, child in enumerate(children)]
            results = await asyncio.gather(*generations)
            assert session.num_sends == sends + 1
            assert all(result.text == " heard 3" for result in results)

    run(main())


def test_commands_of_one_branch_keep_their_order(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            branch = session.context("a")
            for i in range(50):
                branch.append(f" w{i}")
                if i % 7 == 0:
                    await asyncio.sleep(0)
            first, second = branch.generate(max_tokens=3), branch.append(" again").generate()
            assert (await first).text == " heard 51 words,"
            assert (await second).text == " heard 55 words, the last is again."

    run(main())


def test_a_parent_may_be_released_or_dropped_right_after_the_fork(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            with session.context("a b") as root:
                children = root.fork(2)
            assert root.released
            grandchild = children[0].fork()
            del children[0]
            assert (await grandchild.generate()).text == " heard 2 words, the last is b."
            assert (await session.context("x").fork().append(" y").generate()).text == " heard 2 words, the last is y."
            await children[0].ready()

    run(main())


def test_messages_are_answered_and_prefixes_are_not(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            result = await session.context([{"role": "user", "content": "hello"}]).generate()
            assert result.text.endswith("the last is assistant:.")
            root = session.context(Message(role="user", content="document"), add_generation_prompt=False)
            assert (await root.fork().generate()).text.endswith("the last is document.")

    run(main())


def test_stop_strings_and_max_tokens(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("a b")
            stream = root.fork().stream(stop="words, the")
            assert [piece async for piece in stream] == [" heard", " 2", " "]
            assert (await stream.result()).stop == "words, the"
            result = await root.fork().generate(SamplingParams(max_tokens=9, stop=("never",)), max_tokens=2)
            assert (result.text, result.reason) == (" heard 2", "length")

    run(main())


def test_text_keeps_every_unicode_line_end(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            odd = "a\u2028b\u2029c\x85d\x0be\x0cf\U0001f600g\r\nh"
            stream = session.context(odd).stream()
            assert "".join([piece async for piece in stream]).endswith("h.")
            word = "x\u2028y".replace("\u2028", "\u200b\U0001f469\u200d\U0001f4bb")
            assert (await session.context(word).generate()).text == f" heard 1 words, the last is {word}."

    run(main())


# --- errors -------------------------------------------------------------------------------------------------------------


def test_an_error_is_raised_by_the_call_that_it_concerns(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context("a")
            good, bad = root.fork().generate(), root.fork().append(" bad").generate()
            outcomes = await asyncio.gather(good, bad, return_exceptions=True)
            assert getattr(outcomes[0], "text", None) == " heard 1 words, the last is a."
            assert isinstance(outcomes[1], ContextLengthError)
            assert outcomes[1].param == "max_tokens"
            with pytest.raises(ContextLengthError):
                await bad
            assert (await root.generate()).reason == "stop"

    run(main())


def test_a_failed_context_poisons_the_branch_and_its_children(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            root = session.context([10**6])
            child = root.fork()
            generation = root.generate()
            with pytest.raises(InvalidParameterError, match="were given out"):
                await root.ready()
            with pytest.raises(FailedBranchError) as again:
                await root.ready()
            assert isinstance(again.value.__cause__, InvalidParameterError)
            with pytest.raises(FailedBranchError) as failed:
                await generation
            assert isinstance(failed.value.__cause__, InvalidParameterError)
            with pytest.raises(FailedBranchError):
                await child.ready()
            with pytest.raises(FailedBranchError):
                await child.fork().generate()
            with pytest.raises(FailedBranchError):
                await root.inspect()
            assert (await session.context("fine").generate()).reason == "stop"

    run(main())


def test_a_released_branch_is_refused_at_once(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            branch = session.context("a")
            branch.release()
            calls: list[Any] = [branch.release, branch.fork, branch.generate, branch.stream, branch.cancel]
            calls += [lambda: branch.append("b"), lambda: branch.handle, lambda: session.release(branch)]
            for call in calls:
                with pytest.raises(ReleasedBranchError):
                    call()
            for wait in (branch.ready, branch.inspect, branch.share):
                with pytest.raises(ReleasedBranchError):
                    await wait()
            async with session.context("b") as other:
                other.release()

    run(main())


def test_a_release_wakes_who_waits(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            branch = session.context("endless")
            running = branch.stream()
            queued = branch.generate()
            appended = asyncio.ensure_future(branch.append(" more").ready())
            assert await anext(running) == " 0"
            branch.release()
            assert (await running.result()).reason == "cancelled"
            with pytest.raises(ReleasedBranchError):
                await queued
            with pytest.raises(ReleasedBranchError):
                await appended
            await nothing_runs(way)

    run(main())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["ok", 5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_bad_parameters_are_refused_at_the_call(way: Way, settings: dict[str, Any], named: str) -> None:
    async def main() -> None:
        async with way.connect() as session:
            branch = session.context("a")
            for call in (branch.generate, branch.stream):
                with pytest.raises(InvalidParameterError, match=named) as err:
                    call(**settings)
                assert err.value.param == named
            if named == "temprature":
                assert "did you mean 'temperature'" in err.value.message
            assert (await branch.generate()).reason == "stop"

    run(main())


@pytest.mark.parametrize("content", [[], [1, -2], [1, "a"], 5, None, b"ab", {"content": "x"}, {"role": "user", "conten": "x"}])
def test_bad_content_is_refused_at_the_call(way: Way, content: Any) -> None:
    async def main() -> None:
        async with way.connect() as session:
            with pytest.raises(InvalidParameterError, match="content"):
                session.context(content)
            with pytest.raises(InvalidParameterError, match="content"):
                session.context("a").append(content)
            with pytest.raises(InvalidParameterError, match="add_generation_prompt"):
                session.context("a", add_generation_prompt=True)

    run(main())


# --- handles ------------------------------------------------------------------------------------------------------------


def test_a_handle_travels_and_a_branch_does_not(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as owner, way.connect() as guest:
            shared = owner.context("a b c")
            handle = await shared.share()
            payload = pickle.dumps(handle)
            assert len(payload) < 200
            branch = guest.attach(pickle.loads(payload))
            assert (await branch.append(" d").generate()).text == " heard 4 words, the last is d."
            with pytest.raises(TypeError, match="share"):
                pickle.dumps(branch)
            with pytest.raises(TypeError, match="connect"):
                pickle.dumps(owner)

    run(main())


def test_foreign_handles_are_refused(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as owner, way.connect() as guest:
            branch = owner.context("a")
            handle = await branch.share()
            with pytest.raises(ForeignHandleError, match="share"):
                guest.attach(branch)  # type: ignore[arg-type]
            with pytest.raises(ForeignHandleError, match="another session"):
                guest.release(branch)
            with pytest.raises(ForeignHandleError, match="replica"):
                guest.attach(type(handle)(handle.app, "elsewhere", handle.session, handle.branch))
            with pytest.raises(InvalidParameterError, match="BranchHandle"):
                guest.attach("handle")  # type: ignore[arg-type]
            assert (await owner.attach(handle).generate()).text == " heard 1 words, the last is a."
            branch.release()
            with pytest.raises(UnknownBranchError):
                owner.attach(handle)
            await owner.flush()
            with pytest.raises(ReleasedBranchError):
                await guest.attach(handle).ready()
            with pytest.raises(UnknownBranchError):
                await guest.attach(type(handle)(handle.app, handle.replica, "0" * 32, 0)).ready()

    run(main())


def test_many_branches_are_released_by_one_command(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            held = way.engine.stats().branches
            children = session.context("a").fork(10)
            await children[-1].ready()
            with pytest.raises(ReleasedBranchError, match="twice"):
                session.release(children[0], children[0])
            sends = session.num_sends
            session.release(*children)
            await session.flush()
            assert session.num_sends == sends + 1
            assert all(child.released for child in children)
            await until(lambda: way.engine.stats().branches == held, "the branches were given back")

    run(main())


# --- the end of things --------------------------------------------------------------------------------------------------


async def endless(session: Session) -> Any:
    stream = session.context("endless").stream()
    assert await anext(stream) == " 0"
    return stream


def test_a_stream_that_is_dropped_is_cancelled(way: Way) -> None:
    async def by_break(session: Session) -> None:
        async for _ in session.context("endless").stream():
            break

    async def by_del(session: Session) -> None:
        stream = await endless(session)
        del stream

    async def by_error(session: Session) -> None:
        async def read() -> None:
            async for _ in session.context("endless").stream():
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await read()

    async def by_exit(session: Session) -> None:
        async with await endless(session):
            pass

    async def by_task(session: Session) -> None:
        stream = await endless(session)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        kept.append(stream)

    async def by_timeout(session: Session) -> None:
        generation = session.context("endless").generate()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generation, 0.02)
        kept.append(generation)

    async def never_awaited(session: Session) -> None:
        session.context("endless").generate()

    async def by_cancel(session: Session) -> None:
        stream = await endless(session)
        stream.branch.cancel()
        assert (await stream.result()).reason == "cancelled"

    kept: list[Any] = []

    async def main() -> None:
        async with way.connect() as session:
            for drop in (by_break, by_del, by_error, by_exit, by_task, by_timeout, never_awaited, by_cancel):
                await drop(session)
                await session.flush()
                await nothing_runs(way)
            for generation in kept:
                assert (await generation.result()).reason == "cancelled"

    run(main())


def test_a_dropped_generation_leaves_the_next_one_on_its_branch_alone(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            branch = session.context("a")
            first, second = branch.generate(), branch.generate()
            del first
            assert (await second).reason == "stop"

    run(main())


def test_a_branch_that_is_dropped_is_released(way: Way) -> None:
    async def main() -> None:
        async with way.connect() as session:
            held = way.engine.stats().branches
            branches = session.context("a").fork(20)
            await asyncio.gather(*(branch.ready() for branch in branches))
            del branches
            await until(lambda: way.engine.stats().branches == held, "the branches were released")

    run(main())


def test_closing_a_session_ends_what_runs_and_releases_all(way: Way) -> None:
    async def main() -> None:
        sessions = way.engine.stats().sessions
        session = await way.connect()
        stream = await endless(session)
        waiting = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0)
        await session.aclose()
        await session.aclose()
        with pytest.raises(SessionClosedError):
            await waiting
        calls: list[Any] = [stream.branch.fork, stream.branch.generate, lambda: session.context("a")]
        for call in calls:
            with pytest.raises(SessionClosedError):
                call()
        with pytest.raises(SessionClosedError):
            await session.stats()
        await until(lambda: way.engine.stats().sessions == sessions, "the session was closed")
        await nothing_runs(way)

    run(main())


def test_a_session_that_is_dropped_is_closed(way: Way) -> None:
    async def main() -> None:
        sessions = way.engine.stats().sessions
        session = await way.connect()
        await session.context("a").ready()
        del session
        await until(lambda: way.engine.stats().sessions == sessions, "the session was closed")

    run(main())


def test_two_sessions_do_not_see_each_other(way: Way) -> None:
    async def main() -> None:
        sessions = way.engine.stats().sessions
        async with way.connect() as one, way.connect() as two:
            texts = await asyncio.gather(one.context("one").generate(), two.context("two words").generate())
            assert [result.text.split()[-1] for result in texts] == ["one.", "words."]
            assert (await one.stats()).sessions == sessions + 2

    run(main())


def test_an_engine_that_goes_away_fails_all_that_waits(way: Way) -> None:
    if way.break_off is None:
        pytest.skip("other tests use the same application")

    async def main() -> None:
        assert way.break_off is not None
        session = await way.connect()
        stream = await endless(session)
        waiting = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0)
        way.break_off()
        await until(lambda: waiting.done(), "the session noticed")
        with pytest.raises(BranchlineError):
            session.context("a")
        with pytest.raises(BranchlineError):
            await session.flush()
        with pytest.raises(BranchlineError):
            await waiting
        with pytest.raises(BranchlineError):
            stream.branch.fork()
        await session.aclose()

    run(main())


# --- through Ray alone --------------------------------------------------------------------------------------------------


@pytest.mark.serve
def test_a_handle_opens_a_session_where_its_branch_lies(application: RemoteEngine) -> None:
    async def main() -> None:
        async with connect("serve:branchline") as owner:
            branch = owner.context("a b")
            handle = await branch.share()
            assert handle.app == "branchline"
            async with connect(handle) as guest:
                assert guest.id != owner.id
                assert (await guest.attach(handle).generate()).text == " heard 2 words, the last is b."
            with pytest.raises(ConnectError, match=r"replica .* is gone"):
                await connect(BranchHandle(handle.app, "nosuchreplica", handle.session, handle.branch))

    run(main())


@pytest.mark.serve
def test_applications_that_do_not_run_are_refused(application: RemoteEngine) -> None:
    async def main() -> None:
        with pytest.raises(ConnectError, match="no Serve application 'nothing' runs"):
            await connect("serve:nothing")

    run(main())


@pytest.mark.serve
def test_a_deployment_handle_is_a_target(application: RemoteEngine) -> None:
    from ray import serve

    async def main() -> None:
        async with connect(serve.get_deployment_handle(ENGINE_DEPLOYMENT, APP_NAME)) as session:
            assert (await session.context("a").generate()).reason == "stop"
            assert (await session.context("a").share()).app == APP_NAME

    run(main())


def test_a_handle_of_another_process_needs_a_server(engine: ScriptedEngine) -> None:
    async def main() -> None:
        async with connect(engine) as session:
            branch = session.context("a")
            with pytest.raises(ConnectError, match="engine in one process"):
                await connect(await branch.share())

    run(main())
