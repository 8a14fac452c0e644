"""To a gateway over HTTP: JSON out, Server-Sent Events in. See `orchestrator.protocol` for the routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import httpx
import msgspec

from branchline.agents.errors import ConnectError, ConnectionLostError
from branchline.engine.errors import BranchlineError, SessionNotFoundError
from branchline.engine.types import Command, EngineStats
from branchline.orchestrator.prefix import Prefix
from branchline.orchestrator.protocol import (
    EventBatch,
    OpenSession,
    SessionOpened,
    decode_events_json,
    decode_opened_json,
    encode_json,
    from_openai_error,
)

JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_decode_stats = msgspec.json.Decoder(EngineStats).decode


class HttpTransport:
    """One session of a gateway.

    Args:
        url: where the gateway is, without `/v1`.
        headers: sent with every request, e.g. an authorisation.
        timeout_s: for connecting and for each answer; the event stream waits without bound.
        http: the httpx transport to use instead of the network, e.g. `httpx.ASGITransport(app)`.
    """

    def __init__(
        self,
        url: str,
        *,
        client: str = "",
        tenant: str = "",
        near: Prefix | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._client = client
        self._tenant = tenant
        self._near = near
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, transport=http)
        self._session = ""
        self._closed = False

    async def open(self) -> SessionOpened:
        """Open the session. Raises ConnectError when nothing, or something else, answers at the URL."""
        try:
            answer = await self._request(
                "POST", "/v1/sessions", encode_json(OpenSession(client=self._client, tenant=self._tenant, near=self._near))
            )
            opened = decode_opened_json(answer)
        except ConnectionLostError as err:
            raise ConnectError(f"no gateway answers at {self._url}: {err.message}; is `branchline serve` running?") from err
        except msgspec.MsgspecError as err:
            raise ConnectError(f"what answers at {self._url} isn't a Branchline gateway: {err}") from err
        self._session = opened.session
        return opened

    async def send(self, commands: Sequence[Command]) -> None:
        """Post the commands; returns when the gateway accepted them."""
        await self._request("POST", f"/v1/sessions/{self._session}/commands", encode_json(tuple(commands)))

    async def events(self) -> AsyncIterator[EventBatch]:
        """Read the stream. Raises ConnectionLostError when it breaks."""
        path = f"/v1/sessions/{self._session}/events"
        timeout = httpx.Timeout(self._http.timeout.connect, read=None)
        try:
            async with self._http.stream("GET", path, headers={"Accept": "text/event-stream"}, timeout=timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                    raise _error_of(answer)
                async for message in sse_messages(answer.aiter_bytes()):
                    yield decode_events_json(message)
        except (httpx.HTTPError, httpx.StreamError, msgspec.MsgspecError) as err:
            raise ConnectionLostError(f"the event stream from {self._url} broke: {err!r}") from err

    async def stats(self) -> EngineStats:
        """Counters of the session's replica."""
        return _decode_stats(await self._request("GET", f"/v1/stats?session={self._session}"))

    async def close(self) -> None:
        """Close the session and the connections."""
        if self._closed:
            return
        self._closed = True
        if self._session:
            with contextlib.suppress(ConnectionLostError, SessionNotFoundError):
                await self._request("DELETE", f"/v1/sessions/{self._session}")
        await self._http.aclose()

    async def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            answer = await self._http.request(method, path, content=body, headers=JSON_HEADERS)
        except httpx.HTTPError as err:
            raise ConnectionLostError(
                f"{method} {self._url}{path.replace(self._session, '…') if self._session else path}: {err!r}"
            ) from err
        if answer.is_error:
            raise _error_of(answer)
        return answer.content


async def sse_messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each Server-Sent Event. Splits at LF and CRLF alone: the text in a message may hold Unicode line ends."""
    buffer = bytearray()
    data: list[bytes] = []
    async for chunk in chunks:
        buffer += chunk
        if b"\n" not in chunk:
            continue
        *lines, rest = bytes(buffer).split(b"\n")
        buffer = bytearray(rest)
        for ended_line in lines:
            line = ended_line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _error_of(answer: httpx.Response) -> BranchlineError:
    status, body = answer.status_code, answer.content
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        decoded = None
    if isinstance(decoded, dict) and isinstance(decoded.get("error"), dict):
        err = from_openai_error(decoded)
        with contextlib.suppress(KeyError, ValueError):
            err.retry_after_s = float(answer.headers["retry-after"])
        return err
    text = body[:200].decode(errors="replace")
    return ConnectionLostError(f"HTTP status {status} without an error body that Branchline knows: {text!r}")


def make_transport(
    target: str,
    *,
    client: str,
    tenant: str,
    near: Prefix | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    http: httpx.AsyncBaseTransport | None = None,
) -> HttpTransport:
    """The transport to a URL."""
    return HttpTransport(target, client=client, tenant=tenant, near=near, headers=headers, timeout_s=timeout_s, http=http)
