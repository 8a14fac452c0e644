"""Requests reach the replica that they name, and only that one. Without a cluster: Ray's router class on fake replicas."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.orchestrator.router import BranchRouter
from branchline.orchestrator.routing_policy import GRACE_S, Decision, decide, least_loaded

NAMES = st.lists(st.text("abcdef0123456789", min_size=1, max_size=8), unique=True, max_size=5)


@given(wanted=st.text("abcdef0123456789", max_size=8), known=NAMES, waited_s=st.floats(0, 10))
def test_a_named_replica_is_never_replaced_while_it_may_come(wanted: str, known: list[str], waited_s: float) -> None:
    decision = decide(wanted, known, waited_s)
    if wanted and wanted in known:
        assert decision is Decision.PINNED
    elif wanted and waited_s < GRACE_S:
        assert decision is Decision.WAIT
    else:
        assert decision is Decision.ANY


@given(load=st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1))
def test_the_least_loaded_is_taken(load: dict[str, int]) -> None:
    assert load[least_loaded(load)] == min(load.values())


def test_no_replica_is_no_choice() -> None:
    with pytest.raises(ValueError):
        least_loaded({})


def choose(wanted: str, names: list[str], waited_s: float = 0.0) -> tuple[list[list[str]], bool]:
    """What the router answers: ranks of names, and whether it asks for a backoff."""
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    request = SimpleNamespace(
        metadata=SimpleNamespace(session_id=wanted),
        created_at=time.time() - waited_s,
        routing_context=SimpleNamespace(should_backoff=False),
    )
    router = BranchRouter.__new__(BranchRouter)  # its state is Ray's: none of it is read here
    ranks = asyncio.run(router.choose_replicas(cast(Any, replicas), cast(Any, request)))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks], request.routing_context.should_backoff


@pytest.mark.parametrize("wanted", ["a", "b", "c"])
def test_the_router_pins(wanted: str) -> None:
    assert choose(wanted, ["a", "b", "c"]) == ([[wanted]], True)


def test_the_router_waits_for_an_unknown_replica_with_backoff_then_lets_any_answer() -> None:
    assert choose("new", ["a", "b"]) == ([], True)
    ranks, _ = choose("gone", ["a", "b"], waited_s=GRACE_S + 0.1)
    assert [sorted(rank) for rank in ranks] == [["a", "b"]]


def test_the_router_leaves_the_choice_to_the_queue_lengths_without_a_name() -> None:
    firsts = set()
    for _ in range(64):
        ranks, _ = choose("", ["a", "b", "c"])
        assert [sorted(rank) for rank in ranks] == [["a", "b", "c"]]
        firsts.add(ranks[0][0])
    assert firsts == {"a", "b", "c"}, "replicas with equal queues are to take turns"


def test_the_router_overrides_nothing_else_and_has_no_fifo() -> None:
    assert set(vars(BranchRouter)) - {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"} == {"choose_replicas"}
    assert "FIFOMixin" not in [base.__name__ for base in BranchRouter.__mro__]
