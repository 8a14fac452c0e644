"""Requests through the real gateway over two engines with prefix caches: the prefix decides, else the load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.orchestrator.local_gateway import LocalGateway, local_gateway, wait_for

from branchline.agents.client import connect
from branchline.engine.config import EngineConfig
from branchline.load.simulated import SimulatedEngine

CONFIG = EngineConfig(pool_tokens=1 << 16, min_step_s=0.001, threads=1)


@pytest.fixture
def gateway() -> Iterator[LocalGateway]:
    with local_gateway(replicas=2, config=CONFIG, make=SimulatedEngine.load) as running:
        wait_for(lambda: httpx.get(f"{running.url}/healthz").json()["replicas"] == 2)
        yield running


def document(i: int) -> str:
    return f"Document {i}. " + f"{i} of many lines, which are all the same. " * 80


def ask(gateway: LocalGateway, system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "simulated", "messages": messages, "max_tokens": 4}
    answer: dict[str, Any] = httpx.post(f"{gateway.base_url}/chat/completions", json=body, timeout=30).json()
    return answer


def cached_share(answer: dict[str, Any]) -> float:
    usage = answer["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_requests_with_the_same_system_prompt_hit_its_cache_and_others_are_spread(gateway: LocalGateway) -> None:
    first = [cached_share(ask(gateway, document(i), "What is it?")) for i in range(6)]
    assert max(first) < 0.1
    used = [engine.stats().prefill_tokens for engine in gateway.engines.values()]
    assert min(used) > 0, "contexts that share nothing go to both"
    again = [cached_share(ask(gateway, document(i), "And why?")) for i in range(6)]
    assert min(again) > 0.9
    tenant = {"x-branchline-tenant": "other"}
    body = {"model": "simulated", "messages": [{"role": "system", "content": document(0)}], "max_tokens": 1}
    other = httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers=tenant).json()
    assert cached_share(other) == 0.0


def test_a_session_is_opened_near_its_content(gateway: LocalGateway) -> None:
    def computed() -> int:
        return sum(engine.stats().prefill_tokens for engine in gateway.engines.values())

    async def run() -> None:
        replicas = {}
        for i in range(4):
            async with connect(gateway.url) as session:
                await session.context(document(i)).ready()
                replicas[i] = session.id.partition(".")[0]
        assert len(set(replicas.values())) == 2
        for i, replica in replicas.items():
            before = computed()
            async with connect(gateway.url, near=document(i) + "More.") as session:
                assert session.id.partition(".")[0] == replica
                await session.context(document(i)).ready()
            assert computed() - before < len(document(i)) / 10

    asyncio.run(run())
