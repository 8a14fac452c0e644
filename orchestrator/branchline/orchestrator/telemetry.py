"""The engine's counters as Ray metrics: in the dashboard, and on every node's Prometheus endpoint as `ray_branchline_*`."""

from __future__ import annotations

from typing import Any

from ray.serve import metrics

from branchline.engine.types import EngineStats, ModelInfo

SECONDS = ("tensor", "plan", "python", "idle")


class EngineMetrics:
    """Serve metrics of one replica. Serve adds the tags application, deployment and replica; never tag by branch."""

    def __init__(self, model: ModelInfo) -> None:
        """Make the metrics. Only in a Serve replica."""
        self._counters = {
            "steps": metrics.Counter("branchline_steps", "Steps of the engine: forward passes."),
            "forks": metrics.Counter("branchline_forks", "Branches that were forked off others."),
            "copied_bytes": metrics.Counter("branchline_copied_bytes", "K/V bytes that were copied for branches."),
        }
        self._tokens = metrics.Counter("branchline_tokens", "Tokens that went through the model.", tag_keys=_keys("kind"))
        self._seconds = metrics.Counter("branchline_engine_seconds", "Wall time of the engine thread.", tag_keys=_keys("kind"))
        self._gauges = {
            "branches": metrics.Gauge("branchline_branches", "Branches that are not released."),
            "running": metrics.Gauge("branchline_running", "Requests in the batch."),
            "waiting": metrics.Gauge("branchline_waiting", "Requests that wait for a place in the batch."),
            "sessions": metrics.Gauge("branchline_sessions", "Open sessions."),
            "pages_free": metrics.Gauge("branchline_pages_free", "Free pages of the K/V pool."),
            "pages_total": metrics.Gauge("branchline_pages_total", "Pages of the K/V pool."),
        }
        info = metrics.Gauge(
            "branchline_model_info", "1: what is served.", tag_keys=_keys("model", "dtype", "attention", "device")
        )
        info.set(1, {"model": model.name, "dtype": model.dtype, "attention": model.attention, "device": model.device})
        self._last: EngineStats | None = None

    def update(self, stats: EngineStats) -> None:
        """Export the counters' growth since the last call and the gauges as they are. Cheap; not for every token."""
        last = self._last
        for name, counter in self._counters.items():
            _grow(counter, getattr(stats, name) - (getattr(last, name) if last else 0))
        for kind in ("prefill", "decode"):
            field = f"{kind}_tokens"
            _grow(self._tokens, getattr(stats, field) - (getattr(last, field) if last else 0), kind)
        for kind in SECONDS:
            field = f"{kind}_s"
            _grow(self._seconds, getattr(stats, field) - (getattr(last, field) if last else 0.0), kind)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        self._last = stats


def _grow(counter: metrics.Counter, by: float, kind: str | None = None) -> None:
    # Ray's counters refuse an increase by nothing.
    if by > 0:
        counter.inc(by, {"kind": kind} if kind else {})


def _keys(*names: str) -> Any:
    # Ray's annotation says a tuple of exactly one; any number is meant.
    return names
