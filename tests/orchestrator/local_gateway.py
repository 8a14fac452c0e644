"""The real gateway over engines in this process, fake ones by default: uvicorn on a free port of loopback. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from tests.orchestrator.fake_engine import FakeEngine

from branchline.engine.config import EngineConfig
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.gateway.http import build_asgi
from branchline.orchestrator.host import EngineHost
from branchline.orchestrator.link import HostLink

T = TypeVar("T")


class LocalGateway:
    """A running gateway.

    Attributes:
        url: without a path.
        engines: by replica name.
        hosts: the replicas' session tables, by name; use them on the gateway's loop only.
    """

    def __init__(self, engines: dict[str, FakeEngine], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.engines = engines
        self.hosts: dict[str, EngineHost] = {}

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def engine(self) -> FakeEngine:
        return next(iter(self.engines.values()))


@contextlib.contextmanager
def local_gateway(
    *,
    replicas: int = 1,
    config: EngineConfig | None = None,
    max_body_bytes: int = 1 << 20,
    heartbeat_s: float = 5.0,
    make: Callable[[EngineConfig], Any] = FakeEngine,
) -> Iterator[LocalGateway]:
    """Start, and stop at the end; the engines are closed, too. `make`: an engine from its settings."""
    settings = config or EngineConfig()
    engines = {f"replica{i}": make(settings) for i in range(replicas)}
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = LocalGateway(engines, listener.getsockname()[1])
    server: list[uvicorn.Server] = []

    async def serve() -> None:
        for name, engine in engines.items():
            gateway.hosts[name] = EngineHost(
                engine, name, session_timeout_s=settings.session_timeout_s, heartbeat_s=heartbeat_s
            )
        app = build_asgi(Backend(HostLink(gateway.hosts)), max_body_bytes)
        server.append(uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on")))
        await server[0].serve(sockets=[listener])
        for host in gateway.hosts.values():
            await host.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        wait_for(lambda: bool(server) and server[0].started)
        yield gateway
    finally:
        server[0].should_exit = True
        thread.join(10)
        listener.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds. Fails the test when it doesn't in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)
