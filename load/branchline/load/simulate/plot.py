"""The comparison of policies as a picture."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from branchline.load.measure import BenchmarkError
from branchline.load.simulate.compare import Run

# Okabe and Ito's colours: told apart by everybody.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"


def plot_comparison(runs: list[Run], path: Path, *, title: str) -> None:
    """Goodput, time to first token, fairness and waste, over the load or, where there is only one, policy by policy.

    Raises BenchmarkError if matplotlib isn't installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError("a plot needs matplotlib: pip install matplotlib (it comes with the extra 'dev')")
    importlib.import_module("matplotlib").use("agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    policies = list(dict.fromkeys(run.policy for run in runs))
    loads = list(dict.fromkeys(run.load for run in runs))
    panels = [
        ("Goodput", "tokens/s", [run.goodput for run in runs], False),
        (f"First token, {_urgent(runs)}, p99", "seconds", [_urgent_ttft(run) for run in runs], True),
        ("Between tokens, p99", "seconds", [_seconds(run.report["itl_ms"]["p99"]) for run in runs], False),
        ("Fairness gap between tenants", "tokens (input 1, output 2)", [_gap(run) for run in runs], False),
        ("Computed again", "% of prefill", [100 * run.report["wasted_share"] for run in runs], False),
        ("First token, all requests, p50", "seconds", [_seconds(run.report["ttft_ms"]["p50"]) for run in runs], True),
    ]
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.2), layout="constrained")
    figure.suptitle(f"Scheduling policies: {title}", x=0.01, ha="left", fontweight="bold")
    for axis, (name, unit, values, logarithmic) in zip(axes.flat, panels, strict=True):
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_ylabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.yaxis.set_major_formatter("{x:,g}")
        if len(loads) == 1:
            axis.bar(policies, values, color=_COLOURS[: len(policies)])
            axis.tick_params(axis="x", rotation=20)
            continue
        for i, policy in enumerate(policies):
            points = [(run.load, value) for run, value in zip(runs, values, strict=True) if run.policy == policy]
            style: dict[str, Any] = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
            axis.plot(*zip(*points, strict=True), label=policy, markersize=5, linewidth=1.6, **style)
        axis.axvline(1.0, color="#888888", linestyle=":", linewidth=1)
        axis.set_xlabel("load (1: what the engine can just do)")
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    if len(loads) > 1:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(policies), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _urgent(runs: list[Run]) -> str:
    return "interactive" if "interactive" in runs[0].report["ttft_ms_by_class"] else "all requests"


def _urgent_ttft(run: Run) -> float:
    by_class = run.report["ttft_ms_by_class"]
    return _seconds(by_class.get("interactive", run.report["ttft_ms"])["p99"])


def _gap(run: Run) -> float:
    return float(run.report["fairness_gap_tokens"])


def _seconds(milliseconds: float | None) -> float:
    return float("nan") if milliseconds is None else milliseconds / 1000
