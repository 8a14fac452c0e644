"""The engine as a Ray Serve deployment. The only file that knows both.

The engine runs in a thread of its own; the methods here run on the replica's loop and never wait for a step.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig
from ray.util import get_node_ip_address

from branchline.engine.errors import BranchlineError, ConfigError
from branchline.engine.types import ErrorInfo
from branchline.orchestrator.config import ServeConfig, log_encoding
from branchline.orchestrator.host import EngineHost, HostedEngine
from branchline.orchestrator.protocol import ENGINE_DEPLOYMENT
from branchline.orchestrator.telemetry.export import ReplicaMetrics
from branchline.orchestrator.telemetry.log import RequestLog

logger = logging.getLogger("ray.serve.branchline")
MAX_ONGOING_REQUESTS = 4096
ROUTER: Any = "branchline.orchestrator.router:BranchRouter"
WILDCARDS = ("0.0.0.0", "::")
START_ERROR_MARK = "branchline-start-error:"


class EngineStartError(RuntimeError):
    """An engine could not be made in its replica. The text carries the error for `read_start_error`: Serve passes nothing
    but text on."""

    def __init__(self, err: BranchlineError) -> None:
        super().__init__(f"{err.message} {START_ERROR_MARK}{msgspec.json.encode(ErrorInfo.of(err)).decode()}")


def read_start_error(text: str) -> ErrorInfo | None:
    """The error in a deployment's status message, if an engine's start left one there."""
    _, mark, rest = text.rpartition(START_ERROR_MARK)
    if not mark:
        return None
    try:
        return msgspec.json.decode(rest.strip().splitlines()[0], type=ErrorInfo)
    except (msgspec.DecodeError, IndexError):
        return None


def load_engine(config: ServeConfig) -> HostedEngine:
    """Make the engine that the settings name; takes seconds. Raises ModelError, ConfigError."""
    module, _, name = config.engine_factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except AttributeError as err:
        raise ConfigError(f"engine_factory = {config.engine_factory!r}: {err}", param="engine_factory") from err
    settings = config.engine
    if settings.weights == "auto" and config.num_replicas > 1:  # several may lie on one machine
        settings = msgspec.structs.replace(settings, weights="mapped")
    engine: HostedEngine = factory.load(settings, logger.info)
    return engine


class EngineReplica:
    """The protocol's methods (see protocol.py) on one engine. Payloads and answers are bytes."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the engine. Raises EngineStartError."""
        try:
            engine = await asyncio.to_thread(load_engine, config)
        except BranchlineError as err:
            raise EngineStartError(err) from err
        replica = serve.get_replica_context().replica_id.unique_id
        self._host = EngineHost(
            engine,
            replica,
            session_timeout_s=config.engine.session_timeout_s,
            heartbeat_s=config.heartbeat_s,
            log=RequestLog(enabled=config.log_requests),
            max_backlog_bytes=config.max_backlog_bytes,
        )
        if config.direct_host:
            await self._listen(config.direct_host)
        self._metrics = ReplicaMetrics(engine.info)
        self._exporter = asyncio.create_task(self._export(config.metrics_period_s), name="branchline-metrics")

    async def open_session(self, payload: bytes) -> bytes:
        """OpenSession -> SessionOpened."""
        return await self._host.open_session(payload)

    async def submit(self, payload: bytes) -> bytes:
        """CommandBatch -> Ack."""
        return await self._host.submit(payload)

    async def events(self, session: str) -> AsyncGenerator[bytes, None]:
        """-> EventBatches; see EngineHost.events."""
        stream = self._host.events(session)
        try:
            async for payload in stream:
                yield payload
        finally:
            await stream.aclose()

    async def close_session(self, session: str) -> bytes:
        """-> Ack."""
        return await self._host.close_session(session)

    async def stats(self) -> bytes:
        """-> StatsReply."""
        return await self._host.stats()

    async def load(self) -> bytes:
        """-> LoadReply."""
        return await self._host.load()

    async def describe(self) -> bytes:
        """-> SessionOpened of no session."""
        return await self._host.describe()

    async def check_health(self) -> None:
        """Raises when the engine no longer runs."""
        await self._host.check_health()

    async def __del__(self) -> None:
        # Serve calls and awaits this when it stops the replica; the constructor may have failed.
        if hasattr(self, "_exporter"):
            self._exporter.cancel()
            await self._host.close()

    async def _listen(self, bind_host: str) -> None:
        """Direct channels are an offer: where none can be made, clients go through Ray."""
        published: str = get_node_ip_address() if bind_host in WILDCARDS else bind_host  # type: ignore[no-untyped-call]
        try:
            await self._host.listen(bind_host, published)
        except OSError as err:
            logger.warning("no direct channels on %s: %s", bind_host, err)

    async def _export(self, period_s: float) -> None:
        while True:
            self._metrics.update(self._host.engine.stats(), self._host.recorder.drain())
            await asyncio.sleep(period_s)


def engine_deployment(config: ServeConfig) -> Any:
    """The engine's Serve application node, with the settings bound."""
    on_gpu = config.engine.device == "cuda"
    deployment: Any = serve.deployment(
        EngineReplica,
        name=ENGINE_DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        # What is wrong with a model is wrong at the second try, too.
        max_constructor_retry_count=1,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LoggingConfig(enable_access_log=False, encoding=log_encoding(config)),
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if on_gpu else 0},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return deployment.bind(config)
