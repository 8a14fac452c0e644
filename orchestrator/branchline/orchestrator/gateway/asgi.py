"""Small parts of HTTP: bounded bodies, request ids, Server-Sent Events, and clients that go away."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from branchline.orchestrator.errors import PayloadTooLargeError

REQUEST_ID: Final = "x-request-id"
DONE: Final = b"[DONE]"
T = TypeVar("T")


def sse(messages: Iterable[bytes]) -> bytes:
    """Frame messages (which hold no line break, as JSON without indentation doesn't) as Server-Sent Events."""
    return b"".join(b"data: " + message + b"\n\n" for message in messages)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises PayloadTooLargeError before more than `max_bytes` are held."""
    too_long = PayloadTooLargeError(f"the request body has more than {max_bytes} bytes: send less at once")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_long
    chunks, length = [], 0
    async for chunk in request.stream():
        length += len(chunk)
        if length > max_bytes:
            raise too_long
        chunks.append(chunk)
    return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; cancel it and return None when the client goes away. Returns when `work` has really ended."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A Server-Sent Events response from a generator of framed bytes.

    `cleanup` runs at once when the response ends or the client goes away, at whatever point, even before the first byte.
    (A generator's own `finally` doesn't run if it was never started, and Starlette's StreamingResponse leaves one that is
    cut off in a send to the garbage collector.)
    """

    def __init__(self, source: AsyncGenerator[bytes, None], cleanup: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._source = source
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_disconnect(receive, self._send_body(send))
        finally:
            await self._source.aclose()
            await self._cleanup()

    async def _send_body(self, send: Send) -> None:
        async for chunk in self._source:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestIds:
    """ASGI middleware: every response has an `x-request-id`, the client's own if it sent a sane one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID.encode()), "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given) else f"req_{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
