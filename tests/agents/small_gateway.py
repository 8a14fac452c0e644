"""The session routes of `orchestrator.protocol` over any engine, as small as they can be: what the HTTP transport talks to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from branchline.agents.transport.local import EngineLike
from branchline.engine.errors import BranchlineError, InvalidRequestError
from branchline.engine.types import Event
from branchline.orchestrator.protocol import (
    EventBatch,
    SessionOpened,
    decode_commands_json,
    decode_open_json,
    encode_json,
    openai_error,
)


class SmallGateway:
    """Holds each session's events until its stream takes them."""

    def __init__(self, engine: EngineLike, *, timeout_s: float = 60.0) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.queues: dict[str, asyncio.Queue[tuple[Event, ...]]] = {}
        self.num_posts = 0
        self.streams = 0
        routes = [
            Route("/v1/sessions", self.open, methods=["POST"]),
            Route("/v1/sessions/{id}/commands", self.commands, methods=["POST"]),
            Route("/v1/sessions/{id}/events", self.events),
            Route("/v1/sessions/{id}", self.close, methods=["DELETE"]),
            Route("/v1/stats", self.stats),
        ]
        self.app = Starlette(routes=routes, exception_handlers={BranchlineError: self.error})

    async def error(self, _: Request, err: Exception) -> Response:
        assert isinstance(err, BranchlineError)
        return Response(encode_json(openai_error(err)), err.status, media_type="application/json")

    async def open(self, request: Request) -> Response:
        asked = decode_open_json(await request.body())
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[Event, ...]] = asyncio.Queue()

        def sink(events: tuple[Event, ...]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, events)

        session = self.engine.open_session(sink, asked.client)
        self.queues[session] = queue
        opened = SessionOpened(session=session, replica="here", model=self.engine.info, timeout_s=self.timeout_s)
        return Response(encode_json(opened), media_type="application/json")

    async def commands(self, request: Request) -> Response:
        self.num_posts += 1
        try:
            commands = decode_commands_json(await request.body())
        except msgspec.MsgspecError as err:
            raise InvalidRequestError(str(err)) from err
        session = request.path_params["id"]
        if commands:
            self.engine.submit(session, commands)
        else:
            self.engine.touch(session)
        return Response(status_code=202)

    async def events(self, request: Request) -> Response:
        session = request.path_params["id"]
        self.engine.touch(session)
        queue = self.queues[session]

        async def stream() -> AsyncIterator[bytes]:
            self.streams += 1
            try:
                yield b": hello\n\ndata: " + encode_json(EventBatch(session, ())) + b"\r\n\r\n"
                while session in self.queues:
                    yield b"data: " + encode_json(EventBatch(session, await queue.get())) + b"\n\n"
            finally:
                self.streams -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def close(self, request: Request) -> Response:
        session = request.path_params["id"]
        self.engine.close_session(session)
        self.queues.pop(session, None)
        return Response(status_code=204)

    async def stats(self, _: Request) -> Response:
        return Response(encode_json(self.engine.stats()), media_type="application/json")


class Server:
    """Runs a gateway in a thread; `url` says where. `stop` cuts all connections."""

    def __init__(self, gateway: SmallGateway) -> None:
        self.gateway = gateway
        config = uvicorn.Config(gateway.app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        for _ in range(1000):
            if self._server.started:
                break
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)


@contextlib.contextmanager
def serving(engine: EngineLike) -> Iterator[Server]:
    server = Server(SmallGateway(engine))
    try:
        yield server
    finally:
        server.stop()
