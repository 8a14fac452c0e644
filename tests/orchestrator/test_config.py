"""Serve settings: defaults that are safe, errors that name the setting."""

from __future__ import annotations

from typing import Any

import pytest

from branchline.engine.config import EngineConfig
from branchline.engine.errors import ConfigError
from branchline.orchestrator.config import ServeConfig


def test_the_default_listens_on_loopback_only() -> None:
    assert ServeConfig().host == "127.0.0.1"
    assert ServeConfig.from_dict({}) == ServeConfig()


def test_engine_settings_are_nested() -> None:
    config = ServeConfig.from_dict({"port": 9000, "engine": {"model": "m.gguf", "pool_tokens": 64}})
    assert (config.port, config.engine.model, config.engine.pool_tokens) == (9000, "m.gguf", 64)
    engine = EngineConfig(model="x")
    assert ServeConfig.from_dict({"engine": engine}).engine is engine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"engine": {"poll_tokens": 1}}, "did you mean 'pool_tokens'"),
        ({"engine": 5}, "expected a mapping"),
        ({"port": 0}, "port = 0"),
        ({"port": "http"}, "port"),
        ({"num_replicas": 0}, "num_replicas = 0"),
        ({"max_body_bytes": 0}, "max_body_bytes = 0"),
        ({"metrics_period_s": 0}, "metrics_period_s = 0"),
        ({"heartbeat_s": 31}, "at most half"),
        ({"engine": {"page_tokens": 0}}, "page_tokens = 0"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig.from_dict(settings)
