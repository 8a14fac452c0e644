"""The gateway as a Ray Serve deployment."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette

from branchline.orchestrator.config import ServeConfig, log_encoding
from branchline.orchestrator.gateway.backend import Backend
from branchline.orchestrator.gateway.http import build_asgi
from branchline.orchestrator.link import ServeLink
from branchline.orchestrator.telemetry.log import RequestLog

GATEWAY_DEPLOYMENT = "Gateway"
MAX_ONGOING_REQUESTS = 4096


class GatewayReplica:
    """Holds one session on each engine replica and serves HTTP over them."""

    def __init__(self, engine: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._engine = engine
        self._config = config

    def __serve_build_asgi_app__(self) -> Starlette:  # noqa: N807, RUF100 - Serve's name for this hook
        backend = Backend(ServeLink(self._engine), self._config.num_replicas, log=RequestLog(enabled=self._config.log_requests))
        return build_asgi(backend, self._config.max_body_bytes, request_ids=False)


def gateway_deployment(engine: Any, config: ServeConfig) -> Any:
    """The gateway's Serve application node over the engine's."""
    deployment: Any = serve.deployment(
        serve.ingress()(GatewayReplica),
        name=GATEWAY_DEPLOYMENT,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LoggingConfig(encoding=log_encoding(config)),
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(engine, config)
