"""A replica's sessions: streams, joined batches, leases, errors as replies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.orchestrator.fake_engine import FakeEngine

from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineError
from branchline.engine.types import (
    Attach,
    Context,
    Delta,
    Finished,
    Forked,
    Generate,
    Inspect,
    Ready,
    SamplingParams,
    Text,
)
from branchline.orchestrator import protocol
from branchline.orchestrator.host import EngineHost, replica_of
from branchline.orchestrator.mailbox import Mailbox
from branchline.orchestrator.protocol import Ack, CommandBatch, ErrorReply, OpenSession, Reply, SessionOpened, StatsReply


@contextlib.asynccontextmanager
async def hosted(timeout_s: float = 60.0, heartbeat_s: float = 5.0, step_s: float = 0.002) -> AsyncIterator[EngineHost]:
    host = EngineHost(FakeEngine(EngineConfig(), step_s), "r1", session_timeout_s=timeout_s, heartbeat_s=heartbeat_s)
    try:
        yield host
    finally:
        await host.close()


async def opened(host: EngineHost) -> str:
    reply = protocol.decode_reply(await host.open_session(protocol.encode(OpenSession())))
    assert isinstance(reply, SessionOpened)
    return reply.session


async def submit(host: EngineHost, session: str, *commands: Any) -> Reply:
    return protocol.decode_reply(await host.submit(protocol.encode(CommandBatch(session, commands))))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def branches(host: EngineHost) -> int:
    return host.engine.stats().branches


def test_a_session_names_its_replica() -> None:
    async def run() -> None:
        async with hosted() as host:
            reply = protocol.decode_reply(await host.open_session(protocol.encode(OpenSession(client="me"))))
            assert isinstance(reply, SessionOpened)
            assert (reply.replica, reply.timeout_s, reply.model) == ("r1", 60.0, host.engine.info)
            assert replica_of(reply.session) == "r1"
            described = protocol.decode_reply(await host.describe())
            assert isinstance(described, SessionOpened)
            assert (described.session, described.replica) == ("", "r1")

    asyncio.run(run())


def test_the_first_batch_comes_before_any_event_and_then_the_events_in_order() -> None:
    async def run() -> None:
        async with hosted() as host:
            session = await opened(host)
            async with contextlib.aclosing(host.events(session)) as stream:
                assert protocol.decode_events(await anext(stream)) == protocol.EventBatch(session, ())
                params = SamplingParams(max_tokens=4)
                assert await submit(host, session, Context(0, Text("hi")), Generate(0, 7, params)) == Ack()
                events: list[Any] = []
                while not any(isinstance(event, Finished) for event in events):
                    events += protocol.decode_events(await anext(stream)).events
                assert [type(event) for event in events] == [Ready, Delta, Delta, Delta, Delta, Finished]

    asyncio.run(run())


def test_a_slow_readers_steps_are_joined_into_one_batch() -> None:
    async def run() -> None:
        async with hosted() as host:
            session = await opened(host)
            async with contextlib.aclosing(host.events(session)) as stream:
                await anext(stream)
                await submit(host, session, Context(0, Text("hi")), Generate(0, 0, SamplingParams(max_tokens=30)))
                await until(lambda: host.engine.stats().running == 0 and host.engine.stats().decode_tokens == 30)
                await asyncio.sleep(0.02)
                events = protocol.decode_events(await anext(stream)).events
                assert len(events) == 32
                assert isinstance(events[-1], Finished)

    asyncio.run(run())


def test_heartbeats_are_empty_batches() -> None:
    async def run() -> None:
        async with hosted(heartbeat_s=0.05) as host:
            session = await opened(host)
            async with contextlib.aclosing(host.events(session)) as stream:
                for _ in range(3):
                    assert protocol.decode_events(await asyncio.wait_for(anext(stream), 1)).events == ()

    asyncio.run(run())


def test_a_reader_that_goes_away_releases_everything() -> None:
    async def run() -> None:
        async with hosted() as host:
            session = await opened(host)
            stream = host.events(session)
            await anext(stream)
            await submit(host, session, Context(0, Text("hi")), Generate(0, 0, SamplingParams(max_tokens=10**6)))
            await anext(stream)
            assert branches(host) == 1
            before = host.engine.stats().steps
            await stream.aclose()
            await until(lambda: branches(host) == 0)
            assert host.engine.stats().steps <= before + 3
            gone = await submit(host, session)
            assert isinstance(gone, ErrorReply)
            assert gone.error.code == "session_not_found"

    asyncio.run(run())


def test_a_stream_has_one_reader_and_an_unknown_session_none() -> None:
    async def run() -> None:
        async with hosted() as host:
            session = await opened(host)
            async with contextlib.aclosing(host.events(session)) as stream:
                await anext(stream)
                assert [item async for item in host.events(session)] == []
                assert [item async for item in host.events("r1.unknown")] == []
                assert await submit(host, session) == Ack(), "the second reader must not have closed it"

    asyncio.run(run())


def test_closing_ends_the_stream_after_what_was_left_and_twice_is_fine() -> None:
    async def run() -> None:
        async with hosted() as host:
            session = await opened(host)
            async with contextlib.aclosing(host.events(session)) as stream:
                await anext(stream)
                for _ in range(2):
                    assert protocol.decode_reply(await host.close_session(session)) == Ack()
                assert [item async for item in stream] == []

    asyncio.run(run())


@pytest.mark.parametrize("reads", [False, True])
def test_a_silent_client_loses_its_session_even_if_its_stream_seems_read(reads: bool) -> None:
    async def run() -> None:
        async with hosted(timeout_s=0.2, heartbeat_s=0.05) as host:
            session = await opened(host)
            stream = host.events(session)
            if reads:
                await anext(stream)
            await submit(host, session, Context(0, Text("hi")))
            for _ in range(8):  # keep-alives
                await asyncio.sleep(0.05)
                assert await submit(host, session) == Ack()
            assert branches(host) == 1
            await until(lambda: branches(host) == 0, 2)
            assert isinstance(await submit(host, session), ErrorReply)
            await stream.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("payload", [b"", b"\xff", protocol.encode([1]), protocol.encode({"session": 5, "commands": []})])
def test_payloads_that_cant_be_read(payload: bytes) -> None:
    async def run() -> None:
        async with hosted() as host:
            for method in (host.open_session, host.submit):
                reply = protocol.decode_reply(await method(payload))
                if method == host.submit or payload[:1] != b"\x82":
                    assert isinstance(reply, ErrorReply)
                    assert reply.error.code == "invalid_request"

    asyncio.run(run())


def test_another_protocol_version_is_refused() -> None:
    async def run() -> None:
        async with hosted() as host:
            reply = protocol.decode_reply(await host.open_session(protocol.encode(OpenSession(version=99))))
            assert isinstance(reply, ErrorReply)
            assert reply.error.param == "version"

    asyncio.run(run())


def test_attach_takes_the_public_id_of_another_session_of_this_replica() -> None:
    async def run() -> None:
        async with hosted() as host:
            owner, guest = await opened(host), await opened(host)
            await submit(host, owner, Context(0, Text("shared")))
            await until(lambda: host.engine.stats().pages_free < 512)
            async with contextlib.aclosing(host.events(guest)) as stream:
                await anext(stream)
                await submit(host, guest, Attach(0, owner, 0), Inspect(0, 1))
                events: list[Any] = []
                while len(events) < 2:
                    events += protocol.decode_events(await anext(stream)).events
                assert [type(event).__name__ for event in events] == ["Forked", "Info"]
                assert isinstance(events[0], Forked)
                assert events[1].num_tokens == len("shared")

    asyncio.run(run())


def test_an_engine_that_stops_ends_the_streams_and_the_health() -> None:
    async def run() -> None:
        async with hosted(timeout_s=0.4) as host:
            session = await opened(host)
            await host.check_health()
            async with contextlib.aclosing(host.events(session)) as stream:
                await anext(stream)
                host.engine.close()
                assert [item async for item in stream] == []
            with pytest.raises(EngineError):
                await host.check_health()
            reply = await submit(host, session)
            assert isinstance(reply, ErrorReply)
            assert reply.error.code == "engine_closed"

    asyncio.run(run())


def test_stats_name_the_replica() -> None:
    async def run() -> None:
        async with hosted() as host:
            reply = protocol.decode_reply(await host.stats())
            assert isinstance(reply, StatsReply)
            assert (reply.replica, reply.stats.pages_total) == ("r1", 512)

    asyncio.run(run())


def test_a_mailbox_wakes_its_loop_once_for_what_arrives_together() -> None:
    async def run() -> tuple[int, list[int]]:
        loop = asyncio.get_running_loop()
        wakes = 0
        original = loop.call_soon_threadsafe

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return original(*args, **kwargs)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
        got: list[int] = []
        box: Mailbox[int] = Mailbox(loop, got.append)
        for i in range(100):
            box.put(i)
        await asyncio.sleep(0.01)
        for i in range(100, 200):
            box.put(i)
        await asyncio.sleep(0.01)
        return wakes, got

    wakes, got = asyncio.run(run())
    assert (wakes, got) == (2, list(range(200)))
