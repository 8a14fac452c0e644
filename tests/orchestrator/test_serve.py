"""The real Serve application: two replicas of a fake engine behind the real router, gateway and proxy."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from branchline.engine.errors import ModelNotFoundError
from branchline.engine.types import Context, Delta, Finished, Generate, Inspect, SamplingParams, Text
from branchline.orchestrator import app, protocol
from branchline.orchestrator.channel import Channel, Listener, read_reply
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.link import ServeLink
from branchline.orchestrator.protocol import Ack, CommandBatch, OpenSession, SessionOpened, StatsReply

pytestmark = [
    pytest.mark.serve,
    # Ray's own processes and sockets, closed by its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FAKE = "tests.orchestrator.fake_engine:FakeEngine"
ENDLESS = 10**6


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def settings(**changes: Any) -> ServeConfig:
    return ServeConfig.from_dict(
        {"port": free_port(), "num_replicas": 2, "dashboard": False, "metrics_period_s": 0.2, "engine_factory": FAKE} | changes
    )


@pytest.fixture(scope="module")
def running() -> Iterator[app.Running]:
    started = app.start(settings())
    yield started
    app.stop(started)


@pytest.fixture
def client(running: app.Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.base_url, api_key="unused", max_retries=0) as made:
        yield made


def link() -> ServeLink:
    from ray import serve

    return ServeLink(serve.get_deployment_handle(protocol.ENGINE_DEPLOYMENT, protocol.APP_NAME))


def stats(running: app.Running) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{running.base_url}/stats").json()
    return answer


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


def idle(running: app.Running) -> bool:
    now = stats(running)
    return bool(now["branches"] == 0 and now["pages_free"] + now["pages_cached"] == now["pages_total"])


def chat(**options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": ENDLESS} | options


def test_both_replicas_serve_and_streamed_is_not_streamed(running: app.Running, client: openai.OpenAI) -> None:
    wait_for(lambda: httpx.get(running.base_url.replace("/v1", "/healthz")).json()["replicas"] == 2)
    whole = client.chat.completions.create(**chat(max_tokens=200, n=4))
    texts = dict.fromkeys(range(4), "")
    for chunk in client.chat.completions.create(**chat(max_tokens=200, n=4, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert "😀" in "".join(texts.values())
    wait_for(lambda: idle(running))


def test_errors_pass_through_the_proxy(running: app.Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**chat(max_tokens=-1))
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**chat(model="other"))
    missing = httpx.get(f"{running.base_url}/nothing/here")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "path_not_found")
    assert httpx.get(f"{running.base_url}/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(running: app.Running, stream: bool) -> None:
    if stream:
        with httpx.stream("POST", f"{running.base_url}/chat/completions", json=chat(stream=True, n=2)) as answer:
            lines = answer.iter_lines()
            for _ in range(10):
                next(lines)
            assert stats(running)["running"] == 2
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.base_url}/chat/completions", json=chat(), timeout=0.5)
    wait_for(lambda: idle(running), 2)


def test_sessions_are_pinned_under_concurrency(running: app.Running) -> None:
    async def run() -> None:
        to = link()
        payload = protocol.encode(OpenSession())
        described = [read_reply(answer, SessionOpened) for answer in await to.call_all("describe")]
        assert len({opened.replica for opened in described}) == 2
        opened = [
            read_reply(await to.call("open_session", payload, replica=described[i % 2].replica), SessionOpened)
            for i in range(8)
        ]
        assert [session.replica for session in opened] == [described[i % 2].replica for i in range(8)]

        async def touch(session: SessionOpened) -> None:
            batch = protocol.encode(CommandBatch(session.session, ()))
            assert read_reply(await to.call("submit", batch, replica=session.replica), Ack) == Ack()

        # A session exists on its own replica only: every acknowledgement says that the call reached the right one.
        await asyncio.gather(*(touch(session) for session in opened for _ in range(25)))
        answers = [read_reply(await to.call("stats", replica=session.replica), StatsReply) for session in opened]
        assert [answer.replica for answer in answers] == [session.replica for session in opened]
        for session in opened:
            read_reply(await to.call("close_session", session.session, replica=session.replica), Ack)

    asyncio.run(run())


def test_sessions_without_a_wish_are_spread(running: app.Running) -> None:
    async def run() -> Counter[str]:
        to = link()
        channels = [await Channel.open(to) for _ in range(8)]
        used = Counter(channel.replica for channel in channels)
        await asyncio.gather(*(channel.close() for channel in channels))
        return used

    used = asyncio.run(run())
    assert len(used) == 2


def test_an_unknown_replica_fails_fast_and_typed(running: app.Running) -> None:
    began = time.monotonic()
    answer = httpx.post(f"{running.base_url}/sessions/gone0000.abc/commands", json=[])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert time.monotonic() - began < 4


def test_one_channel_carries_many_branches(running: app.Running) -> None:
    async def read(listener: Listener) -> str:
        text = ""
        while True:
            for event in await listener.next():
                text += event.text if isinstance(event, Delta) else ""
                if isinstance(event, Finished):
                    return text

    async def run() -> list[str]:
        channel = await Channel.open(link())
        listeners = []
        for i in range(32):
            listener = channel.listen(1)
            branch = listener.branches.start
            generate = Generate(branch, channel.mint_request(), SamplingParams(max_tokens=20))
            channel.send(listener, [Context(branch, Text(f"prompt {i}")), generate, Inspect(branch, channel.mint_request())])
            listeners.append(listener)
        texts = await asyncio.gather(*map(read, listeners))
        await channel.close()
        return list(texts)

    texts = asyncio.run(run())
    assert [len(text) for text in texts] == [20] * 32
    wait_for(lambda: idle(running))


def test_an_agent_that_is_killed_loses_its_session(running: app.Running) -> None:
    import ray

    class Agent:
        async def work(self) -> str:
            self.channel = await Channel.open(link(), client="agent")
            listener = self.channel.listen(1)
            branch = listener.branches.start
            generate = Generate(branch, self.channel.mint_request(), SamplingParams(max_tokens=ENDLESS))
            self.channel.send(listener, [Context(branch, Text("x")), generate])
            await listener.next()
            return self.channel.replica

    remote: Any = ray.remote(num_cpus=0)(Agent)
    agent = remote.remote()
    ray.get(agent.work.remote())
    assert stats(running)["running"] == 1
    ray.kill(agent)
    # By the end of its stream, long before its lease of 60 s.
    wait_for(lambda: idle(running), 10)


def test_metrics_reach_rays_endpoint(running: app.Running, client: openai.OpenAI) -> None:
    import ray

    client.chat.completions.create(**chat(max_tokens=30))
    node = ray.nodes()[0]  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = ("ray_branchline_tokens_total", "ray_branchline_pages", "ray_branchline_engine_seconds_total")
    found = ""

    def exported() -> bool:
        nonlocal found
        found = httpx.get(url).text
        return all(name in found for name in wanted)

    wait_for(exported, 30)
    lines = [line for line in found.splitlines() if line.startswith("ray_branchline_pages{") and 'state="free"' in line]
    assert all('application="branchline"' in line and 'deployment="Engine"' in line for line in lines)
    assert any(line.rstrip().endswith(" 512.0") for line in lines)


def test_a_replica_that_dies_is_replaced_and_requests_go_on(running: app.Running, client: openai.OpenAI) -> None:
    """Last in this file: it costs a replica."""
    import ray

    victim = next(name for name in _replica_actors() if "#Engine#" in name)
    outcome: list[Any] = []

    def ask() -> None:
        outcome.append(httpx.post(f"{running.base_url}/chat/completions", json=chat(), timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(2)]  # one on each replica
    for thread in threads:
        thread.start()
    wait_for(lambda: stats(running)["running"] == 2)
    ray.kill(ray.get_actor(victim, namespace="serve"))
    wait_for(lambda: len(outcome) == 1, 20)
    assert (outcome[0].status_code, outcome[0].json()["error"]["code"]) == (503, "replica_unavailable")
    for _ in range(4):
        assert client.chat.completions.create(**chat(max_tokens=2)).choices
    wait_for(lambda: httpx.get(running.base_url.replace("/v1", "/healthz")).json()["replicas"] == 2, 40)


def _replica_actors() -> list[str]:
    from ray import serve

    details = serve.status().applications[protocol.APP_NAME].deployments
    assert set(details) == {"Engine", "Gateway"}
    from ray.util import list_named_actors

    return [str(actor["name"]) for actor in list_named_actors(all_namespaces=True) if "SERVE_REPLICA" in str(actor["name"])]


def test_an_engine_that_cant_start_is_a_typed_error(running: app.Running) -> None:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        app.start(settings(engine={"model": "no-such-model"}, num_replicas=1))
    assert protocol.APP_NAME not in serve.status().applications
