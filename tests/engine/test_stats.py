"""What an engine counts: waiting work by class of service, and the pages of branches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.engine.recorder import Recorder

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.types import EngineStats, Generate, SamplingParams, Service

TIMEOUT_S = 20.0


def when(engine: Engine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """The engine's counters once they hold."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds(stats := engine.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def test_work_that_waits_is_counted_by_its_class(tiny_model: Path) -> None:
    fcfs = {"policy": "fcfs"}  # nobody yields
    config = EngineConfig.from_dict({"model": str(tiny_model), "pool_tokens": 4096, "max_batch": 1, "scheduling": fcfs})
    with Engine.load(config) as engine:
        client = Recorder(engine)
        branches = [client.context(f"prompt {i}") for i in range(6)]
        classes = ("interactive", "batch", "batch", "standard", "standard")
        services = [Service(), *(Service(qos=qos) for qos in classes)]  # type: ignore[arg-type]
        endless = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0)
        requests = [client.generate(branch, max_tokens=1) for branch in branches]
        for request in requests:
            client.output(request)
        client.send(*(Generate(b, 100 + b, endless, service) for b, service in zip(branches, services, strict=True)))
        stats = when(engine, lambda stats: stats.running == 1 and stats.waiting == 5)
        assert (stats.waiting_interactive, stats.waiting_batch) == (1, 2)


def test_pages_are_told_apart(tiny_model: Path) -> None:
    with Engine.load(EngineConfig.from_dict({"model": str(tiny_model), "pool_tokens": 4096})) as engine:
        client = Recorder(engine)
        root = client.context("x" * 200)
        client.run(root, max_tokens=1)
        pages = engine.info.num_pages - engine.stats().pages_free
        assert when(engine, lambda stats: stats.pages_private == pages).pages_free == engine.info.num_pages - pages
        for child in client.fork(root, 3):
            client.run(child, max_tokens=2)
        own = sum(client.inspect(child).private_pages for child in (1, 2, 3))
        assert own >= 3
        stats = when(engine, lambda stats: stats.pages_private == own)
        assert stats.pages_total - stats.pages_free - stats.pages_private == pages
