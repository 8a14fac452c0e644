"""`branchline bench memory`: what a served model takes beyond Ray itself, and how long an engine takes to its first token.

"Beyond Ray" is the resident memory of the application's replicas (engine and gateway) less that of as many replicas that do
nothing, in the same Ray. The engine's whole page pool is written before it is measured: its memory is taken as it is used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import psutil
import typer

from branchline.agents import connect
from branchline.engine.config import EngineConfig
from branchline.load.measure import BenchmarkError
from branchline.load.receipt import Line, emit, show
from branchline.orchestrator.app import start, stop
from branchline.orchestrator.config import ServeConfig

MB = 1e6
REPLICA = "ServeReplica"
BARE_APP = "bare"
STARTS = 3
POOL_TOKENS = 4096
FIRST_TOKEN = """
import queue, time
began = time.perf_counter()
from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.types import Context, Delta, Generate, SamplingParams, Text
engine = Engine.load(EngineConfig(pool_tokens={pool_tokens}))
events = queue.Queue()
session = engine.open_session(events.put)
engine.submit(session, [Context(0, Text("Once upon a time")), Generate(0, 0, SamplingParams(temperature=0, max_tokens=1))])
while not any(isinstance(event, Delta) for event in events.get(timeout=60)):
    pass
print(time.perf_counter() - began)
engine.close()
"""


def replicas() -> dict[str, dict[str, float]]:
    """MB of each Serve replica below this process, by its process title: resident, and proportional (what is shared with
    other processes counts in parts)."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        if REPLICA in title:
            memory = process.memory_full_info()
            found[f"{title} {process.pid}"] = {"rss_mb": memory.rss / MB, "pss_mb": memory.pss / MB}
    return found


def total(which: dict[str, dict[str, float]], kind: str) -> float:
    """Of all of them."""
    return sum(memory[kind] for memory in which.values())


def first_token_s(pool_tokens: int) -> float:
    """Of a fresh process, its imports included; the files are in the system's cache. Raises BenchmarkError."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN.format(pool_tokens=pool_tokens)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"the engine gave no token:\n{done.stderr}")
    return float(done.stdout)


async def fill(url: str, pool_tokens: int) -> int:
    """Write all pages but the last few. Returns how many are left free."""
    async with connect(url) as session:
        root = session.context([1000 + i % 30_000 for i in range(pool_tokens - 64)], pin=True)
        await root.ready()
        return (await session.stats()).pages_free


def measure(num_replicas: int, pool_tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Starts Ray twice, one after the other. Raises BenchmarkError, and what a start raises."""
    say("first token")
    firsts = sorted(first_token_s(pool_tokens) for _ in range(STARTS))
    say("replicas that do nothing")
    bare = _bare(num_replicas + 1)
    say("the served model")
    config = ServeConfig(
        port=_free_port(), num_replicas=num_replicas, dashboard=False, engine=EngineConfig(pool_tokens=pool_tokens)
    )
    running = start(config)
    try:
        free = asyncio.run(fill(running.base_url.removesuffix("/v1"), pool_tokens))
        time.sleep(1)  # until what the prefill took for itself is given back
        served = replicas()
    finally:
        stop(running)
    return {
        "pool_tokens": pool_tokens,
        "pages_free": free,
        "num_replicas": num_replicas,
        "first_token_s": firsts[len(firsts) // 2],
        "rss_beyond_ray_mb": total(served, "rss_mb") - total(bare, "rss_mb"),
        "pss_beyond_ray_mb": total(served, "pss_mb") - total(bare, "pss_mb"),
        "served": served,
        "bare": bare,
    }


def _bare(count: int) -> dict[str, dict[str, float]]:
    """As many replicas without contents, as the application has."""
    import ray
    from ray import serve

    async def answer(_: Any) -> str:
        return "ok"

    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": _free_port()})
        deployment: Any = serve.deployment(answer, name="Bare", num_replicas=count)
        serve.run(deployment.bind(), name=BARE_APP, route_prefix="/bare")
        return replicas()
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
    replicas: Annotated[int, typer.Option(help="Engines.", min=1)] = 1,
    pool_tokens: Annotated[int, typer.Option(help="Of each engine.", min=1024)] = POOL_TOKENS,
) -> None:
    """Resident memory of a served model beyond Ray, and seconds from a process's start to its first token."""
    results = measure(replicas, pool_tokens, lambda line: typer.echo(f"{line} …", err=True))
    if json is None:
        show(
            f"the default model, {pool_tokens} tokens of K/V, engines: {replicas}",
            [
                Line("resident beyond Ray", results["rss_beyond_ray_mb"], "MB", goal=400),
                Line("of it, shared memory in parts", results["pss_beyond_ray_mb"], "MB"),
                Line("process start to first token", results["first_token_s"], "s", goal=3),
            ],
        )
    emit("memory", results, json)


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
