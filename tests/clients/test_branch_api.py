"""The branch API as plain HTTP: fork, generate, read one stream."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from tests.orchestrator.local_gateway import LocalGateway, local_gateway, wait_for

from branchline.engine.config import EngineConfig
from branchline.engine.types import Context, Text
from branchline.orchestrator import protocol


@contextlib.contextmanager
def streaming(gateway: LocalGateway, session: str) -> Iterator[Iterator[Any]]:
    with httpx.stream("GET", f"{gateway.base_url}/sessions/{session}/events", timeout=10) as answer:
        assert answer.status_code == 200
        yield (event for line in answer.iter_lines() if line for event in json.loads(line.removeprefix("data: "))["events"])


def opened(gateway: LocalGateway) -> str:
    answer = httpx.post(f"{gateway.base_url}/sessions", json={"client": "test"})
    assert answer.status_code == 200
    return str(answer.json()["session"])


def send(gateway: LocalGateway, session: str, *commands: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{gateway.base_url}/sessions/{session}/commands", json=list(commands))


def test_eight_forks_generate_over_one_stream(gateway: LocalGateway) -> None:
    session = opened(gateway)
    with streaming(gateway, session) as events:
        commands: list[dict[str, Any]] = [
            {"op": "context", "branch": 0, "content": {"type": "text", "text": "one context, many branches"}},
            {"op": "fork", "parent": 0, "first": 1, "count": 8},
        ]
        commands += [{"op": "generate", "branch": i, "request": i, "params": {"max_tokens": 5}} for i in range(1, 9)]
        assert send(gateway, session, *commands).status_code == 202
        texts: dict[int, str] = {}
        finished = 0
        while finished < 8:
            event = next(events)
            if event["ev"] == "delta":
                texts[event["branch"]] = texts.get(event["branch"], "") + event["text"]
            finished += event["ev"] == "finished"
        assert sorted(texts) == list(range(1, 9))
        assert len(set(texts.values())) == 8
        assert send(gateway, session, {"op": "release", "branches": list(range(9))}).status_code == 202
        wait_for(lambda: gateway.engine.stats().branches == 0)
    wait_for(lambda: gateway.engine.stats().sessions == 1)  # the gateway's own


def test_errors_of_one_branch_are_events(gateway: LocalGateway) -> None:
    session = opened(gateway)
    with streaming(gateway, session) as events:
        send(gateway, session, {"op": "release", "branches": [5]}, {"op": "generate", "branch": 6, "request": 1})
        first, second = next(events), next(events)
        assert (first["ev"], first["branch"], first["error"]["code"]) == ("failed", 5, "unknown_branch")
        assert (second["branch"], second["request"]) == (6, 1)


def test_msgpack_both_ways(gateway: LocalGateway) -> None:
    headers = {"content-type": protocol.MSGPACK, "accept": protocol.MSGPACK}
    answer = httpx.post(f"{gateway.base_url}/sessions", content=protocol.encode(protocol.OpenSession()), headers=headers)
    session = protocol.decode_reply(answer.content)
    assert isinstance(session, protocol.SessionOpened)
    commands = msgspec.msgpack.encode([Context(0, Text("hi"))])
    path = f"{gateway.base_url}/sessions/{session.session}"
    answer = httpx.post(f"{path}/commands", content=commands, headers=headers)
    assert (answer.status_code, protocol.decode_reply(answer.content)) == (202, protocol.Ack())
    assert httpx.delete(path).status_code == 204
    assert httpx.delete(path).status_code == 204


@pytest.mark.parametrize("session", ["nonsense", "replica0.unknown", "gone.unknown", ".x"])
def test_unknown_sessions_are_404(gateway: LocalGateway, session: str) -> None:
    for answer in (send(gateway, session), httpx.get(f"{gateway.base_url}/sessions/{session}/events")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize("body", [b"", b"{}", b"[5]", b'[{"op": "explode"}]', b'[{"op": "fork", "parent": 0}]', b"\xff"])
def test_commands_that_cant_be_read_are_400(gateway: LocalGateway, body: bytes) -> None:
    session = opened(gateway)
    answer = httpx.post(f"{gateway.base_url}/sessions/{session}/commands", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    httpx.delete(f"{gateway.base_url}/sessions/{session}")


def test_a_session_has_one_stream(gateway: LocalGateway) -> None:
    session = opened(gateway)
    with streaming(gateway, session):
        assert httpx.get(f"{gateway.base_url}/sessions/{session}/events").status_code == 404
        assert send(gateway, session).status_code == 202


def test_stats_of_a_sessions_replica() -> None:
    with local_gateway(replicas=2) as two:
        session = opened(two)
        assert httpx.get(f"{two.base_url}/stats").json()["pages_total"] == 1024
        assert httpx.get(f"{two.base_url}/stats", params={"session": session}).json()["pages_total"] == 512


def test_sessions_go_to_the_quietest_replica_and_stay_there() -> None:
    with local_gateway(replicas=3) as three:
        sessions = [opened(three) for _ in range(6)]
        replicas = [session.rpartition(".")[0] for session in sessions]
        assert sorted(replicas) == sorted([*three.engines] * 2)
        for session, replica in zip(sessions, replicas, strict=True):
            send(three, session, {"op": "context", "branch": 0, "content": {"type": "text", "text": replica}})
        for engine in three.engines.values():
            wait_for(lambda engine=engine: engine.stats().branches == 2)  # type: ignore[misc]


def test_the_gateway_keeps_a_session_alive_while_its_stream_is_read() -> None:
    with local_gateway(config=EngineConfig(session_timeout_s=2.0), heartbeat_s=0.2) as quick:
        session = opened(quick)
        with streaming(quick, session) as events:
            send(quick, session, {"op": "context", "branch": 0, "content": {"type": "text", "text": "x"}})
            assert next(events)["ev"] == "ready"
            time.sleep(4.5)
            assert quick.engine.stats().branches == 1
        unread = opened(quick)
        wait_for(lambda: quick.engine.stats().sessions == 1)
        assert send(quick, unread).status_code == 404
