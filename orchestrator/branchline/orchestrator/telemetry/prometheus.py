"""Prometheus over a Ray cluster: its configuration, and the process, which replaces this one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Final

from branchline.engine.errors import ConfigError
from branchline.orchestrator.telemetry.board import FILE_NAME, board

DISCOVERY_FILE: Final = "prom_metrics_service_discovery.json"
LATEST_SESSION: Final = "session_latest"
DASHBOARDS: Final = Path("metrics/grafana/dashboards")
INSTALL: Final = "install it (Debian, Ubuntu: apt install prometheus) or name it with --prometheus PATH"
CONFIGURATION: Final = """\
# Scrapes every node of the Ray cluster whose folder this is; Ray rewrites the file of targets when nodes come and go.
global:
  scrape_interval: {scrape_s}s
  evaluation_interval: {scrape_s}s
scrape_configs:
- job_name: ray
  file_sd_configs:
  - files: [{targets}]
    refresh_interval: 5s
"""


def configuration(ray_folder: Path, scrape_s: int) -> str:
    """Prometheus' configuration for the cluster whose files lie below `ray_folder` (Ray's temporary folder)."""
    return CONFIGURATION.format(scrape_s=scrape_s, targets=json.dumps(str(ray_folder / LATEST_SESSION / DISCOVERY_FILE)))


def find_prometheus(given: str | None) -> str:
    """The binary. Raises ConfigError that says how to get it."""
    found = shutil.which(given or "prometheus")
    if found is None:
        raise ConfigError(f"no {given or 'prometheus'} is installed here: {INSTALL}", param="prometheus")
    return found


def install_board(ray_folder: Path) -> Path | None:
    """Put the board beside Ray's own, where a Grafana that runs with Ray's configuration loads it. Returns where; None when
    this cluster has no such folder (its dashboard is off)."""
    folder = ray_folder / LATEST_SESSION / DASHBOARDS
    if not folder.is_dir():
        return None
    path = folder / FILE_NAME
    path.write_text(json.dumps(board(), indent=1) + "\n")
    return path


def command(binary: str, folder: Path, ray_folder: Path, *, host: str, port: int, scrape_s: int) -> list[str]:
    """Write the configuration and say how Prometheus is to be started. Its data lies in `folder`, too.

    Raises ConfigError when the port is taken or the folder can't be written.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise ConfigError(f"can't listen on {host}:{port}: {err.strerror}; choose another --port", param="port") from err
    path = folder / "prometheus.yml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(configuration(ray_folder, scrape_s))
    except OSError as err:
        raise ConfigError(f"can't write {path}: {err.strerror}; choose another --folder", param="folder") from err
    return [
        binary,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={host}:{port}",
    ]


def replace_process(arguments: list[str]) -> None:
    """Become the process that the arguments name: it gets this one's signals."""
    os.execv(arguments[0], arguments)
