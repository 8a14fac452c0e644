"""Where new roots go: to the prefix, unless the work there costs more than computing it again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.engine.types import EngineStats, Finished, ModelInfo, Text, Timing, Usage
from branchline.orchestrator.load_meter import LoadMeter
from branchline.orchestrator.placement import ASSUMED, Candidate, Placement, place, rates_of
from branchline.orchestrator.prefix import NO_PREFIX, PrefixDigest, prefix_of
from branchline.orchestrator.protocol import LoadReply

DOCUMENT = Text("All work and no play. " * 500)  # 11,000 bytes, about 2,750 tokens


def load(name: str, *held: Text, **changes: Any) -> LoadReply:
    digest = PrefixDigest(10**6)
    for content in held:
        digest.note(prefix_of(content))
    idle = LoadReply(
        replica=name, draining=False, running=0, waiting=0, branches=0, sessions=0, pages_free=2048, pages_total=2048,
        page_tokens=16, prefill_token_s=0.001, decode_token_s=0.01, output_tokens=50.0, prefixes=digest.pack(),
    )  # fmt: skip
    return msgspec.structs.replace(idle, **changes)


def test_a_root_goes_where_its_prefix_is() -> None:
    longer = Text(DOCUMENT.text + "What follows from it?")
    assert place([load("a"), load("b", DOCUMENT), load("c")], prefix_of(longer)) == "b"
    assert place([load("a", Text(DOCUMENT.text[:2000])), load("b", DOCUMENT)], prefix_of(longer)) == "b"


@pytest.mark.parametrize(("running", "expected"), [(0, "holder"), (4, "holder"), (6, "idle")])
def test_an_overloaded_holder_loses_its_prefix_to_an_idle_replica(running: int, expected: str) -> None:
    # Computing the document takes about 2.7 s; each running generation delays the new one by 50 * 0.01 = 0.5 s.
    loads = [load("holder", DOCUMENT, running=running), load("idle")]
    assert place(loads, prefix_of(DOCUMENT)) == expected


def test_what_waits_counts_and_so_do_pages_that_lack() -> None:
    assert place([load("a", waiting=1), load("b")]) == "b"
    assert place([load("a", pages_free=2), load("b", running=0)]) == "b"
    assert place([load("a", running=1, pages_free=10), load("b", running=1)], prefix_of(DOCUMENT)) == "b"


def test_draining_replicas_take_nothing_new() -> None:
    assert place([load("a", DOCUMENT, draining=True), load("b", running=100)], prefix_of(DOCUMENT)) == "b"
    assert place([load("a", draining=True)]) is None
    assert place([]) is None
    placement = Placement()
    placement.update([load("a", draining=True), load("b")])
    assert (placement.is_draining("a"), placement.is_draining("b"), placement.is_draining("c")) == (True, False, False)


def test_a_burst_between_two_reports_is_spread_and_what_was_sent_is_held() -> None:
    placement = Placement()
    placement.update([load(name) for name in "abcd"])
    assert Counter(placement.place() for _ in range(40)) == dict.fromkeys("abcd", 10)
    placement.update([load(name) for name in "abcd"])
    assert len({placement.place(prefix_of(DOCUMENT)) for _ in range(2)}) == 1
    assert placement.place(prefix_of(DOCUMENT), among=["d"]) == "d"
    assert placement.place(among=["gone"]) is None


@given(
    loads=st.lists(
        st.builds(
            load,
            st.uuids().map(str),
            running=st.integers(0, 50),
            waiting=st.integers(0, 50),
            pages_free=st.integers(0, 2048),
            draining=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    tokens=st.integers(0, 10_000),
)
def test_a_replica_that_is_better_in_all_is_never_passed_over(loads: list[LoadReply], tokens: int) -> None:
    prefix = prefix_of(Text("x" * tokens * 4))
    chosen = place(loads, prefix)
    able = [given for given in loads if not given.draining]
    assert (chosen is None) == (not able)
    for other in able:
        taken = next(given for given in able if given.replica == chosen)
        better = other.running < taken.running and other.waiting < taken.waiting and other.pages_free > taken.pages_free
        assert not better
        rates = rates_of(loads)
        assert Candidate.of(taken, rates).expected_s(prefix) <= Candidate.of(other, rates).expected_s(prefix)


def test_rates_are_those_of_all_replicas_together_and_assumed_until_measured() -> None:
    assert rates_of([]) == ASSUMED
    assert rates_of([load("a", decode_token_s=0.02), load("b", decode_token_s=None)]).decode_token_s == 0.02
    # One worked in large batches, where a row takes less: it isn't faster, and gets no more.
    loads = [load("a", decode_token_s=0.001, running=3), load("b", decode_token_s=0.03, running=2)]
    assert place(loads) == "b"
    assert meter().reply("r", stats(), draining=False).decode_token_s is None


def stats(**changes: Any) -> EngineStats:
    zero = EngineStats(
        steps=0, prefill_tokens=0, decode_tokens=0, forks=0, branches=0, running=0, waiting=0, sessions=0, pages_free=10,
        pages_total=20, copied_bytes=0, tensor_s=0.0, plan_s=0.0, python_s=0.0, idle_s=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(zero, **changes)


def meter() -> LoadMeter:
    info = ModelInfo(
        name="m", architecture="", num_parameters=0, vocab_size=1, context_length=1, dtype="", attention="", device="",
        page_tokens=16, page_bytes=1, num_pages=20, max_batch=1,
    )  # fmt: skip
    return LoadMeter(info)


@given(st.floats(1e-5, 0.1), st.floats(1e-5, 0.1))
def test_rates_are_found_from_steps_that_mix_prompts_and_outputs(prefill_s: float, decode_s: float) -> None:
    measured = meter()
    now = stats()
    measured.measure(now)
    for i in range(400):
        prefill, decode = ((90, 10), (0, 40))[i % 2]
        now = msgspec.structs.replace(
            now,
            prefill_tokens=now.prefill_tokens + prefill,
            decode_tokens=now.decode_tokens + decode,
            tensor_s=now.tensor_s + prefill * prefill_s + decode * decode_s,
        )
        measured.measure(now)
    reply = measured.reply("r", now, draining=False)
    assert reply.prefill_token_s is not None
    assert reply.decode_token_s == pytest.approx(decode_s, rel=0.2)
    assert reply.prefill_token_s * 90 + decode_s * 10 == pytest.approx(prefill_s * 90 + decode_s * 10, rel=0.2)


def test_what_a_replica_says() -> None:
    measured = meter()
    for _ in range(200):
        measured.finished(Finished(0, 0, "stop", Usage(10, 30, 0), Timing(0.0, 0.0, 0.0)))
    measured.finished(Finished(0, 0, "cancelled", Usage(10, 10**6, 0), Timing(0.0, 0.0, 0.0)))
    reply = measured.reply("r", stats(pages_free=3, pages_cached=4, running=5, waiting=6), draining=True)
    assert (reply.pages_free, reply.pages_total, reply.running, reply.waiting, reply.draining) == (7, 20, 5, 6, True)
    assert reply.output_tokens == pytest.approx(30, abs=1)
    assert Candidate.of(reply, rates_of([reply])).is_full()
    assert not Candidate.of(load("a"), ASSUMED).is_full()
    assert NO_PREFIX.num_tokens == 0
