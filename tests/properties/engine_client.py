"""A client of an engine that keeps what its commands mean, so that every answer can be checked when all is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.engine.recorder import Recorder

from branchline.engine.engine import Engine
from branchline.engine.types import (
    Command,
    Delta,
    Event,
    Failed,
    Finished,
    Info,
    Raced,
    SamplingParams,
    Service,
)

E = TypeVar("E", bound=Event)


@dataclass(slots=True, eq=False)
class Asked:
    """One `Generate`.

    Attributes:
        held: what its branch holds before it.
        stoppable: a `Cancel`, `Release` or `Race` may have ended it.
        tokens: what it gave; filled in when all is over.
    """

    client: Client
    branch: int
    request: int
    held: Held
    params: SamplingParams
    service: Service
    stoppable: bool = False
    tokens: tuple[int, ...] = ()


# A branch's content, oldest first: tokens that were sent, and outputs.
Held = list[tuple[int, ...] | Asked]


@dataclass(slots=True, eq=False)
class Named:
    """One branch of a client, while the client may name it.

    Attributes:
        most: tokens that it holds, at most.
        added: what it held after each `Context` and `Append`, oldest first.
    """

    id: int
    held: Held = field(default_factory=list)
    most: int = 0
    pinned: bool = False
    added: list[Held] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    adopted: list[Named] = field(default_factory=list)

    def may_be_stopped(self) -> None:
        """It is cancelled or released, and with it those that it would adopt."""
        for asked in self.asked:
            asked.stoppable = True
        for child in self.adopted:
            child.may_be_stopped()


class Client(Recorder):
    """One session, and what its commands mean."""

    def __init__(self, engine: Engine, tenant: str) -> None:
        super().__init__(engine, tenant)
        self.branches: dict[int, Named] = {}
        self.gone: list[Named] = []
        self.races: dict[int, list[Named]] = {}
        self.asked: list[Asked] = []
        self.adoptions: list[tuple[int, int, Held]] = []
        self.inspected: dict[int, Held] = {}
        self.unsent: list[Command] = []

    def name(self, held: Held, most: int) -> Named:
        branch = Named(self._next_branch, list(held), most)
        self._next_branch += 1
        self.branches[branch.id] = branch
        return branch

    def new_request(self) -> int:
        self._next_request += 1
        return self._next_request - 1

    def of_kind(self, kind: type[E]) -> list[E]:
        """All events of a kind, in order."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    def answers(self, kind: type[Event], request: int) -> list[Any]:
        """What came with a request's number: events of the kind, `Delta`s and `Failed`s."""
        return [
            event
            for event in list(self.events)
            if isinstance(event, kind | Delta | Failed) and getattr(event, "request", None) == request
        ]

    def wait_until_answered(self) -> None:
        """Until all that was asked for has ended."""

        asked = {*(asked.request for asked in self.asked), *self.races, *self.inspected}

        def answered() -> bool:
            return asked <= {event.request for event in self.events if isinstance(event, Finished | Raced | Info | Failed)}

        with self._arrived:
            assert self._arrived.wait_for(answered, 60), f"the last events are {self.events[-5:]}"

    def flush(self) -> None:
        commands, self.unsent = self.unsent, []
        if commands:
            self.send(*commands)


def resolve(held: Held) -> list[int]:
    """The tokens of it, when all outputs are known."""
    return [token for part in held for token in (part.tokens if isinstance(part, Asked) else part)]
