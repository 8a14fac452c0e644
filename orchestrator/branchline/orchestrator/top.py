"""`branchline top`: what the replicas do, live in the terminal, from GET /v1/stats."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from branchline.engine.errors import BranchlineError
from branchline.engine.types import EngineStats
from branchline.orchestrator.errors import ReplicaUnavailableError
from branchline.orchestrator.protocol import from_openai_error
from branchline.orchestrator.telemetry.states import pages_by_state, waiting_by_class

BAR_WIDTH: Final = 48
PAGE_COLOURS: Final = {"shared": "cyan", "private": "green", "cached": "yellow", "free": "bright_black"}
TIME_COLOURS: Final = {"tensor": "green", "plan": "magenta", "python": "red", "idle": "bright_black"}
TIMEOUT_S: Final = 10.0


class ReplicaStats(msgspec.Struct, frozen=True):
    """One entry of `GET /v1/stats?by=replica`."""

    replica: str
    stats: EngineStats


_decode: Final = msgspec.json.Decoder(list[ReplicaStats]).decode


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one replica did between two looks.

    Attributes:
        tokens_s, prefill_tokens_s: tokens a second that were generated; that were prefilled.
        batch: tokens of a step, on average.
        pages: by state.
        time: shares of the engine thread's time: tensor, plan, python, idle.
        tax: of the time in which it wasn't idle, the share that wasn't tensor work or plan. None: it was idle.
    """

    replica: str
    tokens_s: float
    prefill_tokens_s: float
    steps_s: float
    batch: float
    running: int
    waiting: dict[str, int] = field(default_factory=dict)
    sessions: int
    branches: int
    forks_s: float
    pages: dict[str, int] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)
    tax: float | None
    cached_tokens: int
    preemptions: int
    copied_bytes: int
    refused: int
    dropped: int


def row(replica: str, last: EngineStats, now: EngineStats, seconds: float) -> Row:
    """The row of a replica from two looks at its counters, so many seconds apart."""

    def grown(name: str) -> float:
        return float(getattr(now, name) - getattr(last, name))

    spent = {name: max(grown(f"{name}_s"), 0.0) for name in TIME_COLOURS}
    whole, busy = sum(spent.values()), spent["tensor"] + spent["plan"] + spent["python"]
    steps = grown("steps")
    return Row(
        replica=replica,
        tokens_s=grown("decode_tokens") / seconds,
        prefill_tokens_s=grown("prefill_tokens") / seconds,
        steps_s=steps / seconds,
        batch=(grown("decode_tokens") + grown("prefill_tokens")) / steps if steps else 0.0,
        running=now.running,
        waiting=waiting_by_class(now),
        sessions=now.sessions,
        branches=now.branches,
        forks_s=grown("forks") / seconds,
        pages=pages_by_state(now),
        time={name: share / whole if whole else 0.0 for name, share in spent.items()},
        tax=spent["python"] / busy if busy and steps else None,
        cached_tokens=now.cached_tokens,
        preemptions=now.preemptions,
        copied_bytes=now.copied_bytes,
        refused=now.refused,
        dropped=now.dropped,
    )


class Watcher:
    """Looks at a server again and again."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/stats?by=replica"
        self._http = http
        self._last: dict[str, EngineStats] = {}
        self._looked_at = 0.0
        self.look()

    def look(self) -> list[Row]:
        """One row a replica, of the time since the last look. Raises ReplicaUnavailableError when nothing answers, and what
        the server answered."""
        try:
            answer = self._http.get(self._url, timeout=TIMEOUT_S)
        except httpx.HTTPError as err:
            raise ReplicaUnavailableError(f"no server answers at {self._url}: {err}; is `branchline serve` running?") from err
        now = time.monotonic()
        if answer.is_error:
            raise _refusal(answer)
        try:
            replies = _decode(answer.content)
        except msgspec.MsgspecError as err:
            raise ReplicaUnavailableError(f"what answers at {self._url} isn't a Branchline gateway of this version") from err
        seconds, self._looked_at = now - self._looked_at, now
        rows = [row(reply.replica, self._last.get(reply.replica, reply.stats), reply.stats, seconds) for reply in replies]
        self._last = {reply.replica: reply.stats for reply in replies}
        return rows


def frame(rows: list[Row]) -> RenderableType:
    """One frame."""
    return Group(*(_panel(each) for each in rows))


def run_top(url: str, *, period_s: float, once: bool, as_json: bool) -> None:
    """Show frames until Ctrl-C; with `once`, one; as JSON, a line a frame. Raises like `Watcher.look`."""
    console = Console()
    with httpx.Client() as http:
        watcher = Watcher(url, http)
        if as_json or once:
            for rows in _looks(watcher, period_s, once=once):
                if as_json:
                    print(json.dumps([asdict(each) for each in rows]), flush=True)
                else:
                    console.print(frame(rows))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for rows in _looks(watcher, period_s, once=False):
                live.update(Group(frame(rows), Text(f"{url}   every {period_s:g} s   Ctrl-C ends", style="dim")), refresh=True)


def _looks(watcher: Watcher, period_s: float, *, once: bool) -> Iterator[list[Row]]:
    try:
        while True:
            time.sleep(period_s)
            yield watcher.look()
            if once:
                return
    except KeyboardInterrupt:
        return


def _refusal(answer: httpx.Response) -> BranchlineError:
    try:
        return from_openai_error(answer.json())
    except ValueError:
        return ReplicaUnavailableError(f"HTTP status {answer.status_code} from {answer.url}: {answer.text[:200]!r}")


def _panel(each: Row) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=7)
    table.add_column()
    table.add_row("tokens", _facts({"generated/s": each.tokens_s, "prefilled/s": each.prefill_tokens_s}))
    table.add_row("steps", _facts({"/s": each.steps_s, "tokens a step": each.batch, "in the batch": each.running}))
    table.add_row("queue", _facts(each.waiting))
    table.add_row("tree", _facts({"sessions": each.sessions, "branches": each.branches, "forks/s": each.forks_s}))
    table.add_row("pages", _bar(each.pages, PAGE_COLOURS))
    table.add_row("", _legend(each.pages, PAGE_COLOURS, "{:,.0f}"))
    table.add_row("time", _bar(each.time, TIME_COLOURS))
    table.add_row("", _legend({name: 100 * share for name, share in each.time.items()}, TIME_COLOURS, "{:.1f} %"))
    tax = "idle" if each.tax is None else f"{100 * each.tax:.2f} % of the busy time is neither tensor work nor plan"
    table.add_row("tax", Text(tax))
    totals = {"cached tokens": each.cached_tokens, "preemptions": each.preemptions, "refused": each.refused}
    totals |= {"dropped": each.dropped, "K/V bytes copied": each.copied_bytes}
    table.add_row("so far", _facts(totals))
    return Panel(table, title=f"replica {each.replica}", title_align="left", expand=False)


def _facts(values: dict[str, Any]) -> Text:
    text = Text()
    for name, value in values.items():
        number = f"{value:,.1f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"
        text.append(number, style="bold").append(f" {name}   ")
    return text


def _bar(values: dict[str, float] | dict[str, int], colours: dict[str, str]) -> Text:
    """Cells in proportion; what is there at all gets a cell."""
    whole = sum(values.values())
    text = Text()
    if not whole:
        return text.append("─" * BAR_WIDTH, style="bright_black")
    cells = {name: max(round(BAR_WIDTH * values[name] / whole), 1 if values[name] else 0) for name in colours}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += BAR_WIDTH - sum(cells.values())
    for name, colour in colours.items():
        text.append(("░" if colour == "bright_black" else "█") * cells[name], style=colour)
    return text


def _legend(values: dict[str, float] | dict[str, int], colours: dict[str, str], style: str) -> Text:
    text = Text()
    for name, colour in colours.items():
        text.append("■ ", style=colour).append(f"{name} {style.format(values[name])}   ")
    return text
