"""Events that wait are joined, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from branchline.engine.types import Delta, Event, Finished, PositionLogprobs, Ready, Timing, TokenLogprob, Usage
from branchline.orchestrator.outbox import JOIN_FROM, Outbox, join
from branchline.orchestrator.telemetry.recorder import Recorder


@dataclasses.dataclass
class Told:
    """What the events tell of one branch."""

    order: list[str] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)


def told(events: list[Event]) -> dict[int, Told]:
    found: dict[int, Told] = {}
    for event in events:
        assert isinstance(event, Delta | Finished | Ready)
        branch = found.setdefault(event.branch, Told())
        what = "ready" if isinstance(event, Ready) else f"{type(event).__name__} {event.request}"
        if not branch.order or branch.order[-1] != what:
            branch.order.append(what)
        if isinstance(event, Delta):
            branch.tokens += event.tokens
            branch.text += event.text
            branch.logprobs += event.logprobs or ()
    return found


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Generations of several branches, each: ready, deltas, finished, again; interleaved as steps do it."""
    lanes: list[list[Event]] = []
    request = 0
    for branch in range(draw(st.integers(1, 4))):
        lane: list[Event] = []
        for _ in range(draw(st.integers(1, 3))):
            lane.append(Ready(branch, 1, 1, 0.0))
            asks = draw(st.booleans())
            for token in draw(st.lists(st.integers(0, 99), max_size=5)):
                logprobs = (PositionLogprobs(TokenLogprob(token, str(token), -1.0)),) if asks else None
                lane.append(Delta(branch, request, (token,), f"<{token}>", logprobs))
            lane.append(Finished(branch, request, "length", Usage(0, 0, 0), Timing(0, 0, 0)))
            request += 1
        lanes.append(lane)
    events: list[Event] = []
    while any(lanes):
        lane = draw(st.sampled_from([lane for lane in lanes if lane]))
        events.append(lane.pop(0))
    return events


@given(streams())
def test_joined_events_tell_the_same_of_each_branch(events: list[Event]) -> None:
    joined = join(events)
    assert told(joined) == told(events)
    requests = [event.request for event in joined if isinstance(event, Delta)]
    assert len(requests) == len(set(requests))
    assert [event for event in joined if not isinstance(event, Delta)] == [e for e in events if not isinstance(e, Delta)]
    assert join(joined) == joined


def test_what_waits_stays_small_however_long_nobody_reads() -> None:
    async def main() -> None:
        outbox = Outbox("r1.s", "s", 0.0, Recorder(lambda: 0.0).session("r1.s"), max_bytes=1 << 30)
        for step in range(20_000):
            assert outbox.add(tuple([Delta(branch, branch, (step,), "x") for branch in range(8)]), 0.0)
            assert len(outbox._events) <= 2 * JOIN_FROM
        events = outbox.take()
        assert {event.branch: event.tokens for event in join(events) if isinstance(event, Delta)} == {
            branch: tuple(range(20_000)) for branch in range(8)
        }
        assert outbox.take() == ()

    asyncio.run(main())


def test_a_reader_that_keeps_up_gets_each_step_as_it_was() -> None:
    async def main() -> None:
        outbox = Outbox("r1.s", "s", 0.0, Recorder(lambda: 0.0).session("r1.s"), max_bytes=1 << 30)
        step: tuple[Event, ...] = (Delta(1, 1, (5,), "a"), Delta(2, 2, (6,), "b"))
        outbox.add(step, 0.0)
        assert outbox.take() == step

    asyncio.run(main())
