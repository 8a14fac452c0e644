"""Framing, bounded bodies, request ids, and cleaning up when a client goes away at any point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from branchline.orchestrator.errors import PayloadTooLargeError
from branchline.orchestrator.gateway.asgi import EventStream, RequestIds, read_body, sse, until_disconnect


@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=5))
def test_sse_messages_come_back_out(messages: list[dict[str, str]]) -> None:
    framed = sse(json.dumps(message).encode() for message in messages)
    events = [event for event in framed.decode().split("\n\n") if event]
    assert [json.loads(event.removeprefix("data: ")) for event in events] == messages


def request_of(chunks: list[bytes], headers: dict[str, str] | None = None) -> Request:
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "headers": raw, "path": "/"}, receive)


def test_a_body_is_read_up_to_its_bound() -> None:
    assert asyncio.run(read_body(request_of([b"abc", b"de"]), 5)) == b"abcde"


def test_a_longer_body_is_refused_without_reading_on() -> None:
    with pytest.raises(PayloadTooLargeError):
        asyncio.run(read_body(request_of([b"abc", b"def", b"never read"]), 5))


def test_a_longer_declared_body_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLargeError):
        asyncio.run(read_body(request_of([], {"content-length": "6"}), 5))


def test_work_is_cancelled_when_the_client_goes() -> None:
    async def run() -> tuple[str | None, bool]:
        cancelled = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def work() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return "never"

        return await until_disconnect(receive, work()), cancelled.is_set()

    assert asyncio.run(run()) == (None, True)


def test_work_that_fails_raises() -> None:
    async def run() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def work() -> None:
            raise KeyError("x")

        await until_disconnect(receive, work())

    with pytest.raises(KeyError):
        asyncio.run(run())


@pytest.mark.parametrize("point", ["before the first byte", "while sending", "while waiting", "never"])
def test_a_streams_cleanup_always_runs(point: str) -> None:
    async def run() -> tuple[int, list[str]]:
        cleaned = 0
        sent: list[str] = []
        gone = asyncio.Event()

        async def cleanup() -> None:
            nonlocal cleaned
            cleaned += 1

        async def source() -> AsyncGenerator[bytes, None]:
            for i in range(3):
                yield b"%d" % i
                if point == "while waiting":
                    gone.set()
                    await asyncio.Event().wait()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if point == "before the first byte":
                raise OSError("gone")
            if point == "while sending" and message["type"] == "http.response.body":
                gone.set()
                await asyncio.Event().wait()
            sent.append(message.get("body", b"").decode())

        response = EventStream(source(), cleanup)
        try:
            await asyncio.wait_for(response({"type": "http"}, receive, send), 5)
        except OSError:
            assert point == "before the first byte"
        return cleaned, sent

    cleaned, sent = asyncio.run(run())
    assert cleaned == 1
    expected = {
        "never": ["", "0", "1", "2", ""],
        "while waiting": ["", "0"],
        "while sending": [""],
        "before the first byte": [],
    }
    assert sent == expected[point]


@pytest.mark.parametrize(("given_id", "kept"), [("abc-1:2.3", True), ("bad id\t", False), ("x" * 129, False), (None, False)])
def test_request_ids(given_id: str | None, kept: bool) -> None:
    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> str:
        transport = httpx.ASGITransport(RequestIds(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {} if given_id is None else {"x-request-id": given_id}
            return str((await client.get("/", headers=headers)).headers["x-request-id"])

    answered = asyncio.run(run())
    assert (answered == given_id) is kept
    assert kept or answered.startswith("req_")
