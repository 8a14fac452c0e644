"""The direct channel, as its client sees it: a TCP connection to the replica that holds the session, beside Ray.

A frame is a length (4 bytes, big-endian, of what follows), a kind (1 byte), and msgpack. The client sends one HELLO, then a
BATCH (a CommandBatch) whenever the last one was answered; the replica answers each by a REPLY, in order, and sends EVENTS (an
EventBatch) as they come. Closing the connection closes the session. No Ray here: the SDK and the gateway both use this.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from branchline.engine.errors import BranchlineError, InvalidRequestError
from branchline.orchestrator import protocol
from branchline.orchestrator.protocol import DirectAddress, ErrorReply

HELLO: Final = 1
BATCH: Final = 2
REPLY: Final = 3
EVENTS: Final = 4
MAX_FRAME_BYTES: Final = 64 << 20
MAX_HELLO_BYTES: Final = 4096
CONNECT_TIMEOUT_S: Final = 2.0
SOCKET_BUFFER_BYTES: Final = 128 << 10
_LENGTH_BYTES: Final = 4


class FrameError(InvalidRequestError):
    """What came over a direct channel isn't a frame: too long, empty, or of a kind that has no place there."""

    code = "bad_frame"


class Hello(msgspec.Struct, frozen=True):
    """The first frame: the session to use, and the token that opens it, once."""

    session: str
    token: str


_decode_hello = msgspec.msgpack.Decoder(Hello).decode


def frame(kind: int, payload: bytes) -> bytes:
    """A frame's bytes. Raises FrameError for a payload that is too long."""
    size = len(payload) + 1
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {size} bytes: at most {MAX_FRAME_BYTES} are sent; split the batch")
    return size.to_bytes(_LENGTH_BYTES, "big") + bytes((kind,)) + payload


async def read_frame(reader: asyncio.StreamReader, most: int = MAX_FRAME_BYTES) -> tuple[int, bytes]:
    """(kind, payload) of the next frame. Raises FrameError; EOFError or ConnectionError when the other side is gone."""
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if not 1 <= size <= most:
        raise FrameError(f"a frame of {size} bytes: expected 1 to {most}")
    body = await reader.readexactly(size)
    return body[0], body[1:]


def read_hello(kind: int, payload: bytes) -> Hello:
    """Raises FrameError."""
    if kind != HELLO:
        raise FrameError(f"the first frame is of kind {kind}: expected a hello, {HELLO}")
    try:
        return _decode_hello(payload)
    except msgspec.DecodeError as err:
        raise FrameError(f"the hello can't be read: {err}") from err


def tune(writer: asyncio.StreamWriter) -> None:
    """A step's frame leaves at once, also while an earlier one is not acknowledged; and what a slow reader is behind by waits
    in the replica, where it is joined, and not in the system's buffers."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)


def _read_welcome(kind: int, payload: bytes) -> None:
    """Raises FrameError, and the error with which the replica refused."""
    if kind != REPLY:
        raise FrameError(f"the hello was answered by a frame of kind {kind}: expected a reply, {REPLY}")
    try:
        reply = protocol.decode_reply(payload)
    except msgspec.DecodeError as err:
        raise FrameError(f"the answer to the hello can't be read: {err}") from err
    if isinstance(reply, ErrorReply):
        raise reply.exception()


class DirectConnection:
    """An open direct channel of one session. Used from one loop, by one sender and one reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `open`."""
        self._reader = reader
        self._writer = writer
        self._reply: asyncio.Future[bytes] | None = None
        self._closed = False

    @classmethod
    async def open(cls, session: str, address: DirectAddress, timeout_s: float = CONNECT_TIMEOUT_S) -> DirectConnection:
        """Connect and say hello. Raises OSError (also when it takes too long) or EOFError when nobody answers as a replica
        does, and the error with which the replica refused."""
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                tune(writer)
                writer.write(frame(HELLO, protocol.encode(Hello(session, address.token))))
                _read_welcome(*await read_frame(reader, MAX_HELLO_BYTES))
            except BaseException:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                raise
        return cls(reader, writer)

    async def submit(self, payload: bytes) -> bytes:
        """Send an encoded CommandBatch; returns the encoded Reply. `events` must be read meanwhile, for that reads both.
        Raises ConnectionError when the connection is gone, FrameError."""
        if self._closed:
            raise ConnectionResetError("the direct channel is closed")
        assert self._reply is None, "two batches at a time"
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._reply = reply
        try:
            self._writer.write(frame(BATCH, payload))
            await self._writer.drain()
            return await reply
        finally:
            self._reply = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded EventBatches. Ends when the replica closed the session. Raises ConnectionError, FrameError."""
        try:
            while True:
                try:
                    kind, payload = await read_frame(self._reader)
                except asyncio.IncompleteReadError as err:
                    if err.partial:
                        raise ConnectionResetError("the direct channel was cut within a frame") from err
                    return
                if kind == EVENTS:
                    yield payload
                elif kind == REPLY:
                    if self._reply is not None and not self._reply.done():
                        self._reply.set_result(payload)
                else:
                    raise FrameError(f"a frame of kind {kind} from a replica")
        except BranchlineError:
            raise
        except OSError as err:
            raise ConnectionResetError(f"the direct channel broke: {err}") from err
        finally:
            self._end()

    async def close(self) -> None:
        """Close the connection, and by that the session. Idempotent."""
        self._end()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._writer.wait_closed()

    def _end(self) -> None:
        self._closed = True
        self._writer.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionResetError("the direct channel was closed before the batch was answered"))
