"""The direct channel: what it does beside the handle's way, who is let in, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.orchestrator.fake_engine import FakeEngine

from branchline.engine.config import EngineConfig
from branchline.engine.types import Context, Delta, Event, Finished, Fork, Generate, Ready, Release, SamplingParams, Text
from branchline.orchestrator import direct, protocol, wire
from branchline.orchestrator.errors import SlowReaderError, TokenRefusedError
from branchline.orchestrator.host import EngineHost
from branchline.orchestrator.protocol import Ack, CommandBatch, DirectAddress, ErrorReply, OpenSession, SessionOpened
from branchline.orchestrator.wire import DirectConnection, FrameError

LONG = SamplingParams(max_tokens=100_000)


@contextlib.asynccontextmanager
async def listening(step_s: float = 0.002, **settings: Any) -> AsyncIterator[EngineHost]:
    host = EngineHost(FakeEngine(EngineConfig(), step_s), "r1", **settings)
    await host.listen("127.0.0.1")
    try:
        yield host
    finally:
        await host.close()


async def opened(host: EngineHost) -> tuple[str, DirectAddress]:
    reply = protocol.decode_reply(await host.open_session(protocol.encode(OpenSession(direct=True))))
    assert isinstance(reply, SessionOpened)
    assert reply.direct is not None
    return reply.session, reply.direct


async def submit(connection: DirectConnection, session: str, *commands: Any) -> protocol.Reply:
    return protocol.decode_reply(await connection.submit(protocol.encode(CommandBatch(session, commands))))


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def in_loop(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(), 30)

    asyncio.run(bounded())


def test_a_session_is_asked_for_a_direct_channel_or_gets_none() -> None:
    async def main() -> None:
        async with listening() as host:
            reply = protocol.decode_reply(await host.open_session(protocol.encode(OpenSession())))
            assert isinstance(reply, SessionOpened)
            assert reply.direct is None

    in_loop(main)


def test_batches_are_answered_in_order_and_events_come_as_over_the_handle() -> None:
    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
            seen: list[Event] = []

            async def read() -> None:
                async for payload in connection.events():
                    seen.extend(protocol.decode_events(payload).events)

            reader = asyncio.ensure_future(read())
            params = SamplingParams(max_tokens=8)
            assert await submit(connection, session, Context(0, Text("a b c")), Fork(0, 1, 2)) == Ack()
            assert await submit(connection, session, Generate(1, 0, params), Generate(2, 1, params)) == Ack()
            assert isinstance(await submit(connection, "r1.nobody", Release((1,))), ErrorReply)
            await until(lambda: sum(isinstance(event, Finished) for event in seen) == 2)
            assert isinstance(seen[0], Ready)
            for request in (0, 1):
                tokens = [
                    token for event in seen if isinstance(event, Delta) and event.request == request for token in event.tokens
                ]
                assert len(tokens) == 8
            await connection.close()
            await reader
            await until(lambda: host.engine.stats().sessions == 0)
            assert host.engine.stats().branches == 0

    in_loop(main)


def test_a_token_lets_one_client_in_once() -> None:
    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
            with pytest.raises(TokenRefusedError):
                await DirectConnection.open(session, address)
            assert host.engine.stats().sessions == 1  # the one that is in stays
            await connection.close()

    in_loop(main)


def test_a_wrong_token_is_refused_and_spends_the_right_one() -> None:
    """So that nobody can try again and again."""

    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            wrong = DirectAddress(address.host, address.port, "0" * 32)
            with pytest.raises(TokenRefusedError):
                await DirectConnection.open(session, wrong)
            with pytest.raises(TokenRefusedError):
                await DirectConnection.open(session, address)
            with pytest.raises(TokenRefusedError):
                await DirectConnection.open("r1.unknown", DirectAddress(address.host, address.port, ""))
            # The session itself is as good as before, through Ray.
            assert protocol.decode_reply(await host.submit(protocol.encode(CommandBatch(session, ())))) == Ack()

    in_loop(main)


def test_a_token_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "TOKEN_S", 0.01)

    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            await asyncio.sleep(0.05)
            with pytest.raises(TokenRefusedError):
                await DirectConnection.open(session, address)

    in_loop(main)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
        ((0).to_bytes(4, "big"), "a frame of 0 bytes"),
        (wire.frame(wire.BATCH, b"x"), "the first frame is of kind 2"),
        (wire.frame(wire.HELLO, b"\xc1"), "the hello can't be read"),
    ],
)
def test_what_is_no_hello_is_told_so_and_hung_up_on(sent: bytes, expected: str) -> None:
    async def main() -> None:
        async with listening() as host:
            _, address = await opened(host)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(sent)
            kind, payload = await wire.read_frame(reader)
            assert kind == wire.REPLY
            reply = protocol.decode_reply(payload)
            assert isinstance(reply, ErrorReply)
            assert isinstance(reply.exception(), FrameError)
            assert expected in reply.error.message
            assert await reader.read() == b""
            writer.close()

    in_loop(main)


def test_a_client_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "HELLO_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with listening() as host:
            _, address = await opened(host)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    in_loop(main)


@pytest.mark.parametrize("sent", [(1 << 31).to_bytes(4, "big") + b"x", wire.frame(wire.EVENTS, b""), wire.frame(9, b"")])
def test_a_bad_frame_ends_its_own_session_alone(sent: bytes) -> None:
    async def main() -> None:
        async with listening() as host:
            (session, address), (other, other_address) = await opened(host), await opened(host)
            bad = await DirectConnection.open(session, address)
            good = await DirectConnection.open(other, other_address)
            bad._writer.write(sent)
            while True:
                kind, payload = await wire.read_frame(bad._reader)
                if kind == wire.REPLY:
                    break
            reply = protocol.decode_reply(payload)
            assert isinstance(reply, ErrorReply)
            assert isinstance(reply.exception(), FrameError)
            await _drain(bad)
            await until(lambda: host.engine.stats().sessions == 1)
            reader = asyncio.ensure_future(_drain(good))
            assert await submit(good, other, Context(0, Text("still here"))) == Ack()
            await good.close()
            await reader

    in_loop(main)


async def _drain(connection: DirectConnection) -> None:
    async for _ in connection.events():
        pass


def test_a_batch_that_cannot_be_read_is_refused_and_the_session_goes_on() -> None:
    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
            reader = asyncio.ensure_future(_drain(connection))
            assert isinstance(protocol.decode_reply(await connection.submit(b"\xc1")), ErrorReply)
            assert await submit(connection, session, Context(0, Text("a"))) == Ack()
            await connection.close()
            await reader

    in_loop(main)


def test_a_vanished_client_is_noticed_at_once() -> None:
    """Not after the session's timeout: the connection tells."""

    async def main() -> None:
        async with listening(session_timeout_s=3600) as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
            reader = asyncio.ensure_future(_drain(connection))
            await submit(connection, session, Context(0, Text("a")), Generate(0, 0, LONG))
            await until(lambda: host.engine.stats().running == 1)
            connection._writer.transport.abort()
            await until(lambda: host.engine.stats().sessions == 0 and host.engine.stats().running == 0)
            await asyncio.gather(reader, return_exceptions=True)

    in_loop(main)


def test_a_client_that_does_not_read_is_closed_and_nobody_else_notices() -> None:
    async def main() -> None:
        async with listening(step_s=0.0, max_backlog_bytes=1 << 16) as host:
            slow, address = await opened(host)
            connection = await DirectConnection.open(slow, address)
            # One batch is under way before anybody reads: its reply waits in the connection's buffer.
            payload = protocol.encode(
                CommandBatch(slow, (Context(0, Text("a")), Fork(0, 1, 64), *(Generate(i, i, LONG) for i in range(1, 65))))
            )
            connection._writer.write(wire.frame(wire.BATCH, payload))
            other, address = await opened(host)
            brisk = await DirectConnection.open(other, address)
            count = 0

            async def read() -> None:
                nonlocal count
                async for payload in brisk.events():
                    for event in protocol.decode_events(payload).events:
                        count += len(event.tokens) if isinstance(event, Delta) else 0

            reader = asyncio.ensure_future(read())
            await submit(brisk, other, Context(0, Text("b")), Generate(0, 0, SamplingParams(max_tokens=3000)))
            await until(lambda: host.engine.stats().sessions == 1, 20)
            await until(lambda: count == 3000, 20)
            # It looks at last, and is told.
            errors = [protocol.decode_events(payload).error async for payload in connection.events()]
            assert errors[-1] is not None
            assert isinstance(errors[-1].exception(), SlowReaderError)
            assert errors[:-1] == [None] * (len(errors) - 1)
            await brisk.close()
            await reader

    in_loop(main)


def test_a_client_that_reads_slowly_gets_everything_in_few_batches() -> None:
    async def main() -> None:
        async with listening(step_s=0.0) as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
            num_batches, ids = 0, range(1, 65)
            tokens, texts = dict.fromkeys(ids, 0), dict.fromkeys(ids, "")
            finished: list[int] = []
            generations = tuple(Generate(i, i, SamplingParams(max_tokens=2000)) for i in ids)
            batch = CommandBatch(session, (Context(0, Text("a")), Fork(0, 1, 64), *generations))
            connection._writer.write(wire.frame(wire.BATCH, protocol.encode(batch)))
            async for payload in connection.events():
                num_batches += 1
                await asyncio.sleep(0.01)
                for event in protocol.decode_events(payload).events:
                    if isinstance(event, Delta):
                        assert event.request not in finished
                        tokens[event.branch] += len(event.tokens)
                        texts[event.branch] += event.text
                    elif isinstance(event, Finished):
                        finished.append(event.request)
                if len(finished) == len(ids):
                    break
            assert set(tokens.values()) == {2000}
            assert {len(text) for text in texts.values()} == {2000}
            assert num_batches < 1500  # of 2,000 steps and more
            await connection.close()

    in_loop(main)


def test_the_host_that_closes_cuts_its_channels() -> None:
    async def main() -> None:
        async with listening() as host:
            session, address = await opened(host)
            connection = await DirectConnection.open(session, address)
        with contextlib.suppress(ConnectionError):
            await _drain(connection)
        with pytest.raises(ConnectionError):
            await connection.submit(b"")
        with pytest.raises(OSError):
            await DirectConnection.open(session, address)

    in_loop(main)
