"""A client of an in-process engine for tests: submits commands and waits for events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from branchline.engine.engine import Engine
from branchline.engine.types import (
    DEFAULT_SERVICE,
    Command,
    Content,
    Context,
    Delta,
    Event,
    Failed,
    Finished,
    Fork,
    Generate,
    Info,
    Inspect,
    SamplingParams,
    Service,
    Text,
)

E = TypeVar("E", bound=Event)
TIMEOUT_S = 60.0


class Output:
    """What one generation gave."""

    def __init__(self, events: list[Event], finished: Finished) -> None:
        self.deltas = [event for event in events if isinstance(event, Delta) and event.request == finished.request]
        self.tokens = [token for delta in self.deltas for token in delta.tokens]
        self.text = "".join(delta.text for delta in self.deltas)
        self.finished = finished
        self.reason = finished.reason


class Recorder:
    """One session of an engine. Keeps all the events that came."""

    def __init__(self, engine: Engine, tenant: str = "") -> None:
        self.engine = engine
        self.events: list[Event] = []
        self.batches: list[tuple[Event, ...]] = []
        self._arrived = threading.Condition()
        self.session = engine.open_session(self._sink, tenant=tenant)
        self._next_branch = 0
        self._next_request = 0

    def _sink(self, events: tuple[Event, ...]) -> None:
        with self._arrived:
            self.batches.append(events)
            self.events.extend(events)
            self._arrived.notify_all()

    def send(self, *commands: Command) -> None:
        self.engine.submit(self.session, commands)

    def wait(self, kind: type[E], matches: Callable[[Any], bool] = lambda _: True) -> E:
        """The first event of the kind that matches; waits for it."""

        def found() -> E | None:
            return next((event for event in self.events if isinstance(event, kind) and matches(event)), None)

        with self._arrived:
            if not self._arrived.wait_for(lambda: found() is not None, TIMEOUT_S):
                raise TimeoutError(f"no {kind.__name__} came; the last events are {self.events[-5:]}")
            event = found()
        assert event is not None
        return event

    def failure(self, branch: int, request: int | None = None) -> Failed:
        return self.wait(Failed, lambda event: event.branch == branch and (request is None or event.request == request))

    # --- the usual moves --------------------------------------------------------------------------------------------

    def context(self, content: Content | str, *, pin: bool = False, service: Service = DEFAULT_SERVICE) -> int:
        branch = self._next_branch
        self._next_branch += 1
        self.send(Context(branch, Text(content) if isinstance(content, str) else content, pin, service))
        return branch

    def fork(self, parent: int, count: int = 1) -> list[int]:
        first = self._next_branch
        self._next_branch += count
        self.send(Fork(parent, first, count))
        return list(range(first, first + count))

    def generate(self, branch: int, *, service: Service = DEFAULT_SERVICE, **params: Any) -> int:
        request = self._next_request
        self._next_request += 1
        params.setdefault("temperature", 0.0)
        self.send(Generate(branch, request, SamplingParams(**params), service))
        return request

    def output(self, request: int) -> Output:
        def ended(event: Finished | Failed) -> bool:
            return event.request == request

        with self._arrived:
            self._arrived.wait_for(
                lambda: any(isinstance(event, Finished | Failed) and ended(event) for event in self.events), TIMEOUT_S
            )
            events = list(self.events)
        for event in events:
            if isinstance(event, Failed) and event.request == request:
                raise AssertionError(f"request {request} failed: {event.error}")
            if isinstance(event, Finished) and event.request == request:
                return Output(events, event)
        raise TimeoutError(f"request {request} didn't end; the last events are {events[-5:]}")

    def has_ended(self, request: int) -> bool:
        with self._arrived:
            return any(isinstance(event, Finished | Failed) and event.request == request for event in self.events)

    def wait_for_tokens(self, request: int, count: int) -> None:
        """Until a generation has given so many tokens."""

        def given() -> int:
            return sum(len(event.tokens) for event in self.events if isinstance(event, Delta) and event.request == request)

        with self._arrived:
            assert self._arrived.wait_for(lambda: given() >= count, TIMEOUT_S)

    def run(self, branch: int, **params: Any) -> Output:
        return self.output(self.generate(branch, **params))

    def inspect(self, branch: int) -> Info:
        request = self._next_request
        self._next_request += 1
        self.send(Inspect(branch, request))
        return self.wait(Info, lambda event: event.request == request)
