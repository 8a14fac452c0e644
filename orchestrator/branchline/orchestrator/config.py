"""The settings of the Serve application, in one frozen Struct."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from branchline.engine.config import EngineConfig
from branchline.engine.errors import ConfigError

ENGINE_FACTORY = "branchline.engine.engine:Engine"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the application is served.

    Attributes:
        host, port: where the HTTP gateway listens; loopback only unless told otherwise.
        num_replicas: engines, each with its own copy of the weights and its own page pool.
        dashboard: whether a Ray started by `start` has its dashboard.
        dashboard_port: where the dashboard listens (loopback); Ray takes the next free port when it's taken.
        max_body_bytes: longest request body that the gateway reads.
        direct_host: the address on which replicas take direct channels from clients, beside Ray; with a wildcard clients are
            told the node's own. "": none are taken.
        max_backlog_bytes: about what a session's unread events may take before it is closed with SlowReaderError.
        heartbeat_s: an event stream that has nothing to say says so this often; at most half of `session_timeout_s`.
        metrics_period_s: how often the engine's counters go to Ray's metrics.
        verbose: show what Ray and its workers log.
        log_format: of Serve's log files: "text" or "json".
        log_requests: a log line for each generation that ends, with its branch, tokens and times.
        engine: the engine's settings, the same for every replica.
        engine_factory: `module:class` with a `load(config, progress)` that returns an engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    num_replicas: int = 1
    dashboard: bool = True
    dashboard_port: int = 8265
    max_body_bytes: int = 32 << 20
    direct_host: str = "127.0.0.1"
    max_backlog_bytes: int = 32 << 20
    heartbeat_s: float = 5.0
    metrics_period_s: float = 2.0
    verbose: bool = False
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    engine: EngineConfig = EngineConfig()
    engine_factory: str = ENGINE_FACTORY

    def validate(self) -> ServeConfig:
        """Return self. Raises ConfigError that names the first setting out of range."""
        for name in ("port", "dashboard_port"):
            value = getattr(self, name)
            if not 0 < value < 65536:
                raise ConfigError(f"{name} = {value}: expected a port from 1 to 65535", param=name)
        for name in ("num_replicas", "max_body_bytes", "max_backlog_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} = {value}: expected at least 1", param=name)
        for name in ("heartbeat_s", "metrics_period_s"):
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"{name} = {value}: expected more than 0", param=name)
        self.engine.validate()
        if self.heartbeat_s > self.engine.session_timeout_s / 2:
            raise ConfigError(
                f"heartbeat_s = {self.heartbeat_s}: expected at most half of the engine's session_timeout_s, "
                f"{self.engine.session_timeout_s}",
                param="heartbeat_s",
            )
        return self

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> ServeConfig:
        """Build from plain values, as they stand in a Serve config file. Raises ConfigError; an unknown key's error names the
        nearest known one."""
        known = cls.__struct_fields__
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}: {hint}", param=key)
        engine = settings.get("engine", {})
        if not isinstance(engine, dict | EngineConfig):
            raise ConfigError(f"engine = {engine!r}: expected a mapping of engine settings", param="engine")
        parsed = engine if isinstance(engine, EngineConfig) else EngineConfig.from_dict(engine)
        try:
            rest = msgspec.convert({k: v for k, v in settings.items() if k != "engine"}, cls)
        except msgspec.ValidationError as err:
            raise ConfigError(f"serve settings: {err}") from err
        return msgspec.structs.replace(rest, engine=parsed).validate()


def log_encoding(config: ServeConfig) -> Literal["TEXT", "JSON"]:
    """The log format as Serve's LoggingConfig names it."""
    return "JSON" if config.log_format == "json" else "TEXT"
