"""What a replica sees of its sessions' requests: latencies, outcomes, and how much of the time was no tensor work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from branchline.engine.errors import BranchlineError
from branchline.engine.types import Command, Delta, Event, Failed, Finished, Generate
from branchline.orchestrator.telemetry.log import RequestLog

Key = tuple[str, str]


@dataclass(slots=True)
class Samples:
    """What was recorded since the last `drain`, by (metric, its tag's value or "")."""

    observed: dict[Key, list[float]] = field(default_factory=dict)
    counted: dict[Key, float] = field(default_factory=dict)

    def observe(self, metric: str, value: float, tag: str = "") -> None:
        """A value of a histogram."""
        self.observed.setdefault((metric, tag), []).append(value)

    def count(self, metric: str, by: float, tag: str = "") -> None:
        """Growth of a counter."""
        self.counted[metric, tag] = self.counted.get((metric, tag), 0.0) + by


@dataclass(slots=True)
class _Asked:
    """A generation that runs: its class of service, when it came and what the engine had computed until then."""

    qos: str
    at: float
    busy_s: float


class SessionRecorder:
    """One session's requests."""

    def __init__(self, recorder: Recorder, session: str) -> None:
        self._recorder = recorder
        self._session = session
        self._asked: dict[int, _Asked] = {}
        self._last_step: float | None = None
        self._streams = 0

    def submitted(self, commands: Sequence[Command], at: float) -> None:
        """Commands were accepted that arrived `at` (seconds of `perf_counter`)."""
        generates = [command for command in commands if isinstance(command, Generate)]
        if generates:
            busy_s = self._recorder.busy_s()
            for command in generates:
                self._asked[command.request] = _Asked(command.service.qos, at, busy_s)

    def published(self, events: Sequence[Event], at: float, now: float) -> None:
        """A step that ended `at` gave these events, which are delivered `now`. Metrics are touched once a step and once a
        request; a token costs a look at its event's type."""
        samples = self._recorder.samples
        deltas = 0
        ended: list[Finished | Failed] = []
        for event in events:
            kind = type(event)
            if kind is Delta:
                deltas += 1
            elif isinstance(event, Finished | Failed):
                ended.append(event)
        if deltas and self._streams and self._last_step is not None:
            samples.observe("token_interval_seconds", at - self._last_step)
        if deltas:
            self._last_step = at
            self._streams = deltas - sum(isinstance(event, Finished) for event in ended)
        if ended:
            busy_s = self._recorder.busy_s()
            for event in ended:
                self._ended(event, samples, busy_s, now)

    def _ended(self, event: Finished | Failed, samples: Samples, busy_s: float, now: float) -> None:
        asked = None if event.request is None else self._asked.pop(event.request, None)
        qos = asked.qos if asked else "standard"
        log = self._recorder.log
        if isinstance(event, Failed):
            samples.count("errors", 1, event.error.code)
            if event.request is not None:
                samples.count("requests", 1, "failed")
            log.failed(self._session, event)
            return
        samples.count("requests", 1, event.reason)
        samples.observe("queue_seconds", event.timing.queue_s, qos)
        if event.usage.completion_tokens:
            samples.observe("first_token_seconds", event.timing.first_token_s, qos)
        tax_s: float | None = None
        if asked is not None:
            wall_s = now - asked.at
            # The engine's own counters are brought up to date when a step ends: what is left can't be less than nothing.
            tax_s = max(wall_s - (busy_s - asked.busy_s), 0.0)
            samples.observe("request_seconds", wall_s, qos)
            samples.observe("request_tax_seconds", tax_s, qos)
        log.finished(self._session, event, qos, tax_s)
        self._recorder.on_finished(event)


class Recorder:
    """The requests of all of a replica's sessions. Used from one loop."""

    def __init__(
        self,
        busy_s: Callable[[], float],
        log: RequestLog | None = None,
        on_finished: Callable[[Finished], None] = lambda event: None,
    ) -> None:
        """`busy_s`: seconds of tensor work and planning that the engine has done since its start. `on_finished` is called
        for each generation that ended."""
        self.busy_s = busy_s
        self.on_finished = on_finished
        self.log = log or RequestLog(enabled=False)
        self.samples = Samples()

    def session(self, session: str) -> SessionRecorder:
        """The recorder of a new session."""
        return SessionRecorder(self, session)

    def refused(self, err: BranchlineError) -> None:
        """A call was refused as a whole."""
        self.samples.count("errors", 1, err.code)

    def transport(self, seconds: float) -> None:
        """Time that went into reading commands or handing events over."""
        self.samples.count("transport_seconds", seconds)

    def delivered(self, seconds: float) -> None:
        """A step's events were handed over so long after the step had ended."""
        self.samples.observe("delivery_seconds", seconds)

    def drain(self) -> Samples:
        """What came since the last call."""
        samples, self.samples = self.samples, Samples()
        return samples
