"""The branch API over HTTP: sessions on a replica, passed through. A session's id names its replica, so any gateway can
serve any session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from branchline.engine.errors import BranchlineError, InvalidRequestError, SessionNotFoundError
from branchline.orchestrator import protocol
from branchline.orchestrator.channel import read_reply
from branchline.orchestrator.gateway.asgi import EventStream, read_body, sse
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.host import replica_of
from branchline.orchestrator.prefix import NO_PREFIX
from branchline.orchestrator.protocol import MSGPACK, Ack, CommandBatch, EventBatch, OpenSession, SessionOpened

T = TypeVar("T")
KEEP_ALIVE_S = 5.0


class Branches:
    """`/v1/sessions` and what is below it."""

    def __init__(self, backend: Backend, max_body_bytes: int) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """The routes of this part."""
        return [
            Route("/v1/sessions", self.open, methods=["POST"]),
            Route("/v1/sessions/{session}", self.close, methods=["DELETE"]),
            Route("/v1/sessions/{session}/commands", self.commands, methods=["POST"]),
            Route("/v1/sessions/{session}/events", self.events, methods=["GET"]),
        ]

    async def open(self, request: Request) -> Response:
        """POST /v1/sessions: OpenSession -> SessionOpened. An empty body is an OpenSession without anything."""
        body = await read_body(request, self._max_body_bytes)
        given = _decode(request, body, protocol.decode_open, protocol.decode_open_json) if body else OpenSession()
        # A direct channel is for who is inside: its address and token don't leave through the gateway.
        tenant = given.tenant or request.headers.get(protocol.TENANT_HEADER, "")
        given = msgspec.structs.replace(given, tenant=tenant, direct=False)
        replica = self._backend.place((given.near or NO_PREFIX).of_tenant(tenant))
        reply = await self._backend.link.call("open_session", protocol.encode(given), replica=replica)
        return _answer(request, read_reply(reply, SessionOpened))

    async def commands(self, request: Request) -> Response:
        """POST /v1/sessions/{session}/commands: a list of commands -> 202; what they do comes in the event stream."""
        session, replica = _session(request)
        body = await read_body(request, self._max_body_bytes)
        commands = _decode(request, body, protocol.decode_commands, protocol.decode_commands_json)
        try:
            payload = protocol.encode(CommandBatch(session, commands))
        except (OverflowError, ValueError, TypeError) as err:
            raise InvalidRequestError(f"the commands can't be encoded: {err}") from err
        ack = read_reply(await self._backend.link.call("submit", payload, replica=replica), Ack)
        return _answer(request, ack, status=202)

    async def events(self, request: Request) -> Response:
        """GET /v1/sessions/{session}/events: Server-Sent Events, one EventBatch a message. The client that goes away closes
        the session."""
        session, replica = _session(request)
        stream = self._backend.link.events(session, replica)
        try:
            first = await anext(stream)
        except StopAsyncIteration:
            raise SessionNotFoundError(
                f"no stream for session {session[:12]}…: it is closed, or its stream is read already; open a new session"
            ) from None
        except BaseException:
            await stream.aclose()
            raise
        return EventStream(self._relay(first, stream, session, replica), stream.aclose)

    async def close(self, request: Request) -> Response:
        """DELETE /v1/sessions/{session} -> 204, also for a session that is gone."""
        session, replica = _session(request)
        read_reply(await self._backend.link.call("close_session", session, replica=replica), Ack)
        return Response(status_code=204)

    async def _relay(
        self, first: bytes, stream: AsyncGenerator[bytes, None], session: str, replica: str
    ) -> AsyncGenerator[bytes, None]:
        """Frame the batches; keep the session alive, for its client is there as long as this runs."""
        keep_alive = protocol.encode(CommandBatch(session, ()))
        touched = time.monotonic()
        yield _frame(protocol.decode_events(first))
        try:
            async for payload in stream:
                batch = protocol.decode_events(payload)
                yield _frame(batch)
                now = time.monotonic()
                if not batch.events or now - touched > KEEP_ALIVE_S:
                    touched = now
                    read_reply(await self._backend.link.call("submit", keep_alive, replica=replica), Ack)
        except BranchlineError as err:
            yield sse([protocol.encode_json(protocol.openai_error(err))])


def _frame(batch: EventBatch) -> bytes:
    return sse([protocol.encode_json(batch)])


def _session(request: Request) -> tuple[str, str]:
    session: str = request.path_params["session"]
    return session, replica_of(session)


def _decode(request: Request, body: bytes, from_msgpack: Callable[[bytes], T], from_json: Callable[[bytes], T]) -> T:
    decoder = from_msgpack if request.headers.get("content-type", "").startswith(MSGPACK) else from_json
    try:
        return decoder(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise InvalidRequestError(f"the body can't be read: {err}") from err


def _answer(request: Request, value: Any, status: int = 200) -> Response:
    if MSGPACK in request.headers.get("accept", ""):
        return Response(protocol.encode(value), status_code=status, media_type=MSGPACK)
    return Response(protocol.encode_json(value), status_code=status, media_type="application/json")
