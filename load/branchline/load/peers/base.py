"""What the fan-out benchmark asks of each contestant, and the workload that all of them get."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 512  # tokens of a prefill step, on both sides
STEPS_RESERVED = 48  # tokens that each branch may grow by
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Branches below one prefix, in tokens. With `groups`, the branches of a group share `group_tail` more."""

    prefix: int
    branches: int
    tail: int = 0
    groups: int = 1
    group_tail: int = 0

    @property
    def name(self) -> str:
        """E.g. "2048x64", "2048x64+256", "2048+8x512x64"."""
        groups = f"+{self.groups}x{self.group_tail}" if self.group_tail else ""
        return f"{self.prefix}{groups}x{self.branches}" + (f"+{self.tail}" if self.tail else "")

    @property
    def num_tokens(self) -> int:
        """That must be kept at most, with room for the steps."""
        return self.prefix + self.groups * self.group_tail + self.branches * (self.tail + STEPS_RESERVED)


def tokens(count: int, seed: int) -> Tokens:
    """Random token ids below 40,000, the same for every contestant."""
    return np.random.default_rng(seed).integers(100, 40_000, count).astype(np.int32)


def activations(rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Standard normal inputs of a linear layer [rows, cols], the same for every contestant."""
    return np.random.default_rng(cols).standard_normal((rows, cols), dtype=np.float32)


PREFIX_SEED, GROUP_SEED, TAIL_SEED = 0, 1, 2


def clock_for(threads: int) -> Callable[[], float]:
    """One thread by processor time, which other work on the machine disturbs least; several by wall time."""
    return time.process_time if threads == 1 else time.perf_counter


class Contestant(ABC):
    """One engine with the default model, in a process of its own."""

    @abstractmethod
    def prefill(self, prefix: int) -> float:
        """Forget everything, compute the prefix. Returns the seconds."""

    @abstractmethod
    def branch(self, case: dict[str, Any]) -> dict[str, Any]:
        """Make the branches of a `Case` below the prefix that was computed last, forgetting those of the last call. Not timed.
        Returns what is worth knowing about how. Every branch holds K/V of its own for its tail."""

    @abstractmethod
    def step(self) -> float:
        """One token on every branch, and the likeliest next one of each. Returns the seconds."""

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Give back what the operating system wouldn't. Nothing by default."""
        return
