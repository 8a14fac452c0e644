"""The simulator: its clock, its counts, and what it shows of the scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.scheduler.policies.find import policy_names
from branchline.engine.types import Service
from branchline.load.simulate.outcome import Fate, Outcome
from branchline.load.simulate.report import summarize
from branchline.load.simulate.simulator import SimulatedEngine, Simulator
from branchline.load.simulate.step_time import StepTime
from branchline.load.simulate.trace import NO_PARENT, Trace, make_trace
from branchline.load.simulate.workloads import make_workload, workload_names

SMALL = SimulatedEngine(num_pages=256, max_batch=32, max_step_tokens=128)
# What a step takes is its tokens, in seconds, and one more.
PLAIN = StepTime(base_s=1.0, per_row_s=1.0, per_token_s=1.0, per_read_s=0.0)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def run(trace: Trace, engine: SimulatedEngine = SMALL) -> Outcome:
    return Simulator(trace, engine).run()


def one(prompt: int, output: int, **settings: object) -> Trace:
    return make_trace(
        "one",
        arrival_s=np.zeros(1),
        prompt_tokens=ints(prompt),
        output_tokens=ints(output),
        **settings,  # type: ignore[arg-type]
    )


def test_the_clock_of_a_request_that_is_alone() -> None:
    outcome = run(one(300, 4), replace(SMALL, step_time=PLAIN))
    # Three chunks of at most 128 tokens, the last of which gives the first token; then a token a step.
    assert outcome.steps == 3 + 3
    assert outcome.first_s.tolist() == [3 + 300.0]
    assert outcome.ended_s.tolist() == [303 + 3 * 2.0]
    assert np.concatenate(outcome.gaps_s).tolist() == [2.0, 2.0, 2.0]
    assert outcome.generated.tolist() == [4]
    assert outcome.computed_tokens == 300
    assert outcome.duration_s == 309.0


def test_k_v_that_is_read_takes_time() -> None:
    outcome = run(one(10, 3), replace(SMALL, step_time=StepTime(base_s=0.0, per_row_s=0.0, per_token_s=0.0, per_read_s=1.0)))
    # 1 + … + 10 of the prompt, then the two tokens' own and all before them.
    assert outcome.first_s.tolist() == [55.0]
    assert outcome.duration_s == 55.0 + 11 + 12


def test_a_branch_starts_where_its_parent_ended_and_computes_only_its_own() -> None:
    trace = make_trace(
        "family",
        arrival_s=np.zeros(4),
        prompt_tokens=ints(101, 10, 10, 10),
        output_tokens=ints(0, 2, 2, 2),
        parent=ints(NO_PARENT, 0, 0, 0),
    )
    outcome = run(trace, replace(SMALL, step_time=PLAIN))
    # All but the context's last token; then that one and ten more for each branch.
    assert outcome.computed_tokens == 100 + 3 * 11
    assert outcome.ended_s[0] == outcome.arrived_s[1] == 101.0
    assert outcome.first_s[1:].tolist() == [101.0 + 1 + 33] * 3
    assert outcome.count(Fate.COMPLETED) == 4
    assert outcome.lost_pages == 0


def test_a_prompt_that_was_there_is_found() -> None:
    blocks = [np.arange(10)] * 2
    trace = make_trace(
        "twice",
        arrival_s=np.array([0.0, 1e6]),
        prompt_tokens=ints(160, 160),
        output_tokens=ints(2, 2),
        blocks=blocks,
    )
    outcome = run(trace)
    assert outcome.cached_tokens == trace.unlimited_hits() == 159
    assert outcome.computed_tokens == 160  # the one that is left needs no prefill: it is a decode row


def test_what_does_not_fit_is_refused_and_what_can_not_wait_too() -> None:
    assert run(one(300 * 16, 1)).count(Fate.REFUSED) == 1
    crowd = make_trace("crowd", arrival_s=np.zeros(50), prompt_tokens=np.full(50, 8), output_tokens=np.full(50, 4))
    outcome = run(crowd, replace(SMALL, max_waiting=20))
    assert outcome.count(Fate.REFUSED) == 30
    assert outcome.count(Fate.COMPLETED) == 20


def test_children_of_a_refused_context_are_refused() -> None:
    trace = make_trace(
        "orphans",
        arrival_s=np.zeros(3),
        prompt_tokens=ints(300 * 16, 4, 4),
        output_tokens=ints(0, 2, 2),
        parent=ints(NO_PARENT, 0, 0),
    )
    assert run(trace).count(Fate.REFUSED) == 3


@pytest.mark.parametrize("cancel_s", [0.0, 0.005, 0.1, 0.5])
def test_a_cancelled_request_gives_all_back(cancel_s: float) -> None:
    trace = make_trace(
        "cancelled",
        arrival_s=np.zeros(40),
        prompt_tokens=np.full(40, 100),
        output_tokens=np.full(40, 50),
        cancel_s=np.full(40, cancel_s),
    )
    simulator = Simulator(trace, SMALL)
    while simulator.step():
        simulator.tree.check()
    outcome = simulator.finish()
    assert outcome.count(Fate.CANCELLED) == 40
    assert simulator.tree.num_branches == 0
    assert outcome.lost_pages == 0


def test_a_context_goes_on_when_all_that_waited_for_it_were_cancelled() -> None:
    trace = make_trace(
        "childless",
        arrival_s=np.zeros(3),
        prompt_tokens=ints(400, 4, 4),
        output_tokens=ints(0, 2, 2),
        parent=ints(NO_PARENT, 0, 0),
        cancel_s=np.array([np.inf, 150.0, 150.0]),
    )
    outcome = run(trace, replace(SMALL, step_time=PLAIN))
    assert outcome.fate.tolist() == [Fate.COMPLETED, Fate.CANCELLED, Fate.CANCELLED]
    assert outcome.computed_tokens == 399
    assert outcome.lost_pages == 0


def test_deadlines_that_can_not_be_met_are_dropped() -> None:
    trace = one(100, 50, services=(Service(deadline_ms=5000),))
    assert run(trace, replace(SMALL, step_time=PLAIN)).count(Fate.DROPPED) == 1
    assert run(trace).count(Fate.COMPLETED) == 1


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("name", workload_names())
def test_the_same_trace_gives_the_same_schedule(name: str, policy: str) -> None:
    trace = make_workload(name, 250).at_rate(6.0)
    engine = replace(SMALL, num_pages=512, scheduling=SchedulingConfig(policy=policy))
    outcome, again = run(trace, engine), run(trace, engine)
    assert outcome.digest() == again.digest()
    assert summarize(outcome) == summarize(again)
    assert not np.isnan(outcome.ended_s).any()
    done = outcome.fate == Fate.COMPLETED
    assert (outcome.generated[done] == trace.output_tokens[done]).all()
    assert outcome.lost_pages == 0
    # Every token of the prompts is computed, found or inherited, and what is lost is computed again; but a context's last
    # token is left to its children.
    assert outcome.computed_tokens + outcome.cached_tokens >= int(trace.prompt_tokens[done].sum()) - len(trace)


def test_another_trace_gives_another_schedule() -> None:
    digests = {run(make_workload("poisson", 50, seed=seed)).digest() for seed in range(3)}
    assert len(digests) == 3


def test_a_fan_out_of_500_delays_another_tenant_by_a_step_and_a_chunk() -> None:
    """Under `fair`. The engine is full of the fan-out's branches, and more of them wait, when the other tenant comes."""
    branches = 500
    engine = SimulatedEngine(num_pages=2048, max_batch=256, max_step_tokens=256)
    arrivals = np.concatenate((np.zeros(1 + branches), [8.0, 8.3, 12.0]))
    trace = make_trace(
        "fan-out",
        arrival_s=arrivals,
        prompt_tokens=np.concatenate(([512], np.full(branches, 24), [40, 40, 40])),
        output_tokens=np.concatenate(([0], np.full(branches, 80), [8, 8, 8])),
        tenant=np.concatenate((np.zeros(1 + branches, np.int64), [1, 1, 1])),
        tenants=("storm", "person"),
        service=np.concatenate((np.zeros(1 + branches, np.int64), [1, 1, 1])),
        services=(Service(), Service(qos="interactive")),
        parent=np.concatenate(([NO_PARENT], np.zeros(branches, np.int64), [NO_PARENT] * 3)),
    )
    simulator = Simulator(trace, engine)
    ends = []
    crowded = False
    while simulator.step():
        ends.append(simulator.now)
        if simulator.now < 8.0:
            crowded = simulator.scheduler.num_waiting > 200 and simulator.scheduler.num_running > 100
    assert crowded
    outcome = simulator.finish()
    for request in range(1 + branches, len(trace)):
        arrived, first = outcome.arrived_s[request], outcome.first_s[request]
        # The step under way when it came, then the one that computes its chunk and samples.
        assert sum(arrived < end <= first for end in ends) <= 2
    assert outcome.count(Fate.COMPLETED) == len(trace)


def test_weights_share_the_service_while_both_wait() -> None:
    count = 600
    trace = make_trace(
        "weights",
        arrival_s=np.zeros(count),
        prompt_tokens=np.full(count, 32),
        output_tokens=np.full(count, 32),
        tenant=np.arange(count) % 2,
        tenants=("one", "three"),
    )
    config = SchedulingConfig(policy="fair", tenants={"three": TenantConfig(weight=3.0)})
    outcome = run(trace, replace(SMALL, scheduling=config))
    first_half = outcome.ended_s < np.quantile(outcome.ended_s, 0.5)
    of_three = np.count_nonzero(first_half & (trace.tenant == 1)) / np.count_nonzero(first_half)
    assert of_three == pytest.approx(0.75, abs=0.05)
    # Sheng et al.: twice the larger of a request's input and what the batch holds.
    assert outcome.fairness_gap <= 2 * 2 * SMALL.num_pages * SMALL.page_tokens
    unfair = run(trace, replace(SMALL, scheduling=SchedulingConfig(policy="fcfs", tenants=config.tenants)))
    assert unfair.fairness_gap > 2 * outcome.fairness_gap


def test_urgent_work_does_not_starve_the_rest() -> None:
    """Interactive requests keep coming, twice as many as can be served; those of the class `batch` age past them."""
    count, late = 1600, 40
    trace = make_trace(
        "starving",
        arrival_s=np.concatenate((np.arange(count) * 0.025, np.full(late, 1.0))),
        prompt_tokens=np.full(count + late, 48),
        output_tokens=np.full(count + late, 16),
        service=np.concatenate((np.zeros(count, np.int64), np.ones(late, np.int64))),
        services=(Service(qos="interactive"), Service(qos="batch")),
    )
    engine = replace(SMALL, scheduling=SchedulingConfig(policy="priority", ageing_s=0.5))
    outcome = run(trace, engine)
    of_batch = trace.service == 1
    assert outcome.ended_s.max() > 1.5 * trace.span_s  # it is an overload
    # 20 steps of ageing, and the time that those before them take.
    assert outcome.started_s[of_batch].max() < trace.span_s
    assert outcome.count(Fate.COMPLETED) == count + late
