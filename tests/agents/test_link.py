"""The session's outbox and demultiplexer, over a transport that the test holds in its hand."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.agents.harness import run, until

from branchline.agents import ConnectError, ConnectionLostError, Session, SessionClosedError, connect
from branchline.agents.link import Link
from branchline.agents.testing import ScriptedEngine
from branchline.engine.errors import EngineOverloadedError, FailedBranchError, InvalidParameterError, SessionNotFoundError
from branchline.engine.types import (
    Command,
    Context,
    Delta,
    EngineStats,
    ErrorInfo,
    Event,
    Failed,
    Finished,
    Fork,
    Forked,
    Generate,
    Ready,
    Release,
    Timing,
    Usage,
)
from branchline.orchestrator.protocol import EventBatch, SessionOpened

MICROSECONDS_PER_DELTA = 30.0


class HeldTransport:
    """Keeps what is sent; gives the events that the test puts in."""

    def __init__(self) -> None:
        self.sent: list[tuple[Command, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse: Exception | None = None
        self.queue: asyncio.Queue[tuple[Event, ...] | Exception | None] = asyncio.Queue()
        self.closed = 0

    async def open(self) -> SessionOpened:
        raise NotImplementedError

    async def send(self, commands: Sequence[Command]) -> None:
        await self.gate.wait()
        if self.refuse is not None:
            refuse, self.refuse = self.refuse, None
            raise refuse
        self.sent.append(tuple(commands))

    async def events(self) -> AsyncIterator[EventBatch]:
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield EventBatch("s", item)

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed += 1


def open_session(transport: HeldTransport, *, timeout_s: float = 60.0) -> Session:
    with ScriptedEngine(str) as engine:
        info = engine.info
    opened = SessionOpened(session="s", replica="r", model=info, timeout_s=timeout_s)
    return Session(transport, opened, Link(transport, opened, on_close=None), app="a")


def finished(branch: int, request: int, count: int = 1) -> Finished:
    return Finished(branch, request, "stop", Usage(1, count, 0), Timing(0.0, 0.0, 0.0))


def test_while_a_batch_is_under_way_commands_coalesce() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        transport.gate.clear()
        root = session.context("a")
        await asyncio.sleep(0.01)
        children = []
        for _ in range(5):
            children.append(root.fork())
            await asyncio.sleep(0)
        assert transport.sent == []
        transport.gate.set()
        await session.flush()
        assert [len(batch) for batch in transport.sent] == [1, 5]
        assert isinstance(transport.sent[0][0], Context)
        assert transport.sent[1] == tuple(Fork(root.id, child.id) for child in children)
        await session.aclose()
        assert transport.closed == 1

    run(main())


def test_an_idle_session_pings_three_times_a_timeout() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport, timeout_s=0.15)
        await asyncio.sleep(0.33)
        assert 4 <= len(transport.sent) <= 7
        assert set(transport.sent) == {()}
        await session.aclose()

    run(main())


def test_pings_keep_a_session_alive_and_silence_ends_it() -> None:
    async def main() -> None:
        with ScriptedEngine(str, session_timeout_s=0.2) as engine:
            forgotten = engine.open_session(lambda events: None)
            async with connect(engine) as session:
                for _ in range(6):
                    await asyncio.sleep(0.05)
                    await session.context("a").ready()
            with pytest.raises(SessionNotFoundError):
                engine.touch(forgotten)

    run(main())


def test_a_long_generation_in_process_keeps_its_session() -> None:
    async def main() -> None:
        with ScriptedEngine(lambda prompt: "word " * 120, step_s=0.02, session_timeout_s=1.5) as engine:
            async with connect(engine) as session:
                result = await session.context("a").generate()
                assert (len(result.tokens), result.reason) == (121, "stop")

    run(main())


def test_a_refused_batch_fails_what_was_in_it_and_no_more() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        kept = session.context("kept")
        released = session.context("released")
        await session.flush()
        transport.refuse = EngineOverloadedError("full: retry later")
        context, child, generation = session.context("a"), kept.fork(), kept.generate()
        released.release()
        for waiting in (context.ready(), child.ready(), generation.result()):
            with pytest.raises(EngineOverloadedError):
                await waiting
        later = kept.fork()
        await session.flush()
        assert transport.sent[-1] == (Release((released.id,)), Fork(kept.id, later.id))
        await transport.queue.put((Ready(kept.id, 1, 1, 0.0),))
        await kept.ready()
        await session.aclose()

    run(main())


@pytest.mark.parametrize("where", ["send", "stream", "end"])
def test_a_lost_connection_fails_everything_that_waits(where: str) -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        root = session.context("a")
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(waiting)
            for waiting in (root.ready(), root.generate().result(), root.inspect(), anext(root.stream()))
        ]
        await session.flush()
        if where == "send":
            transport.refuse = OSError("broken pipe")
            root.fork()
        elif where == "stream":
            await transport.queue.put(OSError("broken pipe"))
        else:
            await transport.queue.put(None)
        expected = SessionNotFoundError if where == "end" else ConnectionLostError
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [expected] * 4
        assert len({id(outcome) for outcome in outcomes}) == 4
        if where != "end":
            assert isinstance(outcomes[0], ConnectionError)
            assert isinstance(outcomes[0].__cause__, OSError)
        for call in (root.fork, root.generate, root.stream, root.cancel):
            with pytest.raises(expected):
                call()
        root.release()
        await session.aclose()
        assert transport.closed == 1

    run(main())


def test_events_of_unknown_or_released_branches_are_dropped() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        root = session.context("a")
        stray = ErrorInfo("released_branch", "gone")
        await transport.queue.put(
            (Delta(9, 9, (1,), "x"), finished(9, 9), Ready(9, 1, 1, 0.0), Forked(9, 10, 2, 0.0), Failed(9, stray))
        )
        await transport.queue.put((Ready(root.id, 3, 3, 0.5),))
        await root.ready()
        assert root.last_ready == Ready(root.id, 3, 3, 0.5)
        await session.aclose()

    run(main())


def test_a_failed_parent_fails_children_that_are_not_made_yet() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        root = session.context("a")
        made = root.fork()
        root.append("b")
        pending = root.fork()
        grandchild = pending.fork()
        await transport.queue.put((Ready(root.id, 1, 1, 0.0), Forked(root.id, made.id, 1, 0.0)))
        await transport.queue.put((Failed(root.id, ErrorInfo("invalid_parameter", "bad", "ids")),))
        with pytest.raises(InvalidParameterError):
            await root.ready()
        for child in (pending, grandchild):
            with pytest.raises(FailedBranchError, match="forked from failed: bad"):
                await child.ready()
        assert (await made.ready()).forked == Forked(root.id, made.id, 1, 0.0)
        await session.aclose()

    run(main())


def test_garbage_collected_in_another_thread_is_released_on_the_loop() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        branch = session.context("a")
        branch_id = branch.id
        cycle: list[Any] = [branch]
        cycle.append(cycle)
        del branch, cycle
        await session.flush()
        collector = threading.Thread(target=gc.collect)
        collector.start()
        await until(lambda: (Release((branch_id,)),) in transport.sent, "the release was sent")
        collector.join()
        await session.aclose()

    run(main())


def test_a_session_used_after_its_loop_says_so() -> None:
    async def main() -> Session:
        return open_session(HeldTransport())

    session = run(main())
    with pytest.raises(SessionClosedError):
        session.context("a")


@pytest.mark.parametrize("target", ["ftp://x", "local:", "base:x", "no scheme", "", 5, object()])
def test_targets_that_are_none_are_refused(target: Any) -> None:
    async def main() -> None:
        await connect(target)

    with pytest.raises(ConnectError, match=r"connect|transport"):
        run(main())


def test_nothing_at_the_url_and_wrong_options_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConnectError, match="no gateway answers"):
            await connect("http://127.0.0.1:9")
        with pytest.raises(InvalidParameterError, match="known are headers"):
            await connect("http://127.0.0.1:9", header={})

    run(main())


def test_an_application_needs_an_initialised_ray() -> None:
    async def main() -> None:
        with pytest.raises(ConnectError, match=r"Ray isn't initialised in this process: call ray\.init"):
            await connect("serve:branchline")

    run(main())


def test_cost_of_a_delta_at_500_branches() -> None:
    """The client's own time: from the transport's batch to 500 readers that each take every piece."""
    branches, steps = 500, 40

    async def main() -> float:
        transport = HeldTransport()
        session = open_session(transport)
        streams = [branch.stream() for branch in session.context("a").fork(branches)]
        await session.flush()

        async def read(stream: Any) -> int:
            return len([piece async for piece in stream])

        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        await asyncio.sleep(0)
        ids = [(stream.branch.id, stream._request.id) for stream in streams]
        batches = [tuple(Delta(branch, request, (step,), "x") for branch, request in ids) for step in range(steps)]
        began = time.process_time()
        for batch in batches:
            transport.queue.put_nowait(batch)
            for _ in range(4):  # every reader takes every piece on its own
                await asyncio.sleep(0)
            assert all(stream._read == batch[0].tokens[0] + 1 for stream in streams[::50])
        transport.queue.put_nowait(tuple(finished(branch, request, steps) for branch, request in ids))
        counts = await asyncio.gather(*readers)
        spent = time.process_time() - began
        assert counts == [steps] * branches
        await session.aclose()
        return spent / (branches * steps) * 1e6

    cost = min(run(main()) for _ in range(3))
    print(f"{cost:.1f} µs of client time per Delta at {branches} branches")
    assert cost < MICROSECONDS_PER_DELTA


def test_generate_and_stream_send_the_parameters_that_were_given() -> None:
    async def main() -> None:
        transport = HeldTransport()
        session = open_session(transport)
        root = session.context("a")
        keep = [root.generate(max_tokens=3, stop=["a", "b"]), root.stream(temperature=0, stop="c", logit_bias={5: 1.0})]
        await session.flush()
        sent = [command for command in transport.sent[0] if isinstance(command, Generate)]
        assert [command.params.stop for command in sent] == [("a", "b"), ("c",)]
        assert sent[0].params.max_tokens == 3
        assert sent[1].params.logit_bias == {5: 1.0}
        await session.aclose()
        assert all(generation.done for generation in keep)

    run(main())
