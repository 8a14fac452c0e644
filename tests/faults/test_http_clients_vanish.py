"""What becomes of the engine's work when HTTP clients go away or one request fails. No Ray; `test_serve` repeats it with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.orchestrator.fake_engine import FAIL
from tests.orchestrator.local_gateway import LocalGateway, local_gateway, wait_for

ENDLESS = 10**6


@pytest.fixture(scope="module")
def gateway() -> Iterator[LocalGateway]:
    with local_gateway() as running:
        yield running


def chat(content: str = "hello", **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": ENDLESS} | options


def freed_within(gateway: LocalGateway, steps_before: int, max_steps: int) -> None:
    wait_for(lambda: gateway.engine.stats().branches == 0)
    stats = gateway.engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.steps <= steps_before + max_steps


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_in_mid_stream_frees_its_pages(gateway: LocalGateway, n: int) -> None:
    with httpx.stream("POST", f"{gateway.base_url}/chat/completions", json=chat(stream=True, n=n)) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        assert gateway.engine.stats().branches == (1 if n == 1 else n + 1)
    # A step of the fake engine takes 2 ms: the rest is the closing of the connection.
    freed_within(gateway, gateway.engine.stats().steps, 25)


def test_a_client_that_gives_up_waiting_frees_its_pages(gateway: LocalGateway) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.base_url}/chat/completions", json=chat(), timeout=0.3)
    freed_within(gateway, gateway.engine.stats().steps, 25)


def test_many_clients_that_leave_at_once(gateway: LocalGateway) -> None:
    def leave() -> None:
        with httpx.stream("POST", f"{gateway.base_url}/chat/completions", json=chat(stream=True)) as answer:
            next(answer.iter_lines())

    threads = [threading.Thread(target=leave) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: gateway.engine.stats().branches == 0)
    assert gateway.engine.stats().sessions == 1


def test_a_failing_request_touches_no_other(gateway: LocalGateway) -> None:
    alone = httpx.post(f"{gateway.base_url}/chat/completions", json=chat(max_tokens=60)).json()["choices"][0]["message"]
    outcomes: dict[str, httpx.Response] = {}

    def ask(name: str, body: dict[str, Any]) -> None:
        outcomes[name] = httpx.post(f"{gateway.base_url}/chat/completions", json=body)

    threads = [threading.Thread(target=ask, args=("good", chat(max_tokens=60)))]
    threads += [threading.Thread(target=ask, args=(f"bad{i}", chat(FAIL, n=3))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes["good"].json()["choices"][0]["message"] == alone
    for i in range(3):
        assert outcomes[f"bad{i}"].status_code == 500
    wait_for(lambda: gateway.engine.stats().branches == 0)


def test_a_branch_api_client_that_leaves_closes_its_session(gateway: LocalGateway) -> None:
    session = httpx.post(f"{gateway.base_url}/sessions").json()["session"]
    path = f"{gateway.base_url}/sessions/{session}"
    with httpx.stream("GET", f"{path}/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        commands = [
            {"op": "context", "branch": 0, "content": {"type": "text", "text": "x"}},
            {"op": "generate", "branch": 0, "request": 0, "params": {"max_tokens": ENDLESS}},
        ]
        httpx.post(f"{path}/commands", json=commands)
        for _ in range(20):
            next(lines)
        assert gateway.engine.stats().sessions == 2
    freed_within(gateway, gateway.engine.stats().steps, 25)
    assert httpx.post(f"{path}/commands", json=[]).status_code == 404


def test_requests_go_on_after_a_lost_session_of_the_gateway(gateway: LocalGateway) -> None:
    """The engine closes the gateway's own session: those under way get a 503, the next request works."""
    outcome: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: outcome.append(httpx.post(f"{gateway.base_url}/chat/completions", json=chat(), timeout=20))
    )
    thread.start()
    wait_for(lambda: gateway.engine.stats().running == 1)
    host = gateway.hosts["replica0"]
    mailbox = host._mailbox  # the one way into the gateway's loop
    outbox = next(iter(host._outboxes.values()))
    mailbox._loop.call_soon_threadsafe(outbox.close)
    thread.join()
    assert (outcome[0].status_code, outcome[0].headers["retry-after"]) == (503, "1")
    assert outcome[0].json()["error"]["code"] == "replica_unavailable"
    assert httpx.post(f"{gateway.base_url}/chat/completions", json=chat(max_tokens=2)).status_code == 200
    wait_for(lambda: gateway.engine.stats().branches == 0)
