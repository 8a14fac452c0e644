"""The replica's end of the direct channel: a TCP server beside Ray, for clients that can reach it (see wire.py).

A connection is let in by a token that `open_session` handed out through Ray: 128 random bits, good once, for seconds, and for
that session alone. Everything else is the host's: the same batches, the same stream, the same errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from branchline.engine.errors import BranchlineError
from branchline.engine.types import ErrorInfo
from branchline.orchestrator import protocol, wire
from branchline.orchestrator.errors import TokenRefusedError
from branchline.orchestrator.protocol import Ack, DirectAddress, ErrorReply

logger = logging.getLogger("ray.serve.branchline")
TOKEN_BYTES = 16
TOKEN_S = 10.0
HELLO_TIMEOUT_S = 5.0
STALL_S = 60.0
"""A client that reads nothing for so long is gone: its connection is cut."""
HANG_UP_S = 2.0
# Above it a connection's unsent bytes hold the stream back, so that events are joined in the session's outbox.
WRITE_BUFFER_BYTES = 128 << 10


class Sessions(Protocol):
    """What the server needs of a host."""

    async def submit(self, payload: bytes) -> bytes: ...
    def events(self, session: str) -> AsyncGenerator[bytes, None]: ...
    async def close_session(self, session: str) -> bytes: ...


class DirectServer:
    """Lets clients in that a host has admitted."""

    def __init__(self, host: Sessions, published_host: str) -> None:
        """`published_host`: the address under which clients are told to find it."""
        self._host = host
        self._published_host = published_host
        self._port = 0
        self._server: asyncio.Server | None = None
        self._admitted: dict[str, tuple[str, float]] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, bind_host: str) -> None:
        """Listen on a free port. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, bind_host, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def admit(self, session: str) -> DirectAddress:
        """A way in for the session's client, for `TOKEN_S` seconds."""
        now = time.monotonic()
        for stale in [name for name, (_, until) in self._admitted.items() if until < now]:
            del self._admitted[stale]
        token = secrets.token_hex(TOKEN_BYTES)
        self._admitted[session] = token, now + TOKEN_S
        return DirectAddress(self._published_host, self._port, token)

    async def close(self) -> None:
        """Stop to listen, and cut all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="branchline-direct")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.tune(writer)
        writer.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                session = self._redeem(wire.read_hello(*await wire.read_frame(reader, wire.MAX_HELLO_BYTES)))
            writer.write(wire.frame(wire.REPLY, protocol.encode(Ack())))
            await self._relay(session, reader, writer)
        except BranchlineError as err:
            with contextlib.suppress(OSError):
                writer.write(wire.frame(wire.REPLY, protocol.encode(ErrorReply(ErrorInfo.of(err)))))
                await writer.drain()
        except (OSError, EOFError):  # the client went away, or said or read nothing
            writer.transport.abort()
        except Exception:
            logger.exception("a direct channel failed")
        finally:
            await _hang_up(writer)

    def _redeem(self, hello: wire.Hello) -> str:
        """The session that the hello opens. Raises TokenRefusedError; the token is spent either way."""
        token, until = self._admitted.pop(hello.session, ("", 0.0))
        if not hmac.compare_digest(token.encode(), hello.token.encode()) or not token or until < time.monotonic():
            raise TokenRefusedError("the direct channel's token is wrong, was used already, or is too old: open a new session")
        return hello.session

    async def _relay(self, session: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Batches in, events out, until either side ends; then the session is closed."""
        halves = {
            asyncio.ensure_future(self._take_batches(reader, writer)),
            asyncio.ensure_future(self._give_events(session, writer)),
        }
        try:
            done, _ = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            for half in done:
                half.result()
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            await self._host.close_session(session)

    async def _take_batches(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            kind, payload = await wire.read_frame(reader)
            if kind != wire.BATCH:
                raise wire.FrameError(f"a frame of kind {kind} from a client: expected a batch, {wire.BATCH}")
            writer.write(wire.frame(wire.REPLY, await self._host.submit(payload)))
            await writer.drain()

    async def _give_events(self, session: str, writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(self._host.events(session)) as stream:
            async for payload in stream:
                writer.write(wire.frame(wire.EVENTS, payload))
                async with asyncio.timeout(STALL_S):
                    await writer.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close when what was written is sent, but don't wait long for a client that doesn't read."""
    writer.close()
    try:
        async with asyncio.timeout(HANG_UP_S):
            await writer.wait_closed()
    except OSError:
        pass
    finally:
        writer.transport.abort()
