"""What a replica records of its requests, and what its log lines hold."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from ray._common.formatters import JSONFormatter
from tests.orchestrator.fake_engine import FakeEngine

from branchline.engine.config import EngineConfig
from branchline.engine.types import (
    Context,
    Delta,
    EngineStats,
    ErrorInfo,
    Failed,
    Finished,
    Generate,
    SamplingParams,
    Service,
    Text,
    Timing,
    Usage,
)
from branchline.orchestrator import protocol
from branchline.orchestrator.channel import read_reply
from branchline.orchestrator.host import EngineHost
from branchline.orchestrator.protocol import CommandBatch, OpenSession, SessionOpened
from branchline.orchestrator.telemetry.catalogue import BY_NAME, METRICS
from branchline.orchestrator.telemetry.log import RequestLog
from branchline.orchestrator.telemetry.recorder import Recorder
from branchline.orchestrator.telemetry.states import pages_by_state, waiting_by_class


def delta(branch: int) -> Delta:
    return Delta(branch, branch, (1,), "a")


def finished(branch: int, *, queue_s: float = 0.1, first_token_s: float = 0.2) -> Finished:
    return Finished(branch, branch, "length", Usage(10, 3, 8), Timing(queue_s, first_token_s, 0.5))


class Clock:
    """Seconds of tensor work, moved by hand."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def __call__(self) -> float:
        return self.busy_s


def test_a_request_is_observed_once_when_it_ends() -> None:
    busy = Clock()
    recorder = Recorder(busy)
    session = recorder.session("r.s")
    session.submitted([Generate(1, 1, SamplingParams(), Service(qos="interactive"))], at=10.0)
    for step in range(3):
        busy.busy_s += 0.3
        events = (delta(1),) if step < 2 else (delta(1), finished(1))
        session.published(events, at=10.3 + 0.3 * step, now=10.35 + 0.3 * step)
    samples = recorder.drain()
    assert samples.observed["first_token_seconds", "interactive"] == [0.2]
    assert samples.observed["queue_seconds", "interactive"] == [0.1]
    assert samples.observed["request_seconds", "interactive"] == pytest.approx([0.95])
    assert samples.observed["request_tax_seconds", "interactive"] == pytest.approx([0.05])
    assert samples.counted["requests", "length"] == 1
    assert recorder.drain().observed == {}


def test_intervals_are_of_steps_and_skip_pauses() -> None:
    recorder = Recorder(Clock())
    session = recorder.session("r.s")
    for at, events in (
        (1.0, (delta(1), delta(2))),
        (1.1, (delta(1), delta(2), finished(2))),
        (1.3, (delta(1), finished(1))),
        (9.0, (delta(3),)),  # nothing streamed in between
        (9.2, (delta(3),)),
    ):
        session.published(events, at, at)
    assert recorder.drain().observed["token_interval_seconds", ""] == pytest.approx([0.1, 0.2, 0.2])


def test_failures_are_counted_by_code() -> None:
    recorder = Recorder(Clock())
    session = recorder.session("r.s")
    session.submitted([Generate(1, 7)], at=0.0)
    error = ErrorInfo("context_length", "too long")
    session.published((Failed(1, error, 7), Failed(2, error)), 1.0, 1.0)
    counted = recorder.drain().counted
    assert counted["errors", "context_length"] == 2
    assert counted["requests", "failed"] == 1


def test_a_host_records_what_passes_through_it() -> None:
    async def run() -> Recorder:
        host = EngineHost(FakeEngine(EngineConfig()), "r1")
        opened = read_reply(await host.open_session(protocol.encode(OpenSession())), SessionOpened)
        commands = (Context(0, Text("hello")), Generate(0, 5, SamplingParams(max_tokens=20)))
        await host.submit(protocol.encode(CommandBatch(opened.session, commands)))
        async for payload in host.events(opened.session):
            if any(isinstance(event, Finished) for event in protocol.decode_events(payload).events):
                break
        refused = await host.submit(protocol.encode(CommandBatch("r1.gone", ())))
        assert isinstance(protocol.decode_reply(refused), protocol.ErrorReply)
        await host.close()
        return host.recorder

    samples = asyncio.run(run()).drain()
    assert samples.counted["requests", "length"] == 1
    assert samples.counted["errors", "session_not_found"] == 1
    assert samples.counted["transport_seconds", ""] > 0
    assert len(samples.observed["token_interval_seconds", ""]) == 19
    assert samples.observed["delivery_seconds", ""]
    (wall_s,) = samples.observed["request_seconds", "standard"]
    (tax_s,) = samples.observed["request_tax_seconds", "standard"]
    assert 0 <= tax_s < wall_s
    assert {name for name, _ in (*samples.observed, *samples.counted)} <= set(BY_NAME)


def test_every_page_has_one_state_and_every_waiter_one_class() -> None:
    fields = dict.fromkeys(EngineStats.__struct_fields__, 0)
    stats = EngineStats(**fields | {"pages_total": 100, "pages_free": 40, "pages_cached": 10, "pages_private": 15})
    assert pages_by_state(stats) == {"free": 40, "shared": 35, "private": 15, "cached": 10}
    late = EngineStats(**fields | {"pages_total": 100, "pages_free": 95, "pages_cached": 3, "pages_private": 15})
    assert pages_by_state(late) == {"free": 95, "shared": 0, "private": 2, "cached": 3}
    waits = EngineStats(**fields | {"waiting": 9, "waiting_interactive": 2, "waiting_batch": 4})
    assert waiting_by_class(waits) == {"interactive": 2, "standard": 3, "batch": 4}


def test_no_metric_has_a_tag_of_many_values() -> None:
    assert {metric.tag for metric in METRICS} <= {None, "kind", "qos", "state", "reason", "code", "model"}
    assert len({series for metric in METRICS for series in metric.series}) == sum(len(metric.series) for metric in METRICS)


def test_log_lines_are_json_with_the_ids_and_without_the_session_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve.branchline.requests")
    secret = "0123456789abcdef0123456789abcdef"
    log = RequestLog(enabled=True)
    log.finished(f"replica7.{secret}", finished(4), "batch", 0.0025)
    log.failed(f"replica7.{secret}", Failed(5, ErrorInfo("context_length", "too long"), 9))
    log.asked(f"replica7.{secret}", range(4, 6))
    RequestLog(enabled=False).asked(f"replica7.{secret}", range(9, 10))
    done, failed, asked = (json.loads(JSONFormatter().format(record)) for record in caplog.records)
    assert done["session"] == "replica7.01234567"
    assert (done["branch"], done["generation"], done["reason"], done["qos"]) == (4, 4, "length", "batch")
    assert (done["first_token_ms"], done["tax_ms"], done["completion_tokens"]) == (200.0, 2.5, 3)
    assert (failed["levelname"], failed["code"], failed["branch"], failed["generation"]) == ("WARNING", "context_length", 5, 9)
    assert asked["branches"] == [4, 6]
    assert not any(secret in JSONFormatter().format(record) for record in caplog.records)
