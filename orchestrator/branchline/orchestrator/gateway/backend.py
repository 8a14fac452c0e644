"""The engine replicas as the gateway sees them: one session on each, and the choice between them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging

from branchline.engine.errors import BranchlineError
from branchline.engine.types import EngineStats, ModelInfo
from branchline.orchestrator.channel import Channel, read_reply
from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.link import Link
from branchline.orchestrator.placement import Placement
from branchline.orchestrator.prefix import NO_PREFIX, Prefix
from branchline.orchestrator.protocol import LoadReply, StatsReply
from branchline.orchestrator.routing_policy import least_loaded
from branchline.orchestrator.telemetry.log import RequestLog

logger = logging.getLogger(__name__)
REFRESH_PERIOD_S = 1.0
RECOVERY_PERIOD_S = 0.5


class Backend:
    """Keeps a channel to every replica that is up."""

    def __init__(self, link: Link, num_replicas: int = 1, log: RequestLog | None = None) -> None:
        """`num_replicas`: how many are expected; while fewer are up they are looked for more often."""
        self.link = link
        self.log = log or RequestLog(enabled=False)
        self._num_replicas = num_replicas
        self._channels: dict[str, Channel] = {}
        self._placement = Placement()
        self._refreshing = asyncio.Lock()
        self._refresher: asyncio.Task[None] | None = None
        self._model: ModelInfo | None = None

    async def start(self) -> None:
        """Connect to the replicas that are up now, and go on looking for others. Never raises for the lack of one."""
        with contextlib.suppress(BranchlineError):
            await self._refresh()
        self._refresher = asyncio.create_task(self._keep_fresh(), name="branchline-backend-refresher")

    async def close(self) -> None:
        """Close all channels."""
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

    async def model(self) -> ModelInfo:
        """The served model. Raises ReplicaUnavailableError when no replica is up."""
        if self._model is None:
            await self.channel()
        assert self._model is not None
        return self._model

    async def channel(self, prefix: Prefix = NO_PREFIX) -> Channel:
        """The channel to the replica where a new root with this prefix goes. Raises ReplicaUnavailableError when no replica
        is up."""
        if not self._live():
            # For all requests that wait, so not within this one: Serve would cancel it when this one's client leaves.
            await asyncio.shield(asyncio.create_task(self._refresh(), context=contextvars.Context()))
        live = self._live()
        if not live:
            raise ReplicaUnavailableError("no engine replica is up; try again")
        chosen = self._placement.place(prefix, live)
        return live[chosen or least_loaded({name: channel.num_branches for name, channel in live.items()})]

    async def stats(self, replica: str | None = None) -> EngineStats:
        """The counters of one replica, or of all together. Raises ReplicaUnavailableError."""
        if replica is not None:
            return read_reply(await self.link.call("stats", replica=replica), StatsReply).stats
        replies = [reply.stats for reply in await self.stats_by_replica()]
        fields = EngineStats.__struct_fields__
        return EngineStats(**{name: sum(getattr(stats, name) for stats in replies) for name in fields})

    async def stats_by_replica(self) -> list[StatsReply]:
        """The counters of each replica, by name. Raises ReplicaUnavailableError when none answers."""
        replies = [read_reply(payload, StatsReply) for payload in await self.link.call_all("stats")]
        if not replies:
            raise ReplicaUnavailableError("no engine replica answers; try again")
        return sorted(replies, key=lambda reply: reply.replica)

    def place(self, prefix: Prefix = NO_PREFIX) -> str | None:
        """The replica for a session whose first context begins like this; None when none is known: then any will do."""
        return self._placement.place(prefix)

    def num_live(self) -> int:
        """Replicas that a request could go to now."""
        return len(self._live())

    def _live(self) -> dict[str, Channel]:
        return {name: channel for name, channel in self._channels.items() if channel.error is None}

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S if self.num_live() >= self._num_replicas else RECOVERY_PERIOD_S)
            try:
                await self._refresh()
            except BranchlineError as err:
                logger.warning("looking for engine replicas: %s", err)
            except Exception:
                logger.exception("looking for engine replicas")

    async def _refresh(self) -> None:
        """Ask all replicas for their load; open channels to new ones, drop those that broke."""
        async with self._refreshing:
            found = [read_reply(payload, LoadReply) for payload in await self.link.call_all("load")]
            self._placement.update(found)
            for name in [name for name, channel in self._channels.items() if channel.error is not None]:
                await self._channels.pop(name).close()
            for load in found:
                if load.replica not in self._channels:
                    channel = await Channel.open(self.link, replica=load.replica, client="gateway")
                    self._channels[channel.replica] = channel
                    self._model = channel.opened.model
