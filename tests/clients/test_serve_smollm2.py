"""The whole product: SmolLM2 in a real Serve application, driven by OpenAI's client, plain HTTP and agents in Ray actors."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from branchline.agents import Message, connect
from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.protocol import BranchHandle

pytestmark = [
    pytest.mark.serve,
    # Ray's own processes and sockets, closed by its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# Forks are compared with separate prompts, token for token.
EXACT = {"activations": "float32", "kv_dtype": "float32"}
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
MULTILINGUAL = "Repeat exactly, twice: naïve café 日本語 👩‍🚀😀 é"


@pytest.fixture(scope="module")
def running(smollm2: str) -> Iterator[app.Running]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = app.start(ServeConfig.from_dict({"port": port, "dashboard": False, "engine": EXACT | {"model": smollm2}}))
    yield started
    app.stop(started)


@pytest.fixture
def client(running: app.Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.base_url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(running: app.Running) -> Iterator[None]:
    yield
    wait_for(lambda: stats(running)["branches"] == 0)
    after = stats(running)
    assert after["pages_free"] + after["pages_cached"] == after["pages_total"]


def stats(running: app.Running) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{running.base_url}/stats").json()
    return answer


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


def test_a_question_is_answered(client: openai.OpenAI, smollm2: str) -> None:
    answer = client.chat.completions.create(model=smollm2, messages=FRANCE, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_text_is_the_text_that_isnt_streamed(client: openai.OpenAI, smollm2: str) -> None:
    options: dict[str, Any] = {
        "model": smollm2,
        "messages": [{"role": "user", "content": MULTILINGUAL}],
        "max_tokens": 24,
        "seed": 1,
        "n": 2,
    }
    whole = client.chat.completions.create(**options)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert not "".join(texts.values()).isascii()


def test_greedy_choices_are_equal_and_logprobs_fit(client: openai.OpenAI, smollm2: str) -> None:
    answer = client.chat.completions.create(
        model=smollm2, messages=FRANCE, temperature=0, max_tokens=7, n=4, logprobs=True, top_logprobs=3
    )
    assert len({choice.message.content for choice in answer.choices}) == 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        for position in choice.logprobs.content or ():
            assert position.logprob <= 0
            assert position.top_logprobs[0].token == position.token, "greedy takes the likeliest"
            assert position.logprob == pytest.approx(position.top_logprobs[0].logprob, abs=1e-5)


def test_completions_and_stop(client: openai.OpenAI, smollm2: str) -> None:
    prompt = "One, two, three, four,"
    answer = client.completions.create(model=smollm2, prompt=[prompt, prompt], temperature=0, max_tokens=12, stop=[" seven"])
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert [choice.text for choice in answer.choices] == [" five, six,", " five, six,"]


def test_a_prompt_beyond_the_context_is_a_400(client: openai.OpenAI, smollm2: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=smollm2, prompt="word " * 10_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_frees_its_pages(running: app.Running, smollm2: str) -> None:
    body = {"model": smollm2, "messages": FRANCE, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.base_url}/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
        assert stats(running)["running"] == 1
    wait_for(lambda: stats(running)["branches"] == 0, 3)


def test_eight_forks_over_plain_http_equal_eight_separate_prompts(
    running: app.Running, client: openai.OpenAI, smollm2: str
) -> None:
    session = httpx.post(f"{running.base_url}/sessions").json()["session"]
    path = f"{running.base_url}/sessions/{session}"
    text = "The days of the week are Monday,"
    tails = [" Tuesday", " Wednesday", " and", " Sunday", " Friday", " the", " or", " Monday"]
    greedy = {"temperature": 0.0, "max_tokens": 6}
    commands: list[dict[str, Any]] = [
        {"op": "context", "branch": 0, "content": {"type": "text", "text": text}},
        {"op": "fork", "parent": 0, "first": 1, "count": 8},
    ]
    for i, tail in enumerate(tails, 1):
        commands.append({"op": "append", "branch": i, "content": {"type": "text", "text": tail}})
        commands.append({"op": "generate", "branch": i, "request": i, "params": greedy})
    texts = dict.fromkeys(range(1, 9), "")
    with httpx.stream("GET", f"{path}/events", timeout=60) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line)
        next(lines)
        assert httpx.post(f"{path}/commands", json=commands).status_code == 202
        finished = 0
        while finished < 8:
            for event in next(lines)["events"]:
                assert event["ev"] != "failed", event
                if event["ev"] == "delta":
                    texts[event["branch"]] += event["text"]
                finished += event["ev"] == "finished"
    apart = client.completions.create(model=smollm2, prompt=[text + tail for tail in tails], **greedy)  # type: ignore[call-overload]
    assert [texts[i] for i in range(1, 9)] == [choice.text for choice in apart.choices]


def test_an_agent_actor_gets_a_branch_from_another(running: app.Running) -> None:
    import ray

    class Owner:
        async def share(self) -> BranchHandle:
            self.session = await connect("serve:branchline", client="owner")
            self.root = self.session.context([Message(role="system", content="You are terse.")], add_generation_prompt=False)
            return await self.root.share()

        async def close(self) -> None:
            await self.session.aclose()

    class Guest:
        async def ask(self, handle: BranchHandle, question: str) -> tuple[str, int]:
            async with connect(handle, client="guest") as session:
                branch = session.attach(handle).append(Message(role="user", content=question))
                result = await branch.generate(temperature=0, max_tokens=20)
                return result.text, result.usage.shared_tokens

    owner_class: Any = ray.remote(num_cpus=0)(Owner)
    guest_class: Any = ray.remote(num_cpus=0)(Guest)
    owner = owner_class.remote()
    handle = ray.get(owner.share.remote())
    assert len(pickle.dumps(handle)) < 200
    guests = [guest_class.remote() for _ in range(2)]
    answers = ray.get([guest.ask.remote(handle, "What is the capital of France?") for guest in guests])
    assert answers[0] == answers[1]
    text, shared = answers[0]
    assert "Paris" in text
    assert shared > 0
    ray.get(owner.close.remote())


def test_the_sdk_over_http_gives_the_same(running: app.Running) -> None:
    async def run() -> list[str]:
        async with connect(running.base_url.removesuffix("/v1"), client="http") as session:
            root = await session.context([Message(role="user", content="What is the capital of France?")]).ready()
            results = await asyncio.gather(*(fork.generate(temperature=0, max_tokens=20) for fork in root.fork(4)))
            return [result.text for result in results]

    assert asyncio.run(run()) == ["The capital of France is Paris."] * 4
