"""`branchline bench schedule`: the policies beside each other, on the simulator."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from branchline.engine.config import DEFAULT_MODEL, SchedulingConfig
from branchline.engine.errors import ConfigError
from branchline.engine.scheduler.policies.find import find_policy, policy_names
from branchline.load.receipt import emit
from branchline.load.simulate.calibrate import calibrate
from branchline.load.simulate.compare import Run, run_all, saturation_rate
from branchline.load.simulate.files import read_trace
from branchline.load.simulate.plot import plot_comparison
from branchline.load.simulate.simulator import SimulatedEngine
from branchline.load.simulate.step_time import StepTime
from branchline.load.simulate.trace import Trace
from branchline.load.simulate.workloads import make_workload, workload_names

LOADS = "0.5,0.8,1,1.5,2,3,4"
SATURATION_REQUESTS = 3000
# Goodput is taken while requests arrive: with few of them the time in which the engine fills would weigh too much.
SMOKE_STEADY_REQUESTS, SMOKE_MIXED_REQUESTS = 6000, 2000


def smoke(workers: int) -> dict[str, Any]:
    """The few figures by which a change of the scheduler is judged: twice the load that the engine can do, all policies."""
    engine = SimulatedEngine()
    steady = make_workload("poisson", SMOKE_STEADY_REQUESTS)
    rate = saturation_rate(steady, engine)
    policy = engine.scheduling.policy
    saturated, doubled = run_all(steady, engine, [policy], [1.0, 2.0], rate=rate, workers=workers)
    mix = make_workload("mixed", SMOKE_MIXED_REQUESTS)
    runs = run_all(mix, engine, policy_names(), [2.0], rate=saturation_rate(mix, engine), workers=workers)
    reports = [run.report for run in (saturated, doubled, *runs)]
    # At load 1 the engine now and then lacks work; what it does when it always has some is the stricter measure.
    most = max(saturated.goodput, rate * float(steady.output_tokens.mean()))
    return {
        "goodput_ratio_2x": doubled.goodput / most,
        "lost_pages": sum(report["lost_pages"] for report in reports),
        "starved": sum(report["starved"] for report in reports),
        "fairness_gap_tokens": next(run.report["fairness_gap_tokens"] for run in runs if run.policy == policy),
        "ttft_p99_ms": {run.policy: run.report["ttft_ms"]["p99"] for run in runs},
    }


def run(
    workload: Annotated[str, typer.Option(help=f"What arrives: {', '.join(workload_names())}.")] = "mixed",
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead: Mooncake's JSON lines or Azure's CSV.")] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply the trace's lengths with this.")] = 1.0,
    speed: Annotated[float | None, typer.Option(help="Replay as recorded, so many times as fast, instead of at loads.")] = None,
    requests: Annotated[int, typer.Option(help="How many; of a trace: at most, from its beginning.")] = 4000,
    seed: Annotated[int, typer.Option(help="Of the made-up workload.")] = 0,
    policies: Annotated[str, typer.Option(help="Separated by commas; a name or package.module:Class.")] = "all",
    loads: Annotated[str, typer.Option(help="Separated by commas; 1 is what the engine can just do.")] = LOADS,
    pool_tokens: Annotated[int, typer.Option(help="Of the K/V pool.")] = 32768,
    max_batch: Annotated[int, typer.Option(help="Most branches in a step.")] = 512,
    max_step_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Most requests that may wait.")] = 4096,
    itl_target_ms: Annotated[float | None, typer.Option(help="Time between tokens to hold.")] = None,
    step_time: Annotated[
        str | None, typer.Option(help="Seconds a step, a decode row, a prefill token, a K/V token read: four numbers.")
    ] = None,
    measure: Annotated[bool, typer.Option("--calibrate", help="Measure these four on the native engine first.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison to this PNG (needs matplotlib).")] = None,
    workers: Annotated[int, typer.Option(help="Processes.")] = len(os.sched_getaffinity(0)),
    only_smoke: Annotated[bool, typer.Option("--smoke", help="A few figures in under a minute, instead.")] = False,
    json: Annotated[str | None, typer.Option(help="Write one JSON object to this file; - is standard output.")] = None,
) -> None:
    """Compare scheduling policies: the engine's own scheduler and core, on a virtual clock."""
    if only_smoke:
        results = smoke(workers)
        if json is None:
            Console().print(results)
        emit("schedule-smoke", results, json)
        return
    began = perf_counter()
    times = _step_time(step_time)
    results = {}
    if measure:
        found = calibrate(DEFAULT_MODEL)
        times, results["calibration"] = found.step_time, asdict(found)
    engine = SimulatedEngine(
        num_pages=max(pool_tokens // 16, 1),
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_waiting=max_waiting,
        scheduling=SchedulingConfig(itl_target_ms=itl_target_ms).validate(),
        step_time=times,
    )
    arrivals = _arrivals(workload, trace, length_scale, requests, seed)
    chosen = policy_names() if policies == "all" else policies.split(",")
    for policy in chosen:
        find_policy(SchedulingConfig(policy=policy))
    rate = 0.0
    steps: list[float | None]
    if speed is None:
        steps = list(_numbers("loads", loads))
        rate = saturation_rate(arrivals.first(SATURATION_REQUESTS), engine)
    else:
        steps, arrivals = [None], arrivals.faster(speed)
    runs = run_all(arrivals, engine, chosen, steps, rate=rate, workers=workers)
    results |= {
        "workload": arrivals.name,
        "requests": len(arrivals),
        "saturation_requests_per_s": rate or None,
        "step_time": asdict(times),
        "runs": [{"policy": r.policy, "load": r.load, "goodput_under_load": r.goodput, **r.report} for r in runs],
        "wall_s": perf_counter() - began,
    }
    if json is None:
        _show(runs, f"{arrivals.name}: {len(arrivals):,} requests a run, {results['wall_s']:.0f} s in all")
    if plot is not None:
        plot_comparison(runs, plot, title=f"{arrivals.name}, {len(arrivals):,} requests")
    emit("schedule", results, json)


def _arrivals(workload: str, trace: Path | None, length_scale: float, requests: int, seed: int) -> Trace:
    if trace is None:
        return make_workload(workload, requests, seed=seed)
    return read_trace(trace, length_scale=length_scale).first(requests)


def _step_time(text: str | None) -> StepTime:
    if text is None:
        return StepTime()
    numbers = _numbers("step_time", text)
    if len(numbers) != 4:
        raise ConfigError(f"step_time = {text!r}: expected four numbers, separated by commas", param="step_time")
    base, row, token, read = numbers
    return StepTime(base_s=base, per_row_s=row, per_token_s=token, per_read_s=read)


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as err:
        raise ConfigError(f"{name} = {text!r}: {err}", param=name) from err
    if min(numbers) <= 0:
        raise ConfigError(f"{name} = {text!r}: expected numbers above 0", param=name)
    return numbers


def _show(runs: list[Run], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("policy", "load", "goodput", "hits (unlimited)", "first token p50 / p99", "between tokens p50 / p99"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for heading in ("fairness gap", "preemptions", "wasted", "refused", "starved"):
        table.add_column(heading, justify="right")
    for run in runs:
        report = run.report
        table.add_row(
            run.policy,
            "recorded" if run.load is None else f"{run.load:g}",
            f"{run.goodput:,.0f} tok/s",
            f"{report['hit_ratio']:.1%} ({report['hit_ratio_unlimited']:.1%})",
            _times(report["ttft_ms"]),
            _times(report["itl_ms"]),
            f"{report['fairness_gap_tokens']:,.0f} tok",
            f"{report['preemptions']:,}",
            f"{report['wasted_share']:.1%}",
            f"{report['refused']:,}",
            f"{report['starved']:,}",
        )
    Console().print(table)


def _times(percentiles: dict[str, float | None]) -> str:
    p50, p99 = percentiles["p50"], percentiles["p99"]
    return "–" if p50 is None or p99 is None else f"{p50 / 1000:,.2f} / {p99 / 1000:,.2f} s"


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
