"""One session on one replica, shared by many requests: what the gateway holds for each engine."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from branchline.engine.errors import BranchlineError, EngineClosedError, EngineError, EngineOverloadedError, InvalidRequestError
from branchline.engine.types import Command, Event, Forked, Raced, Release
from branchline.orchestrator import protocol
from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.link import Link
from branchline.orchestrator.protocol import Ack, ErrorReply, OpenSession, Reply, SessionOpened
from branchline.orchestrator.wire import DirectConnection

logger = logging.getLogger(__name__)
KEEP_ALIVES_PER_TIMEOUT = 3
R = TypeVar("R", bound=Reply)


def read_reply(payload: bytes, expected: type[R]) -> R:
    """Decode a replica's reply. Raises the error that it carries, as its own type."""
    try:
        reply = protocol.decode_reply(payload)
    except msgspec.DecodeError as err:
        raise ReplicaUnavailableError(f"a replica's reply can't be read: {err}") from err
    if isinstance(reply, ErrorReply):
        raise reply.exception()
    if not isinstance(reply, expected):
        raise ReplicaUnavailableError(f"a replica answered {type(reply).__name__}, expected {expected.__name__}")
    return reply


async def _open(link: Link, request: OpenSession, replica: str | None) -> SessionOpened:
    return read_reply(await link.call("open_session", protocol.encode(request), replica=replica), SessionOpened)


class Listener:
    """The events of some branches of a channel, for one reader."""

    def __init__(self, branches: range) -> None:
        self.branches = branches
        self._events: list[Event] = []
        self._error: BranchlineError | None = None
        self._filled = asyncio.Event()

    async def next(self) -> tuple[Event, ...]:
        """What has arrived since the last call; waits for something to arrive.

        Raises what ended the channel, or why the engine refused the commands, once all events before were given out.
        """
        await self._filled.wait()
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = tuple(self._events), []
        if self._error is None:
            self._filled.clear()
        return events

    def add(self, event: Event) -> None:
        """Called by the channel."""
        self._events.append(event)
        self._filled.set()

    def fail(self, error: BranchlineError) -> None:
        """Called by the channel: nothing comes after this."""
        if self._error is None:
            self._error = error
            self._filled.set()


class Channel:
    """Sends commands in order and gives each event to the listener of its branch.

    Commands that come while a batch is under way travel together in the next one. Commands passed in one `send` succeed or
    are refused together.
    """

    def __init__(self, link: Link, opened: SessionOpened, connection: DirectConnection | None = None) -> None:
        """Use `open`. `connection`: the session's direct channel, if there is one."""
        self.opened = opened
        self._connection = connection
        self.error: BranchlineError | None = None
        self._link = link
        self._next_branch = 0
        self._requests = itertools.count()
        self._listeners: dict[int, Listener] = {}
        self._unsent: deque[tuple[Listener, list[msgspec.Raw]]] = deque()
        self._has_unsent = asyncio.Event()
        # In a context of their own: Serve cancels what was started within an HTTP request when its client leaves.
        self._tasks = tuple(
            asyncio.create_task(work, name=f"branchline-channel-{name}", context=contextvars.Context())
            for name, work in (("sender", self._send_all()), ("reader", self._read_all()))
        )

    @classmethod
    async def open(cls, link: Link, *, replica: str | None = None, client: str = "") -> Channel:
        """Open a session on a replica (None: the one with the shortest queue), over a direct channel where the replica offers
        one that can be reached. Raises a BranchlineError."""
        opened = await _open(link, OpenSession(client=client, direct=True), replica)
        if opened.direct is None:
            return cls(link, opened)
        try:
            return cls(link, opened, await DirectConnection.open(opened.session, opened.direct))
        except (OSError, EOFError, BranchlineError) as err:
            logger.info("no direct channel to replica %s (%s): through Ray", opened.replica, err)
        # The replica may have let us in, and the answer was lost: then that session is over.
        await link.call("close_session", opened.session, replica=opened.replica)
        return cls(link, await _open(link, OpenSession(client=client), opened.replica))

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self.opened.replica

    @property
    def num_branches(self) -> int:
        """Branches that are listened to now: the load that this channel's owner put on the replica."""
        return len(self._listeners)

    def listen(self, count: int) -> Listener:
        """Mint ids for `count` branches and listen to them. Raises what ended the channel."""
        if self.error is not None:
            raise self.error
        listener = Listener(range(self._next_branch, self._next_branch + count))
        self._next_branch += count
        for branch in listener.branches:
            self._listeners[branch] = listener
        return listener

    def mint_request(self) -> int:
        """A new request id."""
        return next(self._requests)

    def send(self, listener: Listener, commands: Sequence[Command]) -> None:
        """Queue commands about the listener's branches. Never blocks. If the engine refuses them the listener is told.

        Raises InvalidRequestError for values that can't travel, such as integers of more than 64 bits in a tool call.
        """
        try:
            # Encoded here, so that what one request holds can't stop the others'.
            encoded = [msgspec.Raw(protocol.encode(command)) for command in commands]
        except (OverflowError, ValueError, TypeError) as err:
            raise InvalidRequestError(f"the request can't be encoded: {err}") from err
        if self.error is None:
            self._unsent.append((listener, encoded))
            self._has_unsent.set()

    def release(self, listener: Listener) -> None:
        """Stop listening and release the branches, whatever runs on them. Idempotent."""
        if listener.branches and listener.branches[0] in self._listeners:
            for branch in listener.branches:
                del self._listeners[branch]
            self.send(listener, (Release(tuple(listener.branches)),))

    async def close(self) -> None:
        """Close the session, which releases all its branches; listeners fail. Idempotent; never raises for a lost replica."""
        self._fail(EngineClosedError("the gateway was shut down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()  # which closes the session
            return
        with contextlib.suppress(BranchlineError):
            await self._link.call("close_session", self.opened.session, replica=self.replica)

    def _fail(self, error: BranchlineError) -> None:
        if self.error is None:
            self.error = error
            self._unsent.clear()
            for listener in set(self._listeners.values()):
                listener.fail(error)
            self._listeners.clear()

    async def _send_all(self) -> None:
        try:
            while True:
                # A batch without commands when there was nothing to say for a while: the session's keep-alive.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_unsent.wait(), self.opened.timeout_s / KEEP_ALIVES_PER_TIMEOUT)
                self._has_unsent.clear()
                groups = list(self._unsent)
                self._unsent.clear()
                try:
                    await self._submit([command for _, commands in groups for command in commands])
                except EngineOverloadedError as err:
                    await self._send_each(groups, err)
        except BranchlineError as err:
            self._fail(err)
        except Exception as err:
            logger.exception("commands for replica %s can't be sent", self.replica)
            self._fail(EngineError(f"commands for replica {self.replica} can't be sent: {err!r}"))
        finally:
            self._fail_cancelled()

    async def _send_each(self, groups: list[tuple[Listener, list[msgspec.Raw]]], refusal: EngineOverloadedError) -> None:
        """A batch was refused as a whole, perhaps for one request's sake: the others, and all releases, go alone."""
        for listener, commands in groups:
            try:
                if len(groups) == 1:
                    raise refusal
                await self._submit(commands)
            except EngineOverloadedError as err:
                listener.fail(err)

    async def _submit(self, commands: list[msgspec.Raw]) -> None:
        # A CommandBatch whose commands are encoded already.
        payload = protocol.encode({"session": self.opened.session, "commands": commands})
        if self._connection is None:
            reply = await self._link.call("submit", payload, replica=self.replica)
        else:
            try:
                reply = await self._connection.submit(payload)
            except ConnectionError as err:
                raise self._lost(err) from err
        read_reply(reply, Ack)

    def _lost(self, err: ConnectionError) -> ReplicaUnavailableError:
        return ReplicaUnavailableError(f"engine replica {self.replica} can't be reached ({err}); try again")

    async def _read_all(self) -> None:
        direct = self._connection
        events = self._link.events(self.opened.session, self.replica) if direct is None else direct.events()
        try:
            async with contextlib.aclosing(events) as stream:
                async for payload in stream:
                    batch = protocol.decode_events(payload)
                    for event in batch.events:
                        if isinstance(event, Raced):  # the gateway starts no race
                            continue
                        branch = event.parent if isinstance(event, Forked) else event.branch
                        listener = self._listeners.get(branch)
                        if listener is not None:
                            listener.add(event)
                    if batch.error is not None:
                        raise batch.error.exception()
            self._fail(ReplicaUnavailableError(f"engine replica {self.replica} closed the gateway's session; try again"))
        except BranchlineError as err:
            self._fail(err)
        except ConnectionError as err:
            self._fail(self._lost(err))
        except msgspec.DecodeError as err:
            logger.exception("events of replica %s can't be read", self.replica)
            self._fail(ReplicaUnavailableError(f"events of replica {self.replica} can't be read: {err}"))
        finally:
            self._fail_cancelled()

    def _fail_cancelled(self) -> None:
        """A channel of which one half has ended is of no use: whoever cancelled it, its listeners must not wait for ever."""
        self._fail(ReplicaUnavailableError(f"the session on engine replica {self.replica} was cut off; try again"))
