"""Policies beside each other, at loads up to several times what the engine can do."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from branchline.load.measure import BenchmarkError
from branchline.load.simulate.outcome import Fate, Outcome
from branchline.load.simulate.report import goodput_under_load, summarize
from branchline.load.simulate.simulator import SimulatedEngine, Simulator
from branchline.load.simulate.trace import Trace

# Arrivals so close that the engine is never without work.
_AT_ONCE = 1e6
_COUNTED = 0.95


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one load. `load`: arrivals over what the engine completes when it always has work; None: as recorded."""

    policy: str
    load: float | None
    report: dict[str, Any]
    goodput: float


def with_policy(engine: SimulatedEngine, policy: str) -> SimulatedEngine:
    """The same engine under another policy."""
    return replace(engine, scheduling=msgspec.structs.replace(engine.scheduling, policy=policy))


def saturation_rate(trace: Trace, engine: SimulatedEngine) -> float:
    """Requests a second that the engine completes when all of them wait from the beginning and none is refused, by `fcfs`. The
    last ones, which no longer fill the engine, aren't counted."""
    patient = replace(with_policy(engine, "fcfs"), max_waiting=len(trace) + 1)
    outcome = Simulator(trace.faster(_AT_ONCE), patient).run()
    ends = np.sort(outcome.ended_s[outcome.fate == Fate.COMPLETED])
    if not len(ends):
        raise BenchmarkError(f"none of the {len(trace)} requests of {trace.name} could be completed: is the pool too small?")
    last = int(_COUNTED * (len(ends) - 1))
    return float((last + 1) / ends[last])


def run_all(
    trace: Trace, engine: SimulatedEngine, policies: list[str], loads: list[float | None], *, rate: float, workers: int
) -> list[Run]:
    """Every policy at every load, in the order of the policies, then of the loads. `rate`: what load 1 is, in requests a
    second. Runs in `workers` processes."""
    cases = [(trace, engine, policy, load, rate) for policy in policies for load in loads]
    if workers == 1:
        return [_run(case) for case in cases]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_run, cases))


def simulate(trace: Trace, engine: SimulatedEngine) -> Outcome:
    """One run."""
    return Simulator(trace, engine).run()


def _run(case: tuple[Trace, SimulatedEngine, str, float | None, float]) -> Run:
    trace, engine, policy, load, rate = case
    arrivals = trace if load is None else trace.at_rate(load * rate)
    outcome = simulate(arrivals, with_policy(engine, policy))
    return Run(policy, load, summarize(outcome), goodput_under_load(outcome))
