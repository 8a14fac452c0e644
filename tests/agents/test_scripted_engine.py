"""The scripted engine: it does with commands what the real engine does, and serves tests of programs that use the SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agents.harness import reply, run

from branchline.agents import connect
from branchline.agents.scripted import pieces_of
from branchline.agents.testing import ScriptedEngine
from branchline.agents.transport.local import EngineLike
from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineClosedError, EngineError, InvalidParameterError, SessionNotFoundError
from branchline.engine.types import (
    Append,
    Attach,
    Cancel,
    Command,
    Context,
    Event,
    Failed,
    Finished,
    Fork,
    Forked,
    Generate,
    Info,
    Inspect,
    Ready,
    Release,
    SamplingParams,
    Text,
    TokenIds,
)

TWO = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
NUM_BRANCHES = 10
SETTLING = 1000
NOT_A_TOKEN = TokenIds((2**31 - 2,))

SCRIPTS: dict[str, list[list[Command]]] = {
    "generate": [[Context(0, Text("a b")), Generate(0, 0, TWO)]],
    "fork before it is computed": [[Context(0, Text("a b")), Fork(0, 1, 3), Generate(2, 0, TWO), Append(2, Text(" c"))]],
    "inspect": [[Context(0, Text("a")), Fork(0, 1, 1), Inspect(1, 0), Inspect(0, 1)]],
    "unknown branch": [[Fork(9, 1, 2), Generate(1, 0, TWO), Append(8, Text("x")), Inspect(8, 1), Generate(8, 2, TWO)]],
    "released twice": [[Context(0, Text("a"))], [Release((0,))], [Release((0,)), Generate(0, 0, TWO), Cancel(0)]],
    "duplicate": [[Context(0, Text("a"))], [Context(0, Text("b"))]],
    "duplicate of a released one": [[Context(0, Text("a"))], [Release((0,))], [Context(0, Text("b"))]],
    "count of a fork": [[Context(0, Text("a"))], [Fork(0, 1, 0)]],
    "poisoned": [[Context(0, NOT_A_TOKEN)], [Generate(0, 0, TWO), Inspect(0, 1), Fork(0, 1, 2)], [Generate(1, 2, TWO)]],
    "poisoned in one batch": [[Context(0, NOT_A_TOKEN), Fork(0, 1, 1), Generate(1, 0, TWO), Generate(0, 1, TWO)]],
    "a bad append": [
        [Context(0, Text("a"))],
        [Append(0, NOT_A_TOKEN), Fork(0, 1, 1)],
        [Generate(0, 0, TWO), Generate(1, 1, TWO)],
    ],
    "release after a fork": [[Context(0, Text("a")), Fork(0, 1, 1), Release((0,)), Generate(1, 0, TWO)]],
    "append after a generation": [[Context(0, Text("a")), Generate(0, 0, TWO), Append(0, Text(" b")), Generate(0, 1, TWO)]],
    "fork after a generation": [[Context(0, Text("a")), Generate(0, 0, TWO), Fork(0, 1, 2), Generate(2, 1, TWO)]],
    "cancel what is queued": [
        [Context(0, Text("a")), Generate(0, 0, LONG), Generate(0, 1, TWO), Cancel(0)],
        [Generate(0, 2, TWO)],
    ],
    "bad parameters": [[Context(0, Text("a"))], [Generate(0, 0, SamplingParams(max_tokens=-1))], [Generate(0, 1, TWO)]],
    "attach to nothing": [[Attach(0, "nobody", 0)], [Generate(0, 0, TWO)]],
}


class Client:
    """Submits batches; after each, waits until all branches that it names have answered an inspection."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._events: list[Event] = []
        self._arrived = threading.Condition()
        self._inspections = SETTLING
        self.session = engine.open_session(self._take)

    def _take(self, events: tuple[Event, ...]) -> None:
        with self._arrived:
            self._events.extend(events)
            self._arrived.notify_all()

    def play(self, batches: Sequence[Sequence[Command]]) -> list[tuple[Any, ...]]:
        """What came back, but for text and sizes, sorted: which of two branches answers first isn't promised."""
        for batch in batches:
            self._engine.submit(self.session, batch)
            inspections = [Inspect(branch, self._inspections + branch) for branch in range(NUM_BRANCHES)]
            self._inspections += NUM_BRANCHES
            self._engine.submit(self.session, inspections)
            for inspection in inspections:
                self._wait_for(inspection.request)
        return sorted([outcome for event in self._events if (outcome := _outcome(event)) is not None], key=repr)

    def _wait_for(self, request: int) -> None:
        def answered() -> bool:
            return any(isinstance(event, Info | Failed) and event.request == request for event in self._events)

        with self._arrived:
            assert self._arrived.wait_for(answered, 30), self._events


def _outcome(event: Event) -> tuple[Any, ...] | None:
    match event:
        case Ready():
            return ("ready", event.branch)
        case Forked():
            return ("forked", event.parent, event.first, event.count)
        case Info():
            return ("info", event.branch, event.request) if event.request < SETTLING else None
        case Finished():
            return ("finished", event.branch, event.request, event.reason)
        case Failed():
            if event.request is not None and event.request >= SETTLING:
                return ("settled", event.branch, event.error.code)
            return ("failed", event.branch, event.request, event.error.code)
    return None


@pytest.fixture(scope="module")
def real_engine(tiny_model: Path) -> Iterator[EngineLike]:
    from branchline.engine.engine import Engine

    with Engine.load(EngineConfig(model=str(tiny_model), pool_tokens=4096, threads=1)) as engine:
        yield engine


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_answers_commands_as_the_real_engine_does(name: str, real_engine: EngineLike) -> None:
    with ScriptedEngine(lambda prompt: "x " * 200, step_s=0.001) as scripted:
        assert Client(scripted).play(SCRIPTS[name]) == Client(real_engine).play(SCRIPTS[name])


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(pieces_of(text)) == text


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=12), st.text(alphabet="abc", min_size=1, max_size=4))
def test_a_stop_string_is_never_given_out(pieces: list[str], stop: str) -> None:
    async def main() -> None:
        with ScriptedEngine(lambda prompt: pieces) as engine:
            async with connect(engine) as session:
                stream = session.context("x").stream(stop=stop)
                shown = [piece async for piece in stream]
                result = await stream.result()
                whole = "".join(pieces)
                assert "".join(shown) == result.text == whole.partition(stop)[0]
                assert result.stop == (stop if stop in whole else 0)
                for count in range(len(shown)):
                    assert whole.partition(stop)[0].startswith("".join(shown[:count]))

    run(main())


def test_what_the_function_raises_fails_its_generation() -> None:
    def fail(prompt: str) -> str:
        raise KeyError("no such prompt")

    def fail_later(prompt: str) -> Iterator[str]:
        yield "one"
        raise InvalidParameterError("enough", param="prompt")

    async def main() -> None:
        with ScriptedEngine(fail) as engine, ScriptedEngine(fail_later) as later:
            async with connect(engine) as session:
                with pytest.raises(EngineError, match="no such prompt"):
                    await session.context("a").generate()
            async with connect(later) as session:
                stream = session.context("a").stream()
                assert await anext(stream) == "one"
                with pytest.raises(InvalidParameterError, match="enough"):
                    await anext(stream)

    run(main())


def test_closed_engines_and_sessions_are_refused() -> None:
    engine = ScriptedEngine(reply)
    session = engine.open_session(lambda events: None)
    engine.close_session(session)
    engine.close_session(session)
    with pytest.raises(SessionNotFoundError):
        engine.submit(session, [])
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.open_session(lambda events: None)


def test_token_ids_that_were_given_out_can_be_sent_back() -> None:
    async def main() -> None:
        with ScriptedEngine(reply) as engine:
            async with connect(engine) as session:
                result = await session.context("a b c").generate()
                again = await session.context(list(result.tokens)).generate()
                assert again.text == " heard 7 words, the last is c.."

    run(main())
