"""The gateway's channel: batches in order, refusals that hit only whom they concern, a lost replica."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from tests.orchestrator.fake_engine import FakeEngine

from branchline.engine.config import EngineConfig
from branchline.engine.errors import BranchlineError, EngineOverloadedError, InvalidRequestError
from branchline.engine.types import Chat, Command, Context, Delta, Event, Finished, Generate, Message, SamplingParams, Text
from branchline.orchestrator import protocol
from branchline.orchestrator.channel import Channel, Listener, read_reply
from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.host import EngineHost
from branchline.orchestrator.link import HostLink
from branchline.orchestrator.protocol import Ack, SessionOpened


class SpyLink(HostLink):
    """Keeps what was submitted, and can hold submits back."""

    def __init__(self, hosts: dict[str, EngineHost]) -> None:
        super().__init__(hosts)
        self.hosts = hosts
        self.batches: list[tuple[Command, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, method: str, *args: bytes | str, replica: str | None = None) -> bytes:
        if method == "submit":
            assert isinstance(args[0], bytes)
            self.batches.append(protocol.decode_batch(args[0]).commands)
            await self.gate.wait()
        return await super().call(method, *args, replica=replica)


@contextlib.asynccontextmanager
async def linked(config: EngineConfig | None = None, names: tuple[str, ...] = ("r1",)) -> AsyncIterator[SpyLink]:
    settings = config or EngineConfig()
    hosts = {name: EngineHost(FakeEngine(settings), name, session_timeout_s=settings.session_timeout_s) for name in names}
    try:
        yield SpyLink(hosts)
    finally:
        for host in hosts.values():
            await host.close()


async def text_of(listener: Listener) -> str:
    """The text until everything ended."""
    text, running = "", len(listener.branches)
    while running:
        for event in await listener.next():
            text += event.text if isinstance(event, Delta) else ""
            running -= isinstance(event, Finished)
    return text


def ask(channel: Channel, prompt: str, max_tokens: int = 5) -> Listener:
    listener = channel.listen(1)
    branch = listener.branches.start
    params = SamplingParams(max_tokens=max_tokens)
    channel.send(listener, [Context(branch, Text(prompt)), Generate(branch, channel.mint_request(), params)])
    return listener


def test_commands_that_come_meanwhile_travel_together() -> None:
    async def run() -> None:
        async with linked() as link:
            channel = await Channel.open(link)
            link.gate.clear()
            listeners = [ask(channel, "a")]
            await asyncio.sleep(0.01)
            listeners += [ask(channel, f"b{i}") for i in range(10)]
            link.gate.set()
            texts = [await text_of(listener) for listener in listeners]
            assert [len(batch) for batch in link.batches] == [2, 20]
            assert all(len(text) == 5 for text in texts)
            for listener in listeners:
                channel.release(listener)
                channel.release(listener)
            await asyncio.sleep(0.02)
            assert link.hosts["r1"].engine.stats().branches == 0
            await channel.close()

    asyncio.run(run())


def test_a_refused_batch_costs_only_those_whom_the_engine_refuses_alone() -> None:
    async def run() -> None:
        async with linked(EngineConfig(max_waiting=2)) as link:
            channel = await Channel.open(link)
            link.gate.clear()
            old = ask(channel, "old")
            await asyncio.sleep(0.01)
            channel.release(old)
            asked = [ask(channel, f"{i}", max_tokens=50) for i in range(3)]
            link.gate.set()
            outcomes = await asyncio.gather(*(text_of(listener) for listener in asked), return_exceptions=True)
            assert [isinstance(outcome, EngineOverloadedError) for outcome in outcomes] == [False, False, True]
            for listener in asked:
                channel.release(listener)
            await asyncio.sleep(0.05)
            assert link.hosts["r1"].engine.stats().branches == 0, "releases must not be lost with a refused batch"
            assert channel.error is None
            await channel.close()

    asyncio.run(run())


def test_what_cant_travel_is_the_askers_error_alone() -> None:
    async def run() -> None:
        async with linked() as link:
            channel = await Channel.open(link)
            other = ask(channel, "other")
            listener = channel.listen(1)
            message = Message(role="assistant", tool_calls=({"n": 2**70},))
            with pytest.raises(InvalidRequestError):
                channel.send(listener, [Context(listener.branches.start, Chat(messages=(message,)))])
            assert len(await text_of(other)) == 5
            await channel.close()

    asyncio.run(run())


def test_a_lost_session_fails_all_listeners_and_the_backend_opens_another() -> None:
    async def run() -> None:
        async with linked() as link:
            backend = Backend(link)
            await backend.start()
            channel = await backend.channel()
            listener = ask(channel, "x", max_tokens=10**6)
            await listener.next()
            await link.call("close_session", channel.opened.session, replica="r1")
            with pytest.raises(ReplicaUnavailableError):
                await text_of(listener)
            with pytest.raises(ReplicaUnavailableError):
                channel.listen(1)
            fresh = await backend.channel()
            assert fresh is not channel
            assert len(await text_of(ask(fresh, "y"))) == 5
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("half", ["branchline-channel-sender", "branchline-channel-reader"])
def test_a_channel_that_is_cut_off_fails_its_listeners(half: str) -> None:
    """Ray cancels calls that belong to a request which ended: nobody may wait for ever for what then never comes."""

    async def run() -> None:
        async with linked() as link:
            backend = Backend(link)
            await backend.start()
            channel = await backend.channel()
            listener = ask(channel, "x", max_tokens=10**6)
            await listener.next()
            next(task for task in asyncio.all_tasks() if task.get_name() == half).cancel()
            with pytest.raises(ReplicaUnavailableError, match="cut off"):
                await text_of(listener)
            assert len(await text_of(ask(await backend.channel(), "y"))) == 5
            await backend.close()

    asyncio.run(run())


def test_a_channel_does_not_belong_to_the_request_that_needed_it_first() -> None:
    """The first request's client leaves while the channel is opened, and what the request started is cancelled."""
    request = contextvars.ContextVar("request", default="none")
    seen: list[tuple[str, str]] = []

    class ContextLink(SpyLink):
        async def call(self, method: str, *args: bytes | str, replica: str | None = None) -> bytes:
            seen.append((method, request.get()))
            await asyncio.sleep(0.05)
            return await super().call(method, *args, replica=replica)

        async def events(self, session: str, replica: str) -> AsyncGenerator[bytes, None]:
            seen.append(("events", request.get()))
            async with contextlib.aclosing(super().events(session, replica)) as stream:
                async for batch in stream:
                    yield batch

    async def run() -> None:
        async with linked() as link:
            backend = Backend(ContextLink(link.hosts))

            async def first() -> None:
                request.set("first")
                await backend.channel()

            task = asyncio.create_task(first())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await text_of(ask(await backend.channel(), "y"))) == 5
            assert {method for method, _ in seen} >= {"load", "open_session", "events", "submit"}
            assert {name for _, name in seen} == {"none"}
            await backend.close()

    asyncio.run(run())


def test_where_a_replica_takes_direct_channels_nothing_goes_through_the_link() -> None:
    async def run() -> None:
        async with linked() as link:
            await link.hosts["r1"].listen("127.0.0.1")
            channel = await Channel.open(link, replica="r1")
            listeners = [ask(channel, f"prompt {i}") for i in range(4)]
            texts = await asyncio.gather(*map(text_of, listeners))
            assert [len(text) for text in texts] == [5] * 4
            assert link.batches == []
            assert link.hosts["r1"].engine.stats().branches == 4
            await channel.close()
            for _ in range(500):
                if not link.hosts["r1"].engine.stats().sessions:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the session is still there")

    asyncio.run(run())


def test_a_direct_channel_that_is_cut_fails_its_listeners() -> None:
    async def run() -> None:
        async with linked() as link:
            await link.hosts["r1"].listen("127.0.0.1")
            channel = await Channel.open(link, replica="r1")
            listener = ask(channel, "long", max_tokens=100_000)
            await listener.next()
            await link.hosts["r1"].close()
            with pytest.raises(ReplicaUnavailableError):
                await asyncio.wait_for(text_of(listener), 5)
            with pytest.raises(ReplicaUnavailableError):
                channel.listen(1)
            await channel.close()

    asyncio.run(run())


def test_a_direct_channel_that_cant_be_reached_is_done_without() -> None:
    async def run() -> None:
        async with linked() as link:
            host = link.hosts["r1"]
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            await host.listen("127.0.0.1")
            assert host._direct is not None
            host._direct._port = port
            channel = await Channel.open(link, replica="r1")
            assert len(await text_of(ask(channel, "through the link"))) == 5
            assert link.batches
            assert host.engine.stats().sessions == 1
            await channel.close()

    asyncio.run(run())


def test_requests_go_to_the_replica_with_the_fewest_branches() -> None:
    async def run() -> None:
        async with linked(names=("r1", "r2", "r3")) as link:
            backend = Backend(link, 3)
            await backend.start()
            used = []
            for i in range(6):
                channel = await backend.channel()
                ask(channel, f"{i}", max_tokens=10**6)
                used.append(channel.replica)
            assert sorted(used) == ["r1", "r1", "r2", "r2", "r3", "r3"]
            assert [backend.place() for _ in range(3)] == ["r1", "r2", "r3"]
            await backend.close()
            assert [host.engine.stats().sessions for host in link.hosts.values()] == [0, 0, 0]

    asyncio.run(run())


def test_an_idle_channel_keeps_its_session_alive() -> None:
    async def run() -> None:
        async with linked(EngineConfig(session_timeout_s=0.3)) as link:
            channel = await Channel.open(link)
            await asyncio.sleep(1.0)
            assert channel.error is None
            assert len(await text_of(ask(channel, "still here"))) == 5
            await channel.close()

    asyncio.run(run())


def test_no_replica_is_a_typed_error() -> None:
    async def run() -> None:
        backend = Backend(HostLink({}))
        await backend.start()
        for call in (backend.channel(), backend.model(), backend.stats()):
            with pytest.raises(ReplicaUnavailableError):
                await call
        await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("payload", [b"\xff", protocol.encode(Ack())])
def test_replies_that_cant_be_understood(payload: bytes) -> None:
    with pytest.raises(ReplicaUnavailableError):
        read_reply(payload, SessionOpened)


def test_a_stream_that_cant_be_read_fails_the_channel() -> None:
    class Garbled(SpyLink):
        async def events(self, session: str, replica: str) -> AsyncGenerator[bytes, None]:
            yield b"\xff"

    async def run() -> BranchlineError | None:
        async with linked() as link:
            channel = await Channel.open(Garbled(link.hosts))
            events: tuple[Event, ...] = ()
            with pytest.raises(ReplicaUnavailableError):
                events = await channel.listen(1).next()
            assert events == ()
            error = channel.error
            await channel.close()
            return error

    assert asyncio.run(run()) is not None
