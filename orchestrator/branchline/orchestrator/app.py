"""The Serve application: `build` for Serve's own tools, `start` and `stop` for a local run.

serve run branchline.orchestrator.app:build port=8000 …      or import_path and args in a Serve config file
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from branchline.engine.errors import EngineError
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.protocol import APP_NAME

if TYPE_CHECKING:
    from ray.serve import Application

Progress = Callable[[str], None]
SERVE_LOGGER: Final = "ray.serve"
LOOPBACK: Final = "127.0.0.1"
PORTS_TRIED: Final = 50
RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Handle calls by gRPC instead of Ray's object store: half the latency, and a replica learns at once when the process
    # that read a stream was killed. Without it only the session's lease tells.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # One thread hop less a call. The methods of both deployments never block their loop.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""Set, unless set already, before Ray is imported; the processes of a Ray that `start` starts inherit them."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A started application.

    Attributes:
        base_url: what OpenAI clients take.
        dashboard_url: None without a dashboard.
        owns_ray: whether `start` started Ray, so that `stop` stops it.
    """

    base_url: str
    dashboard_url: str | None
    owns_ray: bool


def build(args: dict[str, Any]) -> Application:
    """The application from plain settings (see ServeConfig). Raises ConfigError."""
    return build_app(ServeConfig.from_dict(args))


def build_app(config: ServeConfig) -> Application:
    """The application: gateway over engines. Needs Ray's libraries, not a running Ray."""
    from branchline.orchestrator.gateway.deployment import gateway_deployment
    from branchline.orchestrator.replica import engine_deployment

    app: Application = gateway_deployment(engine_deployment(config), config)
    return app


def start(config: ServeConfig, progress: Progress | None = None) -> Running:
    """Serve on the Ray that this process is connected to, or on a new local one. Returns when the application answers.

    Args:
        progress: called with a line of text before each part that takes seconds, first of all before Ray is started. What
            it raises ends the start, and what was started is stopped.

    Raises ModelError, ConfigError, EngineError.
    """
    say = progress or (lambda _: None)
    config.validate()
    say("starting Ray")
    dashboard_url, owns_ray = _init_ray(config)
    try:
        say("starting the HTTP proxy and loading the model")
        _deploy(config)
    except BaseException:
        stop(Running(base_url="", dashboard_url=dashboard_url, owns_ray=owns_ray))
        raise
    return Running(base_url=f"http://{config.host}:{config.port}/v1", dashboard_url=dashboard_url, owns_ray=owns_ray)


def stop(running: Running) -> None:
    """Stop the application, and Ray if `start` started it."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    if running.owns_ray:
        # Takes Serve's processes with it.
        ray.shutdown()
    else:
        serve.delete(APP_NAME)


def _init_ray(config: ServeConfig) -> tuple[str | None, bool]:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return None, False
    try:
        context = ray.init(
            # An engine takes one; the rest is for agents.
            num_cpus=(os.cpu_count() or 1) + config.num_replicas,
            include_dashboard=config.dashboard,
            dashboard_host=LOOPBACK,
            dashboard_port=_free_port(config.dashboard_port),
            log_to_driver=config.verbose,
            logging_level=logging.INFO if config.verbose else logging.ERROR,
            namespace=APP_NAME,
        )
    except (OSError, RuntimeError, ValueError) as err:
        raise EngineError(f"Ray did not start: {err}") from err
    return (f"http://{context.dashboard_url}" if context.dashboard_url else None), True


def _free_port(first: int) -> int:
    """The first port from `first` on that nobody listens on; `first` if there is none near: Ray's error then tells."""
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                return port
    return first


def _deploy(config: ServeConfig) -> None:
    from ray import serve

    from branchline.orchestrator.replica import read_start_error

    if not config.verbose:
        logging.getLogger(SERVE_LOGGER).setLevel(logging.WARNING)
    serve.start(http_options={"host": config.host, "port": config.port}, proxy_location="EveryNode")
    try:
        serve.run(build_app(config), name=APP_NAME, route_prefix="/")
    except RuntimeError as err:
        status = serve.status().applications.get(APP_NAME)
        texts = [str(err)]
        if status is not None:
            texts += [deployment.message for deployment in status.deployments.values()]
        for text in texts:
            info = read_start_error(text)
            if info is not None:
                raise info.exception() from None
        causes = [line for text in texts[1:] for line in text.strip().splitlines()[-1:]]
        raise EngineError(f"the application did not start: {'; '.join(causes) or err}") from err
