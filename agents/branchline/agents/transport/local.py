"""To an engine in this process: its thread hands each step's events to the session's loop, nothing is encoded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from branchline.engine.errors import EngineClosedError, SessionNotFoundError
from branchline.engine.types import Command, EngineStats, Event, ModelInfo
from branchline.orchestrator.prefix import Prefix
from branchline.orchestrator.protocol import EventBatch, SessionOpened

TIMEOUT_S = 60.0
TOUCH_S = 1.0


class EngineLike(Protocol):
    """What is needed of an engine; `branchline.engine.engine.Engine` and `agents.testing.ScriptedEngine` have it."""

    info: ModelInfo

    def open_session(self, sink: Callable[[tuple[Event, ...]], None], client: str = "", tenant: str = "") -> str: ...
    def submit(self, session: str, commands: Sequence[Command]) -> None: ...
    def touch(self, session: str) -> None: ...
    def close_session(self, session: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class LocalTransport:
    """One session of an engine in this process."""

    def __init__(self, engine: EngineLike, *, client: str = "", tenant: str = "") -> None:
        self._engine = engine
        self._client = client
        self._tenant = tenant
        self._session = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: list[Event] = []
        self._arrived = asyncio.Event()
        self._woken = False
        self._closed = False

    async def open(self) -> SessionOpened:
        """Open the session. Raises EngineClosedError."""
        self._loop = asyncio.get_running_loop()
        self._session = self._engine.open_session(self._take, self._client, self._tenant)
        return SessionOpened(
            session=self._session, replica=engine_name(self._engine), model=self._engine.info, timeout_s=TIMEOUT_S
        )

    async def send(self, commands: Sequence[Command]) -> None:
        """Hand the commands to the engine's queue. Raises SessionNotFoundError, EngineClosedError, EngineOverloadedError."""
        if commands:
            self._engine.submit(self._session, commands)
        else:
            self._engine.touch(self._session)

    def _take(self, events: tuple[Event, ...]) -> None:
        """In the engine thread: keep a step's events, and wake the loop if it isn't woken already."""
        self._inbox.extend(events)
        if not self._woken and self._loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def events(self) -> AsyncIterator[EventBatch]:
        """Batches as the engine makes them. Raises EngineClosedError within a second after the engine was closed."""
        touched = time.monotonic()
        while not self._closed:
            if time.monotonic() - touched >= TOUCH_S:
                self._engine.touch(self._session)
                touched = time.monotonic()
            if not self._inbox:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TOUCH_S):
                        await self._arrived.wait()
            self._arrived.clear()
            # The flag first: what the engine adds from here on wakes the loop once more. Items are taken by count, for the
            # engine's thread may be adding.
            self._woken = False
            count = len(self._inbox)
            if count:
                events = tuple(self._inbox[:count])
                del self._inbox[:count]
                yield EventBatch(self._session, events)

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats()

    async def close(self) -> None:
        """Close the session."""
        self._closed = True
        self._arrived.set()
        if self._session:
            with contextlib.suppress(EngineClosedError, SessionNotFoundError):
                self._engine.close_session(self._session)


def engine_name(engine: EngineLike) -> str:
    """Names the engine among those of this process, as a replica's name does in a cluster."""
    return f"local-{os.getpid()}-{id(engine):x}"


def is_engine(target: Any) -> bool:
    """Whether a target can be used as an engine in this process."""
    return all(callable(getattr(target, name, None)) for name in ("open_session", "submit", "close_session"))


def make_transport(target: EngineLike, *, client: str, tenant: str, near: Prefix | None = None) -> LocalTransport:
    """The transport to an engine object; there is one, so `near` chooses nothing."""
    return LocalTransport(target, client=client, tenant=tenant)
