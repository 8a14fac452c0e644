"""How the benchmarks time things: many repetitions, the median, each case in a fresh process."""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Case = Callable[[], dict[str, Any]]


class BenchmarkError(RuntimeError):
    """A case's process failed; the text is what it wrote."""


@contextmanager
def quiet() -> Iterator[None]:
    """One core, no garbage collection."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)


def median_ns(
    timed: Callable[[Any], Any], *, before: Callable[[], Any] = lambda: None, repetitions: int, warm_up: int = 3
) -> float:
    """Median time of `timed(before())`, in ns; `before` isn't timed. A timer pair's own 30 to 90 ns are included: let `timed`
    do enough."""
    times = []
    for i in range(warm_up + repetitions):
        prepared = before()
        start = perf_counter_ns()
        timed(prepared)
        end = perf_counter_ns()
        if i >= warm_up:
            times.append(end - start)
    return statistics.median(times)


def run_case(module: str, case: str) -> dict[str, Any]:
    """Run function `case` of `module` in a fresh process. Raises BenchmarkError."""
    done = subprocess.run([sys.executable, "-m", __name__, module, case], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{module}.{case} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_cases(module: str, cases: list[Case]) -> dict[str, Any]:
    """The cases' results together."""
    results: dict[str, Any] = {}
    for case in cases:
        results |= run_case(module, case.__name__)
    return results


def _main(module: str, case: str) -> None:
    with quiet():
        json.dump(getattr(importlib.import_module(module), case)(), sys.stdout)


if __name__ == "__main__":
    _main(*sys.argv[1:])
