"""The Grafana board, and Prometheus' configuration, without either."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from tests.orchestrator.test_cli import branchline

from branchline.engine.errors import ConfigError
from branchline.orchestrator.telemetry import board, prometheus
from branchline.orchestrator.telemetry.catalogue import METRICS

EXPORTED = {series for metric in METRICS for series in metric.series}


def test_every_metric_of_the_board_is_exported_and_nearly_every_exported_one_is_on_it() -> None:
    asked = board.series()
    assert asked <= EXPORTED
    unseen = {metric.name for metric in METRICS if not asked & set(metric.series)}
    assert unseen == {"model_info"}


def test_a_series_that_a_metric_does_not_have_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="ray_branchline_pages_total"):
        board.rate("pages")
    with pytest.raises(KeyError):
        board.level("no_such_metric")


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = board.board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_command_writes_the_board(tmp_path: Path) -> None:
    done = branchline("metrics", "board", str(tmp_path / "board.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "board.json").read_text()) == board.board()
    assert branchline("metrics", "board", str(tmp_path)).returncode == 2


def test_without_prometheus_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    done = branchline("metrics", "launch", "--prometheus", str(tmp_path / "prometheus"))
    assert done.returncode == 2
    assert "apt install prometheus" in done.stderr.replace("\n", " ")


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            prometheus.command("prometheus", tmp_path, tmp_path, host="127.0.0.1", port=port, scrape_s=5)


def test_the_board_goes_where_rays_grafana_looks(tmp_path: Path) -> None:
    assert prometheus.install_board(tmp_path) is None
    folder = tmp_path / "session_latest" / "metrics" / "grafana" / "dashboards"
    folder.mkdir(parents=True)
    path = prometheus.install_board(tmp_path)
    assert path is not None
    assert path.parent == folder
    assert json.loads(path.read_text()) == board.board()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool isn't installed: apt install prometheus")
def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a folder" / "session_latest").mkdir(parents=True)
    (tmp_path / "prometheus.yml").write_text(prometheus.configuration(tmp_path / "a folder", 5))
    done = subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
