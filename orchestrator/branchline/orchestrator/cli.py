"""The command line. Heavy modules are imported by the command that needs them: `--help` costs neither Ray nor torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from branchline.engine.config import DEFAULT_MODEL, SchedulingConfig
from branchline.engine.errors import BranchlineError, ConfigError
from branchline.orchestrator.telemetry.command import metrics

if TYPE_CHECKING:
    from branchline.orchestrator.app import Running
    from branchline.orchestrator.config import ServeConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
BAD_INPUT = 2
app.add_typer(metrics, name="metrics")


def main() -> None:
    """Entry point of `branchline`. An error of ours is one line and exit status 2."""
    try:
        app()
    except BranchlineError as err:
        _fail(err.message)


@app.callback()
def _branchline() -> None:
    """Branchline: one context, many branches. A language-model engine whose first-class operation is the fork."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="Built-in name, .gguf file, Hugging Face folder or repository id.")
    ] = DEFAULT_MODEL,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback only by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    replicas: Annotated[int, typer.Option(help="Engines, each with its own weights and page pool.")] = 1,
    pool_tokens: Annotated[int | None, typer.Option(help="Tokens that the K/V pool holds.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    attention: Annotated[str | None, typer.Option(help="Attention backend; auto takes the device's best.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Bound on a branch's tokens; default: the model's own.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most branches in one step.")] = None,
    max_step_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; default: all cores.")] = None,
    policy: Annotated[
        str, typer.Option(help="fair, priority, fcfs, deadline, shortest-remaining, or package.module:Class.")
    ] = SchedulingConfig().policy,
    itl_target_ms: Annotated[float | None, typer.Option(help="Time between tokens that prefill is held back for.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep released K/V until its pages are needed.")] = True,
    swap_bytes: Annotated[int, typer.Option(help="Host memory for K/V of work that yields; 0: none.")] = 0,
    tenant: Annotated[
        list[str] | None, typer.Option(help="NAME:weight=2,max_branches=…,max_pages=…,tokens_per_minute=…; repeatable.")
    ] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard.")] = True,
    dashboard_port: Annotated[int, typer.Option(help="The dashboard's port, on loopback.")] = 8265,
    log_format: Annotated[str, typer.Option(help="Of Serve's log files: text or json.")] = "text",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="A log line for each generation that ends.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what Ray and its workers log.")] = False,
) -> None:
    """Serve a model: OpenAI's API and the branch API over HTTP, and a Ray Serve application."""
    from branchline.orchestrator.config import ServeConfig

    engine = {
        "model": model, "served_name": served_name, "pool_tokens": pool_tokens, "dtype": dtype, "device": device,
        "attention": attention, "context_length": context_length, "max_batch": max_batch,
        "max_step_tokens": max_step_tokens, "threads": threads,
    }  # fmt: skip
    scheduling = {
        "policy": policy, "itl_target_ms": itl_target_ms, "prefix_cache": prefix_cache, "swap_bytes": swap_bytes,
        "tenants": dict(map(_tenant, tenant or ())),
    }  # fmt: skip
    config = ServeConfig.from_dict(
        {
            "host": host,
            "port": port,
            "num_replicas": replicas,
            "dashboard": dashboard,
            "dashboard_port": dashboard_port,
            "log_format": log_format,
            "log_requests": log_requests,
            "verbose": verbose,
            "engine": {name: value for name, value in engine.items() if value is not None} | {"scheduling": scheduling},
        }
    )
    _check_port(config)
    _check_model(config)
    _serve(config)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A running server; see `branchline serve`.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 512,
) -> None:
    """Chat in the terminal. The conversation is one branch that grows: nothing is computed twice."""
    import asyncio

    from branchline.orchestrator.chat import run_chat

    asyncio.run(run_chat(url, system=system, temperature=temperature, max_tokens=max_tokens))


@app.command()
def top(
    url: Annotated[str, typer.Option(help="A running server; see `branchline serve`.")] = "http://127.0.0.1:8000",
    period_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON a frame.")] = False,
) -> None:
    """Watch the replicas: tokens, batch, queue, pages, and where the time goes."""
    from branchline.orchestrator.top import run_top

    run_top(url, period_s=period_s, once=once, as_json=json)


@app.command()
def models() -> None:
    """List the built-in models and where they are."""
    from rich.console import Console
    from rich.table import Table

    from branchline.engine.model.resolve import BUILTIN_MODELS, resolve_model

    table = Table("name", "where", "MB")
    for name in BUILTIN_MODELS:
        try:
            path = resolve_model(name).path
            table.add_row(name, str(path), f"{path.stat().st_size / 1e6:.0f}")
        except BranchlineError as err:
            table.add_row(name, f"[yellow]{err.message}", "")
    console = Console()
    console.print(table)
    console.print("Besides: any .gguf file, Hugging Face folder, or repository id.", highlight=False)


@app.command()
def version() -> None:
    """Print the version."""
    try:
        typer.echo(importlib.metadata.version("branchline"))
    except importlib.metadata.PackageNotFoundError:
        typer.echo("unknown: the package isn't installed")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(
    context: typer.Context, name: Annotated[str | None, typer.Argument(help="Which one; none lists them.")] = None
) -> None:
    """Run a benchmark: `branchline bench`, `branchline bench NAME --help`."""
    from branchline.load import bench as package

    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.name.startswith("_"))
    if name is None or name.startswith("-"):
        typer.echo("benchmarks: " + (", ".join(names) or "none"))
        return
    if name not in names:
        raise ConfigError(f"no benchmark {name!r}: there are {', '.join(names) or 'none'}")
    module = importlib.import_module(f"{package.__name__}.{name}")
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(name)(module.run)
    command(args=context.args, prog_name=f"branchline bench {name}")


def _tenant(text: str) -> tuple[str, dict[str, float | int]]:
    """A tenant's name and settings from `NAME:key=number,…`."""
    name, _, rest = text.partition(":")
    settings: dict[str, float | int] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        try:
            settings[key] = float(value) if key == "weight" else int(value)
        except ValueError:
            raise ConfigError(f"--tenant {text!r}: expected NAME:key=number,…, {pair!r} isn't", param="tenant") from None
    return name, settings


def _fail(message: str) -> NoReturn:
    typer.secho(f"branchline: {message}", err=True, fg="red")
    raise SystemExit(BAD_INPUT)


def _check_port(config: ServeConfig) -> None:
    """Find out before Ray's seconds are spent. Raises ConfigError."""
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as err:
            reason = f"{config.host}:{config.port}: {err.strerror}"
            raise ConfigError(f"can't listen on {reason}; choose another with --port or --host", param="port") from err


def _check_model(config: ServeConfig) -> None:
    """Find out before Ray's seconds are spent. Raises ModelNotFoundError, CorruptModelError."""
    from branchline.engine.model.resolve import resolve_model

    resolve_model(config.engine.model)


def _serve(config: ServeConfig) -> None:
    from rich.console import Console

    from branchline.orchestrator.app import start, stop

    console = Console(stderr=True)
    status = console.status("starting")
    stopped = threading.Event()
    running: Running | None = None
    parts = 0

    def interrupt(number: int, _: Any) -> None:
        if stopped.is_set():  # asked twice: don't wait for the clean end
            sys.exit(128 + number)
        stopped.set()
        # A Ray that is half started leaves processes behind when it's stopped: then `say` ends the start, a part later.
        if running is None and parts > 1:
            raise KeyboardInterrupt

    def say(line: str) -> None:
        nonlocal parts
        parts += 1
        status.update(f"{line} …")
        if stopped.is_set():
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        with status:
            running = start(config, say)
    except KeyboardInterrupt:
        console.print("stopped before it was up")
        raise SystemExit(130) from None
    try:
        # Ray sets handlers of its own when it starts.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        console.print(_card(config, running))
        stopped.wait()
    finally:
        with console.status("stopping"):
            stop(running)
        console.print("stopped")


def _card(config: ServeConfig, running: Running) -> Any:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("model", config.engine.served_name or config.engine.model)
    table.add_row("OpenAI base_url", running.base_url)
    table.add_row("branch API", f"{running.base_url}/sessions")
    table.add_row("chat", f"branchline chat --url {running.base_url.removesuffix('/v1')}")
    if running.dashboard_url is not None:
        table.add_row("Ray dashboard", f"{running.dashboard_url}/#/serve  (asks for what `ray get-auth-token` prints)")
    table.add_row("stop", "Ctrl-C")
    return Panel(table, title="Branchline serves", expand=False)
