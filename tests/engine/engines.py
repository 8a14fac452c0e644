"""Engines on the tiny model for tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine

COMPUTED: dict[str, dict[str, Any]] = {
    "native": {"compute": "native"},
    "cpu": {"compute": "torch", "attention": "cpu"},
    "reference": {"compute": "torch", "attention": "reference"},
}


def load(model: Path, *, scheduling: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """An engine with room for much; settings change it."""
    base: dict[str, Any] = {
        "model": str(model),
        "pool_tokens": 8192,
        "max_batch": 128,
        "max_step_tokens": 256,
        "threads": 1,
        "deterministic_seed": 7,
        "scheduling": scheduling or {},
    }
    return Engine.load(EngineConfig.from_dict(base | settings))


def assert_empty(engine: Engine) -> None:
    """All branches are gone, all pages are free or cached, and the invariants hold."""
    deadline = time.monotonic() + 10
    while engine.stats().sessions and time.monotonic() < deadline:
        time.sleep(0.005)
    engine.check()
    stats = engine.stats()
    assert (stats.branches, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
