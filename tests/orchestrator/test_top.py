"""`branchline top`: rates from two looks, one frame as text and as JSON, typed errors."""

from __future__ import annotations

import io
import json
import threading

import httpx
import pytest
from rich.console import Console
from tests.orchestrator.local_gateway import local_gateway
from tests.orchestrator.test_cli import branchline

from branchline.engine.types import EngineStats
from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.top import Watcher, frame, row


def stats(**changes: float) -> EngineStats:
    return EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0) | {"pages_total": 100, "pages_free": 100} | changes)  # type: ignore[arg-type]


def shown(*rows: object) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(frame(list(rows)))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = stats(steps=10, decode_tokens=100, tensor_s=1.0, python_s=0.5, idle_s=3.0)
    after = stats(
        steps=30, decode_tokens=300, prefill_tokens=100, tensor_s=2.44, plan_s=0.02, python_s=0.54, idle_s=3.5, forks=8,
        running=4, waiting=3, waiting_batch=2, branches=9, pages_free=60, pages_private=30, pages_cached=4,
    )  # fmt: skip
    made = row("r1", before, after, 2.0)
    assert (made.tokens_s, made.prefill_tokens_s, made.steps_s, made.batch, made.forks_s) == (100, 50, 10, 15, 4)
    assert made.waiting == {"interactive": 0, "standard": 1, "batch": 2}
    assert made.pages == {"free": 60, "shared": 6, "private": 30, "cached": 4}
    assert made.tax == pytest.approx(0.04 / 1.5)
    assert sum(made.time.values()) == pytest.approx(1)
    text = shown(made)
    assert "2.67 % of the busy time" in text
    assert "■ shared 6   ■ private 30   ■ cached 4   ■ free 60" in text


def test_an_idle_replica_has_no_tax_and_a_fresh_one_no_rates() -> None:
    now = stats()
    made = row("r1", now, now, 1.0)
    assert made.tax is None
    assert "idle" in shown(made)


def test_bars_are_as_long_as_the_pool_and_show_what_is_little() -> None:
    made = row("r1", stats(), stats(pages_free=0, pages_total=10**6, pages_private=1), 1.0)
    (bar,) = (line for line in shown(made).splitlines() if "pages " in line)
    assert bar.count("█") + bar.count("░") == 48


def test_a_running_gateway_with_two_replicas() -> None:
    with local_gateway(replicas=2) as gateway:
        ask = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "n": 3}
        asking = threading.Thread(target=httpx.post, args=(f"{gateway.base_url}/chat/completions",), kwargs={"json": ask})
        asking.start()
        done = branchline("top", "--url", gateway.url, "--once", "--json", "--period-s", "0.3")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [each["replica"] for each in rows] == ["replica0", "replica1"]
        assert sum(each["running"] for each in rows) == 3
        assert sum(each["tokens_s"] for each in rows) > 0
        assert {sum(each["pages"].values()) for each in rows} == {512}
        done = branchline("top", "--url", gateway.base_url, "--once", "--period-s", "0.1")
        assert "replica replica1" in done.stdout
        asking.join()


def test_what_is_no_gateway_is_a_typed_error() -> None:
    for answer, said in (
        (httpx.Response(200, text="hello"), "isn't a Branchline gateway"),
        (httpx.Response(502, text="bad"), "502"),
    ):
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        with httpx.Client(transport=transport) as http, pytest.raises(ReplicaUnavailableError, match=said):
            Watcher("http://nowhere", http)
    done = branchline("top", "--once", "--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "branchline serve" in done.stderr.replace("\n", " ")
