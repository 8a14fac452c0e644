"""`branchline metrics …`: Prometheus over the running cluster, and the Grafana board."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from branchline.engine.errors import ConfigError

metrics = typer.Typer(no_args_is_help=True, help="Prometheus and Grafana for the running application.")


def ray_temporary_folder() -> Path:
    """Where Ray puts its sessions, unless it was told otherwise."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")


@metrics.command()
def launch(
    ray_folder: Annotated[
        Path, typer.Option(help="Ray's temporary folder (of `ray start --temp-dir`).", default_factory=ray_temporary_folder)
    ],
    port: Annotated[int, typer.Option(help="Prometheus' port; 9090 is where Ray's dashboard looks for it.")] = 9090,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback only by default.")] = "127.0.0.1",
    folder: Annotated[
        Path | None, typer.Option(help="For the configuration and the data. Default: branchline-prometheus in Ray's folder.")
    ] = None,
    scrape_s: Annotated[int, typer.Option(help="Seconds between two scrapes.", min=1)] = 5,
    prometheus: Annotated[str | None, typer.Option(help="The binary, if it isn't in the PATH.")] = None,
) -> None:
    """Run Prometheus over all nodes of the Ray cluster, until Ctrl-C. The cluster may start before or after it."""
    from rich.console import Console

    from branchline.orchestrator.telemetry import prometheus as server

    binary = server.find_prometheus(prometheus)
    place = folder or ray_folder / "branchline-prometheus"
    arguments = server.command(binary, place, ray_folder, host=host, port=port, scrape_s=scrape_s)
    console = Console(stderr=True)
    graph = f"http://{host}:{port}/graph?g0.expr=ray_branchline_pages&g0.tab=0"
    console.print(f"Prometheus: {graph}", highlight=False, soft_wrap=True)
    board = server.install_board(ray_folder)
    if board is None:
        where = "the board isn't installed: no cluster with a dashboard runs; `branchline metrics board FILE` writes it"
    else:
        config = board.parents[1] / "grafana.ini"
        where = f"the board is at {board}\nstart it: grafana server --config {config} --homepath /usr/share/grafana"
    console.print(f"Grafana: {where}", highlight=False, soft_wrap=True)
    server.replace_process(arguments)


@metrics.command()
def board(
    to: Annotated[Path | None, typer.Argument(help="File to write; default: standard output.")] = None,
) -> None:
    """Write the Grafana board as JSON, for import or provisioning."""
    from branchline.orchestrator.telemetry.board import board as made

    text = json.dumps(made(), indent=1) + "\n"
    if to is None:
        typer.echo(text, nl=False)
        return
    try:
        to.write_text(text)
    except OSError as err:
        raise ConfigError(f"can't write {to}: {err.strerror}", param="to") from err
