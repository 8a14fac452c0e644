"""Every metric that a replica exports, as data. Ray puts `ray_` before the names; no metric is tagged by branch or session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
PREFIX: Final = "branchline_"
QOS: Final = ("interactive", "standard", "batch")
LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTERVAL_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 4.0)
OVERHEAD_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without `ray_branchline_`, and without what Prometheus puts after it.
        tag: the name of its only tag, if it has one.
        boundaries: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    help: str
    tag: str | None = None
    boundaries: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus sees it."""
        full = f"ray_{PREFIX}{self.name}"
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(full + ending for ending in endings[self.kind])


METRICS: Final = (
    # Of the engine's counters.
    Metric("steps", "counter", "Steps of the engine: forward passes."),
    Metric("forks", "counter", "Branches that were forked off others."),
    Metric("copied_bytes", "counter", "K/V bytes that were copied for branches."),
    Metric("preemptions", "counter", "How often running work had to yield."),
    Metric("swapped_pages", "counter", "Pages that were copied out to swap space."),
    Metric("dropped", "counter", "Work that could no longer meet its deadline."),
    Metric("refused", "counter", "Work that a limit or the full queue refused."),
    Metric(
        "tokens",
        "counter",
        "Tokens: prefill and decode went through the model; cached were found in the prefix cache; recomputed are those of "
        "prefill that had been computed before.",
        "kind",
    ),
    Metric("engine_seconds", "counter", "Wall time of the engine thread: tensor, plan, python, idle.", "kind"),
    Metric("sessions", "gauge", "Open sessions."),
    Metric("branches", "gauge", "Branches that are not released."),
    Metric("running", "gauge", "Requests in the batch."),
    Metric("waiting", "gauge", "Requests that wait for a place in the batch, by class of service.", "qos"),
    Metric("pages", "gauge", "Pages of the K/V pool: free, shared, private or cached.", "state"),
    Metric("model_info", "gauge", "1: what is served.", "model"),
    # Of what a replica sees of its sessions.
    Metric("requests", "counter", "Generations that ended: stop, length, cancelled or failed.", "reason"),
    Metric("errors", "counter", "Errors that clients were told, by code.", "code"),
    Metric(
        "transport_seconds",
        "counter",
        "Seconds that went into reading commands and into handing events over to Ray, summed over the sessions.",
    ),
    Metric("first_token_seconds", "histogram", "From a request's arrival to its first token.", "qos", LATENCY_S),
    Metric("queue_seconds", "histogram", "From a request's arrival to its first step.", "qos", LATENCY_S),
    Metric(
        "request_seconds", "histogram", "From a request's arrival at the replica to its last token there.", "qos", LATENCY_S
    ),
    Metric(
        "request_tax_seconds",
        "histogram",
        "The part of request_seconds in which the engine did neither tensor work nor plan: the orchestration tax.",
        "qos",
        OVERHEAD_S,
    ),
    Metric(
        "token_interval_seconds",
        "histogram",
        "Time between two tokens of a branch; once for each step and session that streams.",
        None,
        INTERVAL_S,
    ),
    Metric("delivery_seconds", "histogram", "From the end of a step to when its events were handed over.", None, OVERHEAD_S),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
