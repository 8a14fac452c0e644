"""How many compute threads an engine uses."""

from __future__ import annotations

import os

import torch


def available_cores() -> int:
    """Cores that this process may use (its affinity mask; cgroup quotas narrower than that aren't seen)."""
    return len(os.sched_getaffinity(0))


def set_compute_threads(threads: int | None) -> None:
    """Set torch's intra-op threads for this process; None: all available cores."""
    torch.set_num_threads(threads or available_cores())
