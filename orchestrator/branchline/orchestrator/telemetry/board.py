"""The Grafana board, as panel definitions. Ray's Grafana provisioning loads every JSON file of its dashboards folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from branchline.orchestrator.telemetry.catalogue import BY_NAME

UID: Final = "branchline"
FILE_NAME: Final = "branchline_grafana_dashboard.json"
WINDOW: Final = "$__rate_interval"
SELECT: Final = '{replica=~"$Replica"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """A graph: queries with their legends. `unit` is Grafana's name; `stacked` areas add up."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    help: str = ""


def rate(name: str, by: str = "", ending: str = "") -> str:
    """Growth a second of a counter (or of a histogram's sum or count), added up over replicas."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped}(rate({_series(name, ending or 'total')}{SELECT}[{WINDOW}]))"


def level(name: str, by: str = "") -> str:
    """A gauge, added up over replicas."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped}({_series(name, '')}{SELECT})"


def quantile(q: float, name: str, by: str = "") -> str:
    """A histogram's quantile over the window."""
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, sum by ({keys}) (rate({_series(name, 'bucket')}{SELECT}[{WINDOW}])))"


def _series(name: str, ending: str) -> str:
    wanted = f"ray_branchline_{name}" + (f"_{ending}" if ending else "")
    if wanted not in BY_NAME[name].series:
        raise ValueError(f"{wanted}: {name} has {', '.join(BY_NAME[name].series)}")
    return wanted


def _latencies(title: str, name: str, help: str = "") -> Panel:
    by, legend = ("qos", " {{qos}}") if BY_NAME[name].tag == "qos" else ("", "")
    queries = tuple((quantile(q, name, by), f"p{100 * q:g}{legend}") for q in (0.5, 0.95, 0.99))
    return Panel(title, "s", queries, help=help or BY_NAME[name].help)


ROWS: Final = (
    (
        "What clients feel",
        (
            _latencies("Time to first token", "first_token_seconds"),
            _latencies("Time between tokens", "token_interval_seconds"),
            _latencies("Time in the queue", "queue_seconds"),
            Panel("Requests that ended, a second", "reqps", ((rate("requests", "reason"), "{{reason}}"),), stacked=True),
            Panel("Errors told to clients, a second", "reqps", ((rate("errors", "code"), "{{code}}"),), stacked=True),
            _latencies("Whole request", "request_seconds"),
        ),
    ),
    (
        "Work",
        (
            Panel("Tokens a second", "short", ((rate("tokens", "kind"), "{{kind}}"),)),
            Panel("Batch and queue", "short", ((level("running"), "running"), (level("waiting", "qos"), "waiting, {{qos}}"))),
            Panel("Tokens of a step", "short", ((f"{rate('tokens')} / {rate('steps')}", "tokens a step"),)),
            Panel(
                "Yielded, dropped, refused, a second",
                "short",
                tuple((rate(name), name) for name in ("preemptions", "dropped", "refused")),
            ),
            Panel("Branches and sessions", "short", ((level("branches"), "branches"), (level("sessions"), "sessions"))),
            Panel("Forks a second", "short", ((rate("forks"), "forks"),)),
        ),
    ),
    (
        "Memory",
        (
            Panel("Pages of the pool", "short", ((level("pages", "state"), "{{state}}"),), stacked=True),
            Panel("K/V bytes copied a second", "Bps", ((rate("copied_bytes"), "copied"),)),
            Panel("Pages swapped out a second", "short", ((rate("swapped_pages"), "pages"),)),
        ),
    ),
    (
        "Orchestration tax",
        (
            Panel("The engine thread's time", "percentunit", ((rate("engine_seconds", "kind"), "{{kind}}"),), stacked=True),
            Panel(
                "Share of a request's time without tensor work or plan",
                "percentunit",
                ((f"{rate('request_tax_seconds', ending='sum')} / {rate('request_seconds', ending='sum')}", "tax"),),
            ),
            Panel(
                "Seconds of a step",
                "s",
                (
                    (f"{rate('engine_seconds', 'kind')} / ignoring(kind) group_left() {rate('steps')}", "{{kind}}"),
                    (f"{rate('transport_seconds')} / {rate('steps')}", "transport"),
                ),
            ),
            _latencies("Tax of a request", "request_tax_seconds"),
            Panel("Transport of a request", "s", ((f"{rate('transport_seconds')} / {rate('requests')}", "transport"),)),
            _latencies("Delivery of a step", "delivery_seconds"),
        ),
    ),
)


def board() -> dict[str, Any]:
    """The board as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        y += 1
        for i, panel in enumerate(row):
            place = {"x": WIDTH * (i % COLUMNS), "y": y + HEIGHT * (i // COLUMNS), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel) | {"gridPos": place})
        y += HEIGHT * -(-len(row) // COLUMNS)
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": UID,
        "title": "Branchline",
        "tags": ["branchline", "ray"],
        "timezone": "browser",
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [_datasource(), _replica()]},
        "panels": panels,
    }


def expressions() -> list[str]:
    """All queries of the board."""
    return [expression for _, row in ROWS for panel in row for expression, _ in panel.queries]


def series() -> set[str]:
    """All series that the board asks for."""
    return {name for expression in expressions() for name in re.findall(r"ray_branchline_\w+", expression)}


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 60 if panel.stacked else 8, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2, "refresh": 1}


def _replica() -> dict[str, Any]:
    query = f"label_values({_series('branches', '')}, replica)"
    return {
        "name": "Replica",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": "replicas"},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
