"""OpenAI's own client against the gateway: what it asks for is what it gets, and errors arrive as its own classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tests.orchestrator.fake_engine import ALPHABET, FAIL
from tests.orchestrator.local_gateway import LocalGateway, local_gateway, wait_for

from branchline.engine.config import EngineConfig

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(gateway: LocalGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(gateway: LocalGateway) -> Iterator[None]:
    yield
    wait_for(lambda: gateway.engine.stats().branches == 0)
    assert (stats := gateway.engine.stats()).pages_free + stats.pages_cached == stats.pages_total


def streamed(client: openai.OpenAI, **options: Any) -> tuple[dict[int, str], dict[int, str]]:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in client.chat.completions.create(model="fake", messages=HELLO, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert len(choice.message.content or "") == 20
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 20, 31)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("n", [1, 4])
def test_streamed_text_is_the_text_that_isnt_streamed(client: openai.OpenAI, n: int) -> None:
    whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=300, n=n, seed=5)
    texts, reasons = streamed(client, max_tokens=300, n=n, seed=5)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == dict.fromkeys(range(n), "length")
    assert len(set(texts.values())) == n
    assert all(character in "".join(texts.values()) for character in "日😀é"), "the fake engine's text was to be multilingual"


def test_choices_share_their_prompt(client: openai.OpenAI, gateway: LocalGateway) -> None:
    forks = gateway.engine.stats().forks
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3, n=8)
    assert gateway.engine.stats().forks == forks + 8
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 24)


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 21
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_raw_stream_is_framed_and_done(gateway: LocalGateway) -> None:
    body = {"model": "fake", "messages": HELLO, "max_tokens": 2, "stream": True}
    with httpx.stream("POST", f"{gateway.base_url}/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"].startswith("req_")
        lines = list(answer.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line == "" or line.startswith("data: ") for line in lines)


def test_stop_strings(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=50).choices[0].message.content or ""
    stop = text[10]
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=50, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(position.token for position in logprobs.content) == answer.choices[0].message.content
    for position in logprobs.content:
        assert bytes(position.bytes or []).decode() == position.token
        assert [token.token for token in position.top_logprobs] == list(ALPHABET[:3])
    chunks = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert [position for part in parts for position in part.content or ()] == logprobs.content


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["one", "two"], n=2, max_tokens=6, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"
    alone = [client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=6).choices for prompt in ("one", "two")]
    assert [choice.text for choice in answer.choices] == [choice.text for choices in alone for choice in choices]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert choice.logprobs.text_offset == list(range(6))
        assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2] * 6
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 24)


def test_a_prompt_of_token_ids_is_the_same_as_its_text(client: openai.OpenAI) -> None:
    by_ids = client.completions.create(model="fake", prompt=[0, 1, 2])
    by_text = client.completions.create(model="fake", prompt="abc")
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage == by_text.usage


def test_streamed_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="one", max_tokens=40, logprobs=1)
    chunks = list(client.completions.create(model="fake", prompt="one", max_tokens=40, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    offsets = [
        offset for chunk in chunks if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset or ()
    ]
    assert offsets == list(range(40))


def test_the_async_client_and_many_at_once(gateway: LocalGateway) -> None:
    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="unused", max_retries=0) as client:

            async def one(i: int) -> str | None:
                answer = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": f"number {i}"}], max_tokens=10
                )
                return answer.choices[0].message.content

            together = await asyncio.gather(*(one(i) for i in range(32)))
            assert together == [await one(i) for i in range(32)]
            return together

    assert len(set(asyncio.run(run()))) == 32


@pytest.mark.parametrize(
    ("changes", "error", "param", "code"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", "invalid_parameter"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "invalid_parameter"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_parameter"),
        ({"extra_body": {"tempo": 1}}, openai.BadRequestError, "tempo", "invalid_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, openai.BadRequestError, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format", "unsupported_parameter"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, openai.BadRequestError, None, "context_length_exceeded"),
        ({"extra_body": {"messages": [{"role": "assistant", "tool_calls": [{"n": 2**70}]}]}}, openai.BadRequestError, None,
         "invalid_request"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(
    client: openai.OpenAI,
    changes: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str | None,
    code: str,
    stream: bool,
) -> None:
    options: dict[str, Any] = {"model": "fake", "messages": HELLO, "stream": stream} | changes
    with pytest.raises(error) as caught:
        client.chat.completions.create(**options)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id is not None


def test_a_failure_of_the_engine_is_a_500_or_the_streams_last_event(client: openai.OpenAI) -> None:
    failing: list[ChatCompletionMessageParam] = [{"role": "user", "content": FAIL}]
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="fake", messages=failing, max_tokens=10)
    assert caught.value.code == "engine_step_failed"
    stream = client.chat.completions.create(model="fake", messages=failing, max_tokens=10, stream=True)
    with pytest.raises(openai.APIError, match="told to fail"):
        list(stream)


def test_an_overloaded_engine_is_a_429_with_retry_after() -> None:
    with local_gateway(config=EngineConfig(max_waiting=2)) as small:
        body = {"model": "fake", "messages": HELLO, "n": 3}
        answer = httpx.post(f"{small.base_url}/chat/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        with openai.OpenAI(base_url=small.base_url, api_key="unused", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="fake", messages=HELLO, n=3)
            assert client.chat.completions.create(model="fake", messages=HELLO, n=2, max_tokens=2).choices
        assert small.engine.stats().branches == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "path_not_found"),
        ("POST", "/v1/embeddings", 404, "path_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_other_paths_and_methods(gateway: LocalGateway, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, gateway.url + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_body_beyond_the_bound_is_a_413(gateway: LocalGateway) -> None:
    answer = httpx.post(f"{gateway.base_url}/chat/completions", content=b"x" * ((1 << 20) + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_health_and_stats(gateway: LocalGateway) -> None:
    assert httpx.get(f"{gateway.url}/healthz").json() == {"status": "ok", "replicas": 1}
    assert httpx.get(f"{gateway.base_url}/stats").json()["pages_total"] == 512
