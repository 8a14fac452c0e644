"""The real gateway over a scripted engine in this process: uvicorn on a free port of loopback, in a thread. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from branchline.agents.testing import ScriptedEngine
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.gateway.http import build_asgi
from branchline.orchestrator.host import EngineHost
from branchline.orchestrator.link import HostLink

MAX_BODY_BYTES = 1 << 22


class Gateway:
    """A running gateway; `stop` cuts its connections."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._servers: list[uvicorn.Server] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        for _ in range(2000):
            if self._servers and self._servers[0].started:
                return
            time.sleep(0.005)
        raise AssertionError("the gateway didn't start")

    async def _serve(self) -> None:
        host = EngineHost(self._engine, "only", session_timeout_s=60.0, heartbeat_s=5.0)
        app = build_asgi(Backend(HostLink({"only": host})), MAX_BODY_BYTES)
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0, lifespan="on")
        self._servers.append(uvicorn.Server(config))
        await self._servers[0].serve(sockets=[self._listener])
        await host.close()

    def stop(self) -> None:
        self._servers[0].should_exit = True
        self._thread.join(10)
        self._listener.close()


@contextlib.contextmanager
def serving(engine: ScriptedEngine) -> Iterator[Gateway]:
    gateway = Gateway(engine)
    try:
        yield gateway
    finally:
        gateway.stop()
