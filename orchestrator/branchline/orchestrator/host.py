"""One engine's sessions, as the replica offers them: the protocol's methods without Ray.

The engine calls a session's sink in its own thread; everything here runs on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from branchline.engine.errors import (
    BranchlineError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    SessionNotFoundError,
)
from branchline.engine.types import Attach, Command, EngineStats, ErrorInfo, Event, ModelInfo
from branchline.orchestrator import protocol
from branchline.orchestrator.direct import DirectServer
from branchline.orchestrator.load_meter import LoadMeter
from branchline.orchestrator.mailbox import Mailbox
from branchline.orchestrator.outbox import Outbox
from branchline.orchestrator.protocol import (
    Ack,
    CommandBatch,
    ErrorReply,
    EventBatch,
    OpenSession,
    Reply,
    SessionOpened,
    StatsReply,
)
from branchline.orchestrator.telemetry.log import RequestLog
from branchline.orchestrator.telemetry.recorder import Recorder

_P = TypeVar("_P", OpenSession, CommandBatch)

WATCH_PERIOD_S = 1.0
SEPARATOR = "."
MAX_BACKLOG_BYTES = 32 << 20


class HostedEngine(Protocol):
    """What a host needs of an engine; `branchline.engine.engine.Engine` has it."""

    info: ModelInfo

    def open_session(self, sink: Callable[[tuple[Event, ...]], None], client: str = "", tenant: str = "") -> str: ...
    def submit(self, session: str, commands: Sequence[Command]) -> None: ...
    def touch(self, session: str) -> None: ...
    def close_session(self, session: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class EngineHost:
    """The sessions of one engine replica. Payloads are msgpack of the protocol's Structs; errors come back as `ErrorReply`.

    A session id is `<replica>.<engine's session id>`, so that whoever has it knows where to go.
    """

    def __init__(
        self,
        engine: HostedEngine,
        replica: str,
        *,
        session_timeout_s: float = 60.0,
        heartbeat_s: float = 5.0,
        log: RequestLog | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """Take the engine over: `close` closes it. Must be called with the loop running that all methods run on.

        Args:
            max_backlog_bytes: about what a session's unread events may take before it is closed with SlowReaderError.
        """
        self.load_meter = LoadMeter(engine.info)
        self.recorder = Recorder(self._busy_s, log, self.load_meter.finished)
        self._engine = engine
        self._replica = replica
        self._timeout_s = session_timeout_s
        self._heartbeat_s = heartbeat_s
        self._max_backlog_bytes = max_backlog_bytes
        self._direct: DirectServer | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._mailbox: Mailbox[tuple[Outbox, tuple[Event, ...], float]] = Mailbox(asyncio.get_running_loop(), self._deliver)
        self._failure: BranchlineError | None = None
        self._watchdog = asyncio.create_task(self._watch(), name="branchline-session-watchdog")

    async def listen(self, bind_host: str, published_host: str = "") -> None:
        """Take direct channels, too. `published_host`: where clients find it; "": at `bind_host`. Raises OSError."""
        self._direct = DirectServer(self, published_host or bind_host)
        await self._direct.start(bind_host)

    @property
    def engine(self) -> HostedEngine:
        """The hosted engine."""
        return self._engine

    async def open_session(self, payload: bytes) -> bytes:
        """OpenSession -> SessionOpened."""
        try:
            request = _decode(protocol.decode_open, payload)
            if request.version != protocol.PROTOCOL_VERSION:
                raise InvalidRequestError(
                    f"protocol version {request.version}: this server speaks {protocol.PROTOCOL_VERSION}; "
                    "install the client's and the server's packages at the same version",
                    param="version",
                )
            return protocol.encode(self._open(request))
        except BranchlineError as err:
            return _refuse(err)

    async def submit(self, payload: bytes) -> bytes:
        """CommandBatch -> Ack. A batch without commands keeps the session alive."""
        began = time.perf_counter()
        try:
            batch = _decode(protocol.decode_batch, payload)
            outbox = self._find(batch.session)
            outbox.heard = time.monotonic()
            if batch.commands:
                self._engine.submit(outbox.engine_session, tuple(map(self._localised, batch.commands)))
                outbox.recorder.submitted(batch.commands, began)
                self.load_meter.submitted(batch.commands, outbox.tenant)
            else:
                self._engine.touch(outbox.engine_session)
            return protocol.encode(Ack())
        except BranchlineError as err:
            self.recorder.refused(err)
            return _refuse(err)
        finally:
            self.recorder.transport(time.perf_counter() - began)

    async def events(self, session: str) -> AsyncGenerator[bytes, None]:
        """The session's EventBatches. The first comes at once; empty ones are heartbeats.

        A session has one reader. A stream that ends without any item is of a session that isn't here, or is read already.
        When the reader goes away the session is closed and its branches are released.
        """
        outbox = self._outboxes.get(session)
        if outbox is None or outbox.has_reader:
            return
        outbox.has_reader = True
        try:
            yield protocol.encode(EventBatch(session, outbox.take()))
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s):
                        await outbox.filled.wait()
                began, published = time.perf_counter(), outbox.oldest
                closed, events = outbox.closed, outbox.take()
                if events or not closed or outbox.error is not None:
                    error = None if outbox.error is None else ErrorInfo.of(outbox.error)
                    yield protocol.encode(EventBatch(session, events, error))
                if published is not None:
                    now = time.perf_counter()
                    self.recorder.transport(now - began)
                    self.recorder.delivered(now - published)
                if closed:
                    return
        finally:
            self._close(session)

    async def close_session(self, session: str) -> bytes:
        """Close a session; -> Ack, also for one that is gone."""
        self._close(session)
        return protocol.encode(Ack())

    async def stats(self) -> bytes:
        """-> StatsReply."""
        try:
            return protocol.encode(StatsReply(replica=self._replica, stats=self._engine.stats()))
        except BranchlineError as err:
            return _refuse(err)

    async def load(self) -> bytes:
        """-> LoadReply."""
        try:
            return protocol.encode(self.load_meter.reply(self._replica, self._engine.stats(), draining=False))
        except BranchlineError as err:
            return _refuse(err)

    async def describe(self) -> bytes:
        """-> SessionOpened without a session: the replica's name, the served model and the lease."""
        return protocol.encode(self._opened(""))

    async def check_health(self) -> None:
        """Raises EngineError when the engine no longer runs, so that Serve replaces the replica."""
        try:
            self._engine.touch("")
        except SessionNotFoundError:  # it answers
            return
        except EngineClosedError as err:
            self._failure = err
            raise EngineError(f"the engine of replica {self._replica} stopped: {err.message}") from err

    async def close(self) -> None:
        """Close all sessions and the engine. Idempotent."""
        self._watchdog.cancel()
        if self._direct is not None:
            await self._direct.close()
        for session in list(self._outboxes):
            self._close(session)
        await asyncio.to_thread(self._engine.close)

    def _open(self, request: OpenSession) -> SessionOpened:
        slot: list[Outbox] = []

        def sink(events: tuple[Event, ...]) -> None:
            self._mailbox.put((slot[0], events, time.perf_counter()))

        # The engine can't call the sink before a command was submitted, which needs the id that this gives.
        engine_session = self._engine.open_session(sink, request.client, request.tenant)
        session = f"{self._replica}{SEPARATOR}{engine_session}"
        recorder = self.recorder.session(session)
        outbox = Outbox(session, engine_session, time.monotonic(), recorder, self._max_backlog_bytes)
        outbox.tenant = request.tenant
        slot.append(outbox)
        self._outboxes[session] = outbox
        direct = self._direct.admit(session) if request.direct and self._direct is not None else None
        return msgspec.structs.replace(self._opened(session), direct=direct)

    def _opened(self, session: str) -> SessionOpened:
        return SessionOpened(session=session, replica=self._replica, model=self._engine.info, timeout_s=self._timeout_s)

    def _deliver(self, item: tuple[Outbox, tuple[Event, ...], float]) -> None:
        outbox, events, at = item
        outbox.recorder.published(events, at, time.perf_counter())
        if not outbox.add(events, at):
            self._close(outbox.session)

    def _busy_s(self) -> float:
        stats = self._engine.stats()
        return stats.tensor_s + stats.plan_s

    def _find(self, session: str) -> Outbox:
        if self._failure is not None:
            raise EngineClosedError(f"the engine of replica {self._replica} stopped: {self._failure.message}")
        outbox = self._outboxes.get(session)
        if outbox is None:
            raise SessionNotFoundError(
                f"no session {session[:12]}… on replica {self._replica}: it was closed, its client was silent for "
                f"{self._timeout_s:g} s, or its replica was restarted; open a new one"
            )
        return outbox

    def _localised(self, command: Command) -> Command:
        """The command as the engine knows it: sessions of this replica by the engine's own ids."""
        if isinstance(command, Attach):
            source = self._outboxes.get(command.source_session)
            if source is not None:
                return msgspec.structs.replace(command, source_session=source.engine_session)
        return command

    def _close(self, session: str) -> None:
        outbox = self._outboxes.pop(session, None)
        if outbox is not None:
            outbox.close()
            with contextlib.suppress(BranchlineError):
                self._engine.close_session(outbox.engine_session)

    async def _watch(self) -> None:
        """Close the sessions whose clients are silent, and all of them when the engine stops."""
        period_s = min(WATCH_PERIOD_S, self._timeout_s / 4)
        while True:
            await asyncio.sleep(period_s)
            oldest = time.monotonic() - self._timeout_s
            with contextlib.suppress(EngineError):
                await self.check_health()
            for session, outbox in list(self._outboxes.items()):
                if self._failure is not None or outbox.heard < oldest:
                    self._close(session)


def replica_of(session: str) -> str:
    """The replica that a session's id names. Raises SessionNotFoundError."""
    replica, _, rest = session.rpartition(SEPARATOR)
    if not replica or not rest:
        raise SessionNotFoundError(f"{session[:12]!r} isn't the id of a session: open_session gives one", param="session")
    return replica


def _refuse(err: BranchlineError) -> bytes:
    reply: Reply = ErrorReply(ErrorInfo.of(err))
    return protocol.encode(reply)


def _decode(decoder: Callable[[bytes], _P], payload: bytes) -> _P:
    try:
        return decoder(payload)
    except msgspec.DecodeError as err:
        raise InvalidRequestError(f"the payload can't be read: {err}") from err
