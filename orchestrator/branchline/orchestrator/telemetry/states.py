"""An engine's counters, as parts of a whole: the queue by class of service, the pool's pages by state."""

from __future__ import annotations

from branchline.engine.types import EngineStats
from branchline.orchestrator.telemetry.catalogue import QOS


def waiting_by_class(stats: EngineStats) -> dict[str, int]:
    """The queue, by class of service."""
    standard = stats.waiting - stats.waiting_interactive - stats.waiting_batch
    return dict(zip(QOS, (stats.waiting_interactive, standard, stats.waiting_batch), strict=True))


def pages_by_state(stats: EngineStats) -> dict[str, int]:
    """All pages of the pool, each in one state. What is counted at different moments is cut to fit."""
    used = stats.pages_total - stats.pages_free
    cached = min(stats.pages_cached, used)
    private = min(stats.pages_private, used - cached)
    return {"free": stats.pages_free, "shared": used - cached - private, "private": private, "cached": cached}
