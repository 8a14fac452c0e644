"""Traces: what prompts share, how they are ordered and scaled, and the workloads that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from branchline.engine.errors import ConfigError
from branchline.load.simulate.trace import NO_PARENT, Trace, make_trace
from branchline.load.simulate.workloads import STORM_AGENTS, STORM_BRANCHES, make_workload, workload_names


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def three(**settings: object) -> Trace:
    return make_trace(
        "three",
        arrival_s=np.array([2.0, 0.0, 1.0]),
        prompt_tokens=ints(10, 7, 12),
        output_tokens=ints(3, 1, 2),
        block_tokens=4,
        blocks=[ints(5, 6), ints(5, 9), ints()],
        **settings,  # type: ignore[arg-type]
    )


def test_requests_are_put_in_order_with_all_that_belongs_to_them() -> None:
    trace = three(parent=ints(1, NO_PARENT, 1))
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert trace.prompt_tokens.tolist() == [7, 12, 10]
    assert trace.output_tokens.tolist() == trace.max_tokens.tolist() == [1, 2, 3]
    assert trace.parent.tolist() == [NO_PARENT, 0, 0]
    assert [trace.block_ids[a:b].tolist() for a, b in zip(trace.block_start, trace.block_start[1:], strict=False)] == [
        [5, 9],
        [],
        [5, 6],
    ]


def test_prompts_share_their_common_blocks_and_nothing_else() -> None:
    trace = three()
    first, own, other = (trace.prompt(i) for i in range(3))
    assert (len(first), len(own), len(other)) == (7, 12, 10)
    assert first[:4].tolist() == other[:4].tolist() == [20, 21, 22, 23]
    assert not set(first[4:]) & set(other[4:])
    assert not set(own) & (set(first) | set(other))
    assert trace.prompt(1).tolist() == own.tolist()


def test_prompts_of_many_requests_differ_at_every_position() -> None:
    trace = make_workload("heavy", 500)
    at = np.array([trace.prompt(i)[-1] for i in range(500)])
    same_length = trace.prompt_tokens == np.bincount(trace.prompt_tokens).argmax()
    assert len(set(at[same_length].tolist())) == np.count_nonzero(same_length) > 1


def test_hits_with_an_unlimited_pool() -> None:
    # In the order of arrival: [5 9] knows nothing; the one without blocks shares nothing; [5 6] finds block 5.
    assert three().unlimited_hits() == 4


def test_the_last_token_of_a_prompt_is_no_hit() -> None:
    trace = make_trace(
        "twice",
        arrival_s=np.zeros(2),
        prompt_tokens=ints(8, 8),
        output_tokens=ints(1, 1),
        block_tokens=4,
        blocks=[ints(1, 2), ints(1, 2)],
    )
    assert trace.unlimited_hits() == 7


def test_a_rate_scales_the_arrivals() -> None:
    trace = make_workload("poisson", 1000)
    faster = trace.at_rate(20.0)
    assert faster.span_s == pytest.approx(1000 / 20.0)
    np.testing.assert_allclose(faster.arrival_s / faster.span_s, trace.arrival_s / trace.span_s)
    assert trace.faster(2.0).span_s == trace.span_s / 2


def test_the_first_requests_are_a_trace() -> None:
    trace = make_workload("poisson", 100)
    part = trace.first(10)
    assert len(part) == 10
    assert [part.prompt(i).tolist() for i in range(10)] == [trace.prompt(i).tolist() for i in range(10)]
    assert trace.first(1000) is trace


@pytest.mark.parametrize("name", workload_names())
@pytest.mark.parametrize("count", [1, 50, 3000])
def test_workloads_are_whole_and_the_same_for_a_seed(name: str, count: int) -> None:
    trace, again, other = make_workload(name, count), make_workload(name, count), make_workload(name, count, seed=1)
    assert len(trace) == count
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert (trace.prompt_tokens >= 1).all()
    assert (trace.output_tokens >= 0).all()
    assert (trace.max_tokens >= trace.output_tokens).all()
    assert (trace.parent < np.arange(count)).all()  # a parent comes before its children
    assert (trace.output_tokens[trace.parent[trace.parent >= 0]] == 0).all()
    assert set(trace.tenant.tolist()) <= set(range(len(trace.tenants)))
    assert set(trace.service.tolist()) <= set(range(len(trace.services)))
    for field in ("arrival_s", "prompt_tokens", "output_tokens", "tenant", "parent", "block_ids"):
        np.testing.assert_array_equal(getattr(trace, field), getattr(again, field))
    if count == 3000:
        assert not np.array_equal(trace.prompt_tokens, other.prompt_tokens)


def test_a_storm_is_fifty_agents_of_a_hundred_branches_on_one_context() -> None:
    trace = make_workload("storm", 6000)
    children = np.bincount(trace.parent[trace.parent >= 0], minlength=len(trace))
    contexts = np.flatnonzero((trace.parent == NO_PARENT) & (children > 0))
    assert len(contexts) == 1
    agents = np.flatnonzero(trace.parent == contexts[0])
    assert len(agents) == STORM_AGENTS
    assert (children[agents] == STORM_BRANCHES).all()
    assert np.count_nonzero(trace.tenant == 1) == 6000 - 1 - STORM_AGENTS * (1 + STORM_BRANCHES)


def test_a_workload_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="poisson"):
        make_workload("poison", 10)
    with pytest.raises(ConfigError, match="at least 1"):
        make_workload("poisson", 0)
