"""The application as Serve's own tools build it, and the errors that a replica leaves behind."""

from __future__ import annotations

import socket

import pytest
from ray.serve import Application

from branchline.engine.errors import ConfigError, ModelNotFoundError
from branchline.engine.types import ErrorInfo
from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.replica import EngineStartError, load_engine, read_start_error


def test_build_takes_what_a_serve_config_file_holds() -> None:
    assert isinstance(app.build({"num_replicas": 2, "engine": {"model": "m.gguf"}}), Application)


def test_build_refuses_unknown_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_replicas'"):
        app.build({"num_replica": 2})


@pytest.mark.parametrize("message", ["no model 'x'", 'quotes " and\nlines', "日本語 \\ {}"])
def test_a_start_error_survives_the_trip_as_text(message: str) -> None:
    error = EngineStartError(ModelNotFoundError(message, param="model"))
    status = f"Failed to update the deployments ['Engine'].\nTraceback …\nEngineStartError: {error}\nmore lines\n"
    assert read_start_error(status) == ErrorInfo("model_not_found", message, "model")


@pytest.mark.parametrize("text", ["", "something else failed", "branchline-start-error:", "branchline-start-error:{"])
def test_other_texts_hold_no_start_error(text: str) -> None:
    assert read_start_error(text) is None


def test_an_engine_factory_that_isnt_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="NoSuchEngine"):
        load_engine(ServeConfig(engine_factory="tests.orchestrator.fake_engine:NoSuchEngine"))


def test_a_dashboard_port_in_use_gives_way_to_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port < app._free_port(port) < port + app.PORTS_TRIED
