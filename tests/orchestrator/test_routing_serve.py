"""Placement in the real Serve application: two replicas of the simulated engine, each with a prefix cache of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from branchline.agents.client import connect
from branchline.load.simulated import FACTORY
from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig

pytestmark = [
    pytest.mark.serve,
    # Ray's own processes and sockets, closed by its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running() -> Iterator[app.Running]:
    config = ServeConfig.from_dict(
        {
            "port": free_port(),
            "num_replicas": 2,
            "dashboard": False,
            "engine_factory": FACTORY,
            "engine": {"pool_tokens": 1 << 16, "min_step_s": 0.001, "threads": 1},
        }
    )
    started = app.start(config)
    try:
        url = started.base_url.replace("/v1", "/healthz")
        wait_for(lambda: bool(httpx.get(url).json()["replicas"] == 2))
        yield started
    finally:
        app.stop(started)


def document(kind: str, i: int) -> str:
    return f"Document {i} of {kind}. " + f"{i} of many lines, which are all the same. " * 80


def ask(running: app.Running, system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "simulated", "messages": messages, "max_tokens": 4}
    answer: dict[str, Any] = httpx.post(f"{running.base_url}/chat/completions", json=body, timeout=60).json()
    return answer


def cached_share(answer: dict[str, Any]) -> float:
    usage = answer["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_the_second_request_with_a_prefix_hits_it_and_others_are_spread(running: app.Running) -> None:
    assert max(cached_share(ask(running, document("chat", i), "What is it?")) for i in range(6)) < 0.1
    each = httpx.get(f"{running.base_url}/stats?by=replica").json()
    assert min(replica["stats"]["prefill_tokens"] for replica in each) > 0
    assert min(cached_share(ask(running, document("chat", i), "And why?")) for i in range(6)) > 0.9


def test_sessions_through_the_handle_are_opened_near_their_content(running: app.Running) -> None:
    async def run() -> None:
        replicas = {}
        for i in range(4):
            async with connect("serve:branchline") as session:
                await session.context(document("sdk", i)).ready()
                replicas[i] = session.id.partition(".")[0]
        for i, replica in replicas.items():
            for _ in range(2):
                async with connect("serve:branchline", near=document("sdk", i) + "More.") as session:
                    assert session.id.partition(".")[0] == replica
                    before = (await session.stats()).prefill_tokens
                    await session.context(document("sdk", i)).ready()
                    assert (await session.stats()).prefill_tokens - before < len(document("sdk", i)) / 10

    asyncio.run(run())
