"""Priority, deadlines, tenants and the prefix cache through OpenAI's client, on a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.orchestrator.local_gateway import LocalGateway, local_gateway, wait_for

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.orchestrator.protocol import TENANT_HEADER

PROMPT = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[LocalGateway]:
    settings: dict[str, Any] = {
        "model": str(tiny_model),
        "served_name": "tiny",
        "threads": 1,
        "max_batch": 2,
        "max_step_tokens": 64,
        "scheduling": {"tenants": {"small": {"tokens_per_minute": 60}}},
    }
    with local_gateway(config=EngineConfig.from_dict(settings), make=Engine.load) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: LocalGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="unused", max_retries=0) as made:
        yield made
    wait_for(lambda: gateway.engine.stats().branches == 0)


def ask(client: openai.OpenAI, prompt: str = PROMPT, *, max_tokens: int = 4, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=more)


def test_a_repeated_prompt_counts_as_cached(client: openai.OpenAI) -> None:
    first = ask(client, "cached " + PROMPT)
    again = ask(client, "cached " + PROMPT)
    assert first.choices[0].text == again.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 48


def test_priority_class_and_deadline_are_taken(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].text
    assert ask(client, priority=7, qos="interactive", deadline_ms=60_000).choices[0].text == plain


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"priority": 101}, "priority"),
        ({"qos": "now"}, "qos"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"priority": "x"}, "priority"),
    ],
)
def test_bad_service_is_a_400_that_names_it(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.param == param


def test_a_missed_deadline_is_a_504(gateway: LocalGateway, client: openai.OpenAI) -> None:
    ask(client)  # the engine has learnt how long a step takes
    stop = threading.Event()

    def crowd() -> None:
        with client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, n=4, stream=True, extra_body={"ignore_eos": True, "priority": 9}
        ) as stream:
            for _ in stream:
                if stop.is_set():
                    return

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        wait_for(lambda: gateway.engine.stats().running == 2)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, "late", deadline_ms=1.0)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    finally:
        stop.set()
        thread.join(20)


def test_a_tenant_past_its_rate_is_a_429_that_says_when(gateway: LocalGateway) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    headers = {TENANT_HEADER: "small"}
    assert httpx.post(f"{gateway.base_url}/completions", json=body, headers=headers).status_code == 200
    refused = httpx.post(f"{gateway.base_url}/completions", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
    assert 10 < int(refused.headers["retry-after"]) < 60
    assert httpx.post(f"{gateway.base_url}/completions", json=body).status_code == 200
    # The same tenant through the branch API.
    opened = httpx.post(f"{gateway.base_url}/sessions", json={"tenant": "small"}).json()
    path = f"{gateway.base_url}/sessions/{opened['session']}"
    context = {"op": "context", "branch": 0, "content": {"type": "text", "text": "a"}}
    commands = [context, {"op": "generate", "branch": 0, "request": 0}]
    with httpx.stream("GET", f"{path}/events") as stream:
        assert httpx.post(f"{path}/commands", json=commands).status_code == 202
        assert any('"code":"tenant_limit"' in line for line in stream.iter_lines() if _ends(line))


def _ends(line: str) -> bool:
    return '"failed"' in line or '"finished"' in line
