"""`branchline bench schedule`: policies compared, the figures that it promises, the picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from branchline.engine.errors import ConfigError
from branchline.engine.scheduler.policies.find import policy_names
from branchline.load.bench import schedule
from branchline.load.measure import BenchmarkError
from branchline.load.simulate.compare import run_all, saturation_rate, with_policy
from branchline.load.simulate.plot import plot_comparison
from branchline.load.simulate.simulator import SimulatedEngine
from branchline.load.simulate.workloads import make_workload

NO_POLICY = "branchline.load.simulate.simulator:Simulator"


def compare(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    path = tmp_path / "result.json"
    defaults: dict[str, Any] = {"requests": 200, "loads": "1,2", "policies": "fcfs,fair", "workers": 1}
    schedule.run(**(defaults | settings), json=str(path))
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_policies_are_compared_at_loads(tmp_path: Path) -> None:
    result = compare(tmp_path)
    assert [(run["policy"], run["load"]) for run in result["runs"]] == [
        ("fcfs", 1.0), ("fcfs", 2.0), ("fair", 1.0), ("fair", 2.0),
    ]  # fmt: skip
    for run in result["runs"]:
        assert run["completed"] + run["refused"] + run["dropped"] == run["requests"] == 200
        assert run["starved"] == run["lost_pages"] == 0
        assert 0 <= run["hit_ratio"] <= 1
        assert 0 < run["itl_ms"]["p50"] <= run["itl_ms"]["p99"]
        assert run["duration_s"] >= 200 / result["saturation_requests_per_s"] / run["load"] * 0.9
    slow, fast = result["runs"][:2]
    assert fast["ttft_ms"]["p50"] > slow["ttft_ms"]["p50"]


def test_a_trace_is_replayed_as_recorded(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    rows = [f"2023-11-16 18:17:{second:02d},{200 + second},{1 + second}" for second in range(30)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    result = compare(tmp_path, trace=path, speed=2.0, requests=20)
    assert [run["load"] for run in result["runs"]] == [None, None]
    assert result["workload"] == "some"
    assert result["runs"][0]["completed"] == 20
    assert result["runs"][0]["duration_s"] > 19 / 2


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"policies": "fairest"}, "fairest"),
        ({"policies": NO_POLICY}, "no subclass"),
        ({"workload": "rain"}, "rain"),
        ({"loads": "1,x"}, "loads"),
        ({"loads": "0"}, "above 0"),
        ({"step_time": "1,2,3"}, "four numbers"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        compare(tmp_path, **settings)


def test_a_pool_in_which_nothing_fits_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="too small"):
        compare(tmp_path, pool_tokens=16)


def test_processes_make_no_difference() -> None:
    trace, engine = make_workload("bursts", 150), SimulatedEngine()
    rate = saturation_rate(trace, engine)
    alone, together = (run_all(trace, engine, ["fair"], [1.0, 3.0], rate=rate, workers=n) for n in (1, 2))
    assert alone == together
    assert with_policy(engine, "fcfs").scheduling.policy == "fcfs"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    trace, engine, path = make_workload("mixed", 150), SimulatedEngine(), tmp_path / "plot.png"
    runs = run_all(trace, engine, ["fcfs", "fair"], [1.0, 2.0], rate=2.0, workers=1)
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(BenchmarkError, match="matplotlib"):
            plot_comparison(runs, path, title="mixed")
        return
    for some in (runs, runs[::2]):
        plot_comparison(some, path, title="mixed")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
        path.unlink()


@pytest.mark.slow
def test_smoke_has_the_promised_figures_and_passes_its_bars(tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    schedule.run(only_smoke=True, json=str(path))
    result = json.loads(path.read_text())
    assert set(result) == {"goodput_ratio_2x", "lost_pages", "starved", "fairness_gap_tokens", "ttft_p99_ms"}
    assert set(result["ttft_p99_ms"]) == set(policy_names())
    assert result["goodput_ratio_2x"] >= 0.95
    assert result["lost_pages"] == result["starved"] == 0
