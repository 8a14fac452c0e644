"""A receipt: what was measured, on which machine, with which versions, as JSON. And the tables in the terminal."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, load, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "branchline": _version(),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("branchline")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def emit(name: str, results: dict[str, Any], to: str | None) -> None:
    """Write the results as one JSON object to a file, or to standard output for `-`; with None, a receipt with the machine's
    description goes to `receipts/`."""
    if to == "-":
        json.dump(results, sys.stdout)
        sys.stdout.write("\n")
        return
    if to is not None:
        Path(to).write_text(json.dumps(results, indent=2) + "\n")
        return
    now = datetime.datetime.now(datetime.UTC)
    folder = Path("receipts")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    receipt = {"benchmark": name, "time": now.isoformat(timespec="seconds"), "machine": machine(), "results": results}
    path.write_text(json.dumps(receipt, indent=2) + "\n")
    Console().print(f"receipt: {path}")


@dataclass(frozen=True)
class Line:
    """A line of a benchmark's table. `reference`: the compiled system's published figure on a GB10, in `unit`; `peers`: what
    other systems' own code took; both for reading side by side, not measured in this run."""

    what: str
    value: float
    unit: str
    reference: float | None = None
    goal: float | None = None
    peers: str = ""


def show(title: str, lines: list[Line]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for heading, justify in (
        ("measure", "left"),
        ("here", "right"),
        ("unit", "left"),
        ("goal", "right"),
        ("reference", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("times faster", justify="right")
    table.add_column("peers (facts page, another machine)")
    for line in lines:
        ratio = "" if line.reference is None else f"{line.reference / line.value:,.1f}"
        table.add_row(line.what, _number(line.value), line.unit, _number(line.goal), _number(line.reference), ratio, line.peers)
    Console().print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
