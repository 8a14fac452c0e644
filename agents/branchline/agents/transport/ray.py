"""Through a Ray Serve handle. The only module of the SDK that imports Ray.

A session lives on one replica; `options(session_id=<replica>)` takes every call of it there. Where the replica can be reached
directly, batches and events travel over a connection of the session's own (orchestrator/wire.py), at a fiftieth of the cost;
else through Ray. Ray doesn't cancel a stream whose reader went away, so the stream is cancelled here, in `events`' `finally`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from branchline.agents.errors import ConnectError, ConnectionLostError
from branchline.engine.errors import BranchlineError
from branchline.engine.types import Command, EngineStats
from branchline.orchestrator.placement import place
from branchline.orchestrator.prefix import Prefix
from branchline.orchestrator.protocol import (
    APP_NAME,
    ENGINE_DEPLOYMENT,
    CommandBatch,
    ErrorReply,
    EventBatch,
    LoadReply,
    OpenSession,
    Reply,
    SessionOpened,
    StatsReply,
    decode_events,
    decode_reply,
    encode,
)
from branchline.orchestrator.wire import DirectConnection

logger = logging.getLogger(__name__)

BROADCAST_TIMEOUT_S = 10.0


class RayTransport:
    """One session of a Serve application.

    Args:
        handle: the engine deployment's handle.
        replica: which replica to open the session on; "": any.
        near: what the session's first context begins with; without `replica`, it is opened where that is expected to be
            answered first, which all replicas are asked for.
        direct: whether to try a direct channel.

    Attributes:
        connection: the direct channel, if there is one.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        *,
        client: str = "",
        tenant: str = "",
        replica: str = "",
        direct: bool = True,
        near: Prefix | None = None,
    ) -> None:
        self.connection: DirectConnection | None = None
        self._direct = direct
        self._handle = handle
        self._near = near
        self._client = client
        self._tenant = tenant
        self._replica = replica
        self._session = ""
        self._pinned = handle
        self._stream: Any = None
        self._closed = False

    async def open(self) -> SessionOpened:
        """Open the session. Raises ConnectError when no replica answers."""
        opened = await self._open(self._direct)
        if opened.direct is None:
            return opened
        try:
            self.connection = await DirectConnection.open(opened.session, opened.direct)
            return opened
        except (OSError, EOFError, BranchlineError) as err:
            address = f"{opened.direct.host}:{opened.direct.port}"
            logger.info("no direct channel to replica %s at %s (%s): through Ray", opened.replica, address, err)
        # The replica may have let us in, and the answer was lost: then that session is over.
        with contextlib.suppress(BranchlineError):
            await _call(self._pinned, "close_session", opened.session)
        return await self._open(False)

    async def _open(self, direct: bool) -> SessionOpened:
        wanted = self._replica or await self._nearest()
        handle = self._handle.options(session_id=wanted) if wanted else self._handle
        asked = OpenSession(client=self._client, tenant=self._tenant, direct=direct)
        try:
            opened = await _call(handle, "open_session", encode(asked))
        except ConnectionLostError as err:
            raise ConnectError(f"no engine replica answers: {err.message}") from err
        if not isinstance(opened, SessionOpened):
            raise ConnectError(f"what answers isn't a Branchline engine: {opened!r}")
        self._session = opened.session
        self._pinned = self._handle.options(session_id=opened.replica)
        if self._replica and opened.replica != self._replica:
            raise ConnectError(f"replica {self._replica!r} is gone, and its branches with it: make the context again elsewhere")
        return opened

    async def _nearest(self) -> str:
        """The replica for `near`; "" for any: none was asked for, or none says."""
        if self._near is None:
            return ""
        try:
            answers = await self._handle.broadcast("load").results_async(timeout_s=BROADCAST_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            return ""
        replies = [decode_reply(answer) for answer in answers if isinstance(answer, bytes)]
        return place([reply for reply in replies if isinstance(reply, LoadReply)], self._near.of_tenant(self._tenant)) or ""

    async def send(self, commands: Sequence[Command]) -> None:
        """Send the commands to the session's replica; returns when its engine accepted them."""
        payload = encode(CommandBatch(self._session, tuple(commands)))
        if self.connection is None:
            await _call(self._pinned, "submit", payload)
            return
        try:
            reply = decode_reply(await self.connection.submit(payload))
        except OSError as err:
            raise ConnectionLostError(f"submit: {err}") from err
        if isinstance(reply, ErrorReply):
            raise reply.exception()

    async def events(self) -> AsyncIterator[EventBatch]:
        """Read the replica's stream; cancels it when the reader goes away."""
        if self.connection is not None:
            try:
                async with contextlib.aclosing(self.connection.events()) as stream:
                    async for payload in stream:
                        yield decode_events(payload)
            except OSError as err:
                raise ConnectionLostError(f"events: {err}") from err
            return
        self._stream = self._pinned.options(stream=True).events.remote(self._session)
        try:
            async for payload in self._stream:
                yield decode_events(payload)
        except BranchlineError:
            raise
        except (RayError, RayServeException) as err:
            raise _lost("events", err) from err
        finally:
            self._cancel_stream()

    async def stats(self) -> EngineStats:
        """Counters of the session's replica."""
        reply = await _call(self._pinned, "stats")
        if not isinstance(reply, StatsReply):
            raise ConnectionLostError(f"stats: unexpected answer {reply!r}")
        return reply.stats

    async def close(self) -> None:
        """Close the session and cancel its stream."""
        if self._closed:
            return
        self._closed = True
        if self.connection is not None:
            await self.connection.close()  # which closes the session
            return
        try:
            if self._session:
                with contextlib.suppress(BranchlineError):
                    await _call(self._pinned, "close_session", self._session)
        finally:
            self._cancel_stream()

    def _cancel_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


async def _call(handle: DeploymentHandle[Any], method: str, *args: bytes | str) -> Reply:
    try:
        reply = decode_reply(await getattr(handle, method).remote(*args))
    except BranchlineError:
        raise
    except (RayError, RayServeException) as err:
        raise _lost(method, err) from err
    if isinstance(reply, ErrorReply):
        raise reply.exception()
    return reply


def _lost(method: str, err: Exception) -> BranchlineError:
    cause = getattr(err, "cause", None)
    if isinstance(cause, BranchlineError):
        return cause
    return ConnectionLostError(f"{method}: the engine replica doesn't answer: {type(err).__name__}: {str(err)[:400]}")


def make_transport(
    target: str | DeploymentHandle[Any],
    *,
    client: str,
    tenant: str,
    near: Prefix | None = None,
    replica: str = "",
    direct: bool = True,
) -> RayTransport:
    """The transport to "serve:<app>", or to the handle of an engine deployment.

    Raises ConnectError if Ray isn't initialised here, or no such application runs.
    """
    if not isinstance(target, str):
        return RayTransport(target, client=client, tenant=tenant, replica=replica, near=near, direct=direct)
    app = target.partition(":")[2] or APP_NAME
    if not ray.is_initialized():
        raise ConnectError(
            f"{target!r}: Ray isn't initialised in this process: call ray.init(address='auto') first, or use a URL"
        )
    try:
        handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, app)
    except (RayError, RayServeException, KeyError) as err:
        raise ConnectError(f"{target!r}: no Serve application {app!r} runs here: {err}") from err
    return RayTransport(handle, client=client, tenant=tenant, replica=replica, near=near, direct=direct)
