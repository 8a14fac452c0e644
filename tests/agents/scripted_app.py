"""The real Serve application over a scripted engine: what the Ray transport's tests run against."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.agents.harness import reply

from branchline.agents.testing import ScriptedEngine
from branchline.engine.config import EngineConfig
from branchline.engine.types import EngineStats
from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.protocol import APP_NAME, ENGINE_DEPLOYMENT, StatsReply, decode_reply

ROOT = Path(__file__).parents[2]


class Scripted(ScriptedEngine):
    """The suite's scripted engine, made by a replica."""

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[str], None] | None = None) -> Scripted:
        return cls(reply, step_s=0.001)


class RemoteEngine:
    """Counters of the replica's engine, for tests that look behind the SDK."""

    def __init__(self) -> None:
        from ray import serve

        self._handle: Any = serve.get_deployment_handle(ENGINE_DEPLOYMENT, APP_NAME)

    def stats(self) -> EngineStats:
        """Waits in a thread of its own: Ray refuses to block a thread that has a running loop."""
        answers: list[bytes] = []
        thread = threading.Thread(target=lambda: answers.append(self._handle.stats.remote().result(timeout_s=10)))
        thread.start()
        thread.join()
        answer = decode_reply(answers[0])
        assert isinstance(answer, StatsReply)
        return answer.stats


@contextlib.contextmanager
def scripted_app() -> Iterator[RemoteEngine]:
    """Start Ray and the application; stop both."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), path
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = ServeConfig(port=port, dashboard=False, engine_factory="tests.agents.scripted_app:Scripted")
    running = app.start(config)
    try:
        yield RemoteEngine()
    finally:
        app.stop(running)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
