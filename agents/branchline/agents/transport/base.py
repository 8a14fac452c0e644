"""What a session needs of the way to its engine. Adding a transport is one file beside this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from branchline.engine.types import Command, EngineStats
from branchline.orchestrator.protocol import EventBatch, SessionOpened


class Transport(Protocol):
    """One session's command channel and event stream. Used from one asyncio loop."""

    async def open(self) -> SessionOpened:
        """Open the session. Called once, first. Raises a BranchlineError, or ConnectionError when nothing answers."""
        ...

    async def send(self, commands: Sequence[Command]) -> None:
        """Deliver commands in order; returns when the engine accepted them. The session never runs two sends at a time.
        Raises SessionNotFoundError, EngineOverloadedError, …; then none of them took effect."""
        ...

    def events(self) -> AsyncIterator[EventBatch]:
        """The session's event stream, from its start. Called once. Ends when the session was closed."""
        ...

    async def stats(self) -> EngineStats:
        """Counters of the engine (of the session's replica)."""
        ...

    async def close(self) -> None:
        """Close the session and the stream. Releases all the session's branches. Idempotent; never raises for a session
        that is gone already."""
        ...
