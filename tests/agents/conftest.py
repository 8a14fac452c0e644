from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.agents.gateway import serving
from tests.agents.harness import Way, reply
from tests.agents.scripted_app import RemoteEngine, scripted_app

from branchline.agents.client import connect
from branchline.agents.testing import ScriptedEngine


@pytest.fixture(scope="module")
def application() -> Iterator[RemoteEngine]:
    """The real Serve application over a scripted engine."""
    with scripted_app() as engine:
        yield engine


WAYS = ["local", "http", *(pytest.param(name, marks=pytest.mark.serve) for name in ("serve", "direct"))]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """A scripted engine, reached over each transport: through Ray's handle, and over a direct channel beside it."""
    if request.param in ("serve", "direct"):
        application, direct = request.getfixturevalue("application"), request.param == "direct"
        yield Way(request.param, application, lambda: connect("serve:branchline", direct=direct), None)
        return
    with ScriptedEngine(reply, step_s=0.001) as engine:
        if request.param == "local":
            yield Way("local", engine, lambda: connect(engine), engine.close)
            return
        with serving(engine) as gateway:
            yield Way("http", engine, lambda: connect(gateway.url), gateway.stop)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(reply, step_s=0.001) as scripted:
        yield scripted
