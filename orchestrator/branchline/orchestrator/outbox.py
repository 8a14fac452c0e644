"""What a session's reader hasn't taken yet: joined, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from branchline.engine.types import Delta, Event
from branchline.orchestrator.errors import SlowReaderError
from branchline.orchestrator.telemetry.recorder import SessionRecorder

JOIN_FROM = 1024
"""Events that wait before those of one generation are joined: a reader that keeps up never gets there."""
EVENT_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 200, 8, 200
"""What an event, a token and a token's log-probability take in memory, about."""


class Outbox:
    """A session's events between two looks of its reader.

    Steps that come while the reader is busy are joined into one batch; when there are many, a generation's deltas become one.
    So what waits grows by the tokens alone, and a session whose reader leaves more than `max_bytes` is given up.
    """

    def __init__(self, session: str, engine_session: str, now: float, recorder: SessionRecorder, max_bytes: int) -> None:
        self.session = session
        self.engine_session = engine_session
        self.recorder = recorder
        self.oldest: float | None = None
        self.heard = now
        self.has_reader = False
        self.tenant = ""
        self.closed = False
        self.error: SlowReaderError | None = None
        self.filled = asyncio.Event()
        self._max_bytes = max_bytes
        self._events: list[Event] = []
        self._join_at = JOIN_FROM

    def add(self, events: tuple[Event, ...], at: float) -> bool:
        """Append the events of a step that ended `at`, and wake the reader. Returns False when that is too much: then nothing
        is kept, and `error` says so."""
        if self.closed:
            return True
        self.oldest = at if self.oldest is None else self.oldest
        self._events.extend(events)
        self.filled.set()
        if len(self._events) < self._join_at:
            return True
        self._events = join(self._events)
        self._join_at = max(JOIN_FROM, 2 * len(self._events))
        if sum(map(_size, self._events)) <= self._max_bytes:
            return True
        self.error = SlowReaderError(
            f"the session's events weren't read, and more than {self._max_bytes >> 20} MiB of them waited: it is closed; "
            "read the stream in a task of its own"
        )
        self._events = []
        return False

    def take(self) -> tuple[Event, ...]:
        """All that there is, in order; leaves the outbox empty."""
        events, self._events = tuple(self._events), []
        self._join_at = JOIN_FROM
        self.oldest = None
        if not self.closed:
            self.filled.clear()
        return events

    def close(self) -> None:
        """Take nothing more; the reader gets what is left and then ends."""
        self.closed = True
        self.filled.set()


def join(events: Iterable[Event]) -> list[Event]:
    """The events with the deltas of each generation made one, where its first one stood. What is told of one branch stays in
    order: nothing but deltas comes between two of a generation's."""
    joined: list[Event] = []
    parts: dict[int, tuple[int, list[Delta]]] = {}
    for event in events:
        if not isinstance(event, Delta):
            joined.append(event)
        elif event.request in parts:
            parts[event.request][1].append(event)
        else:
            parts[event.request] = len(joined), [event]
            joined.append(event)
    for at, deltas in parts.values():
        if len(deltas) > 1:
            joined[at] = _joined(deltas)
    return joined


def _joined(deltas: list[Delta]) -> Delta:
    logprobs = [position for delta in deltas for position in delta.logprobs or ()]
    return Delta(
        deltas[0].branch,
        deltas[0].request,
        tuple([token for delta in deltas for token in delta.tokens]),
        "".join([delta.text for delta in deltas]),
        tuple(logprobs) if logprobs else None,
    )


def _size(event: Event) -> int:
    if not isinstance(event, Delta):
        return EVENT_BYTES
    logprobs = sum(1 + len(position.top) for position in event.logprobs or ())
    return EVENT_BYTES + TOKEN_BYTES * len(event.tokens) + len(event.text) + LOGPROB_BYTES * logprobs
