"""The real chain: replicas, Ray's endpoints, Debian's Prometheus started by our command, and the board's own queries."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.orchestrator.test_cli import CLI, environment

from branchline.orchestrator import app
from branchline.orchestrator.config import ServeConfig
from branchline.orchestrator.telemetry import board
from branchline.orchestrator.telemetry.catalogue import BY_NAME

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus isn't installed: apt install prometheus"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NEVER_HERE = {"copied_bytes", "preemptions", "swapped_pages", "dropped", "refused"}
TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Ray's sockets want a short path.
    with tempfile.TemporaryDirectory(prefix="bl", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder) / "ray"


def query(url: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def test_the_boards_series_appear_in_prometheus_after_traffic(ray_folder: Path) -> None:
    config = ServeConfig.from_dict(
        {
            "port": free_port(),
            "dashboard_port": free_port(),
            "metrics_period_s": 0.5,
            "engine_factory": "tests.orchestrator.fake_engine:FakeEngine",
        }
    )
    port = free_port()
    command = [sys.executable, "-c", CLI, "metrics", "launch", "--port", str(port), "--scrape-s", "1"]
    running = app.start(config)
    log = ray_folder.parent / "prometheus.log"
    with log.open("w") as out, subprocess.Popen(command, env=environment(), stdout=out, stderr=out) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + TIMEOUT_S
            wanted = board.series() - {series for name in NEVER_HERE for series in BY_NAME[name].series}
            seen: set[str] = set()
            while not wanted <= seen:
                assert time.monotonic() < deadline, (wanted - seen, log.read_text()[-2000:])
                _talk(running.base_url)
                time.sleep(1)
                try:
                    seen = {sample["metric"]["__name__"] for sample in query(url, '{__name__=~"ray_branchline_.+"}')}
                except httpx.TransportError:
                    continue
            _talk(running.base_url)
            for expression in board.expressions():
                query(url, _filled_in(expression))
            pages = {sample["metric"]["state"]: float(sample["value"][1]) for sample in query(url, "ray_branchline_pages")}
            assert set(pages) == {"free", "shared", "private", "cached"}
            assert sum(pages.values()) == 512
            # A fraction of a rate: the chain of histogram, rate and quantile gives a number.
            (first,) = query(url, "histogram_quantile(0.5, sum by (le) (ray_branchline_first_token_seconds_bucket))")
            assert float(first["value"][1]) > 0
            assert (ray_folder / "session_latest" / prometheus_board()).exists()
        finally:
            server.terminate()
            server.wait(20)
            app.stop(running)


def prometheus_board() -> Path:
    from branchline.orchestrator.telemetry.prometheus import DASHBOARDS

    return DASHBOARDS / board.FILE_NAME


def _talk(base_url: str) -> None:
    ask = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "n": 3}
    assert httpx.post(f"{base_url}/chat/completions", json=ask).status_code == 200
    too_long = ask | {"messages": [{"role": "user", "content": "x" * 10**5}]}
    assert httpx.post(f"{base_url}/chat/completions", json=too_long).status_code == 400


def _filled_in(expression: str) -> str:
    return re.sub(r"\$__rate_interval", "10s", expression).replace("$Replica", ".*")
