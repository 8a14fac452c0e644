"""A replica's metrics in Ray: in the dashboard, and on every node's Prometheus endpoint as `ray_branchline_*`."""

from __future__ import annotations

from typing import Any

from ray.serve import metrics

from branchline.engine.types import EngineStats, ModelInfo
from branchline.orchestrator.telemetry.catalogue import METRICS, PREFIX, Metric
from branchline.orchestrator.telemetry.recorder import Samples
from branchline.orchestrator.telemetry.states import pages_by_state, waiting_by_class

TOTALS = ("steps", "forks", "copied_bytes", "preemptions", "swapped_pages", "dropped", "refused")
TOKENS = ("prefill", "decode", "cached", "recomputed")
SECONDS = ("tensor", "plan", "python", "idle")
GAUGES = ("sessions", "branches", "running")


class ReplicaMetrics:
    """Serve's metrics of one replica. Serve adds the tags application, deployment and replica."""

    def __init__(self, model: ModelInfo) -> None:
        """Make the metrics. Only in a Serve replica."""
        self._metrics = {metric.name: _make(metric) for metric in METRICS}
        self._tags = {metric.name: metric.tag for metric in METRICS}
        self._totals: dict[tuple[str, str], float] = {}
        kind = f"{model.name} ({model.dtype}, {model.attention} attention, {model.device})"
        self._set("model_info", 1, kind)

    def update(self, stats: EngineStats, samples: Samples) -> None:
        """Export the counters' growth since the last call, the gauges as they are, and what was recorded. Once a period."""
        for name in TOTALS:
            self._grow_to(name, getattr(stats, name))
        for kind in TOKENS:
            self._grow_to("tokens", getattr(stats, f"{kind}_tokens"), kind)
        for kind in SECONDS:
            self._grow_to("engine_seconds", getattr(stats, f"{kind}_s"), kind)
        for name in GAUGES:
            self._set(name, getattr(stats, name))
        for name, values in (("waiting", waiting_by_class(stats)), ("pages", pages_by_state(stats))):
            for tag, count in values.items():
                self._set(name, count, tag)
        for (name, tag), by in samples.counted.items():
            self._grow(name, by, tag)
        for (name, tag), observed in samples.observed.items():
            histogram, tags = self._metrics[name], self._tagged(name, tag)
            for value in observed:
                histogram.observe(value, tags)

    def _grow_to(self, name: str, total: float, tag: str = "") -> None:
        last = self._totals.get((name, tag), 0.0)
        self._totals[name, tag] = total
        self._grow(name, total - last, tag)

    def _grow(self, name: str, by: float, tag: str = "") -> None:
        # Ray's counters refuse an increase by nothing.
        if by > 0:
            self._metrics[name].inc(by, self._tagged(name, tag))

    def _set(self, name: str, value: float, tag: str = "") -> None:
        self._metrics[name].set(value, self._tagged(name, tag))

    def _tagged(self, name: str, tag: str) -> dict[str, str]:
        key = self._tags[name]
        return {} if key is None else {key: tag}


def _make(metric: Metric) -> Any:
    name, keys = PREFIX + metric.name, (metric.tag,) if metric.tag else None
    if metric.kind == "counter":
        return metrics.Counter(name, metric.help, tag_keys=keys)
    if metric.kind == "gauge":
        return metrics.Gauge(name, metric.help, tag_keys=keys)
    return metrics.Histogram(name, metric.help, boundaries=list(metric.boundaries), tag_keys=keys)
