"""One HTTP request's work on an engine: a context for each prompt, forked into its choices, released in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from branchline.engine.errors import EngineClosedError, FailedBranchError
from branchline.engine.types import (
    Command,
    Context,
    Delta,
    Event,
    Failed,
    Finished,
    Fork,
    Generate,
    PositionLogprobs,
    Ready,
)
from branchline.orchestrator.channel import Channel
from branchline.orchestrator.gateway.requests import Job


@dataclass(slots=True)
class Counts:
    """Tokens of a request. `cached` of the prompt's were there already and weren't computed for it."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(slots=True)
class Piece:
    """What one step added to one choice.

    Attributes:
        index: the choice: prompt * n + child.
        reason: None unless the choice ended with this.
    """

    index: int
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    reason: str | None = None


class Generation:
    """Runs a job. `start`, read `pieces`, and `close` in any case: it releases all that the job holds in the engine."""

    def __init__(self, channel: Channel, job: Job) -> None:
        """Raises what ended the channel."""
        self.counts = Counts()
        self._job = job
        self._channel = channel
        self._per_prompt = 1 if job.n == 1 else job.n + 1
        self._listener = channel.listen(self._per_prompt * len(job.contents))
        self._first = self._listener.branches.start
        self._unfinished = job.n * len(job.contents)
        self._early: list[Event] = []

    @property
    def branches(self) -> range:
        """The ids of its branches in the channel's session."""
        return self._listener.branches

    async def start(self) -> None:
        """Send the commands and wait for the first answer, so that a refusal is known before a response begins.

        Raises what the engine refused the job for.
        """
        commands: list[Command] = []
        for prompt, content in enumerate(self._job.contents):
            root = self._first + prompt * self._per_prompt
            commands.append(Context(root, content, service=self._job.service, tenant=self._job.tenant))
            children = [root]
            if self._job.n > 1:
                children = [root + 1 + child for child in range(self._job.n)]
                commands.append(Fork(root, children[0], self._job.n))
            commands += (
                Generate(child, self._channel.mint_request(), self._job.params, self._job.service) for child in children
            )
        self._channel.send(self._listener, commands)
        self._early = await self._next()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What each step added, at most one Piece a choice; ends when all choices have ended. Raises what failed any."""
        events, self._early = self._early, []
        while True:
            pieces: dict[int, Piece] = {}
            for event in events:
                self._take(event, pieces)
            if pieces:
                yield list(pieces.values())
            if self._unfinished == 0:
                return
            events = await self._next()

    def close(self) -> None:
        """Release all branches, whatever runs on them. Idempotent."""
        self._channel.release(self._listener)

    async def aclose(self) -> None:
        """`close` for those who await it."""
        self.close()

    async def _next(self) -> list[Event]:
        events = await self._listener.next()
        errors = [e.error.exception() for e in events if isinstance(e, Failed)]
        if errors:
            # What hangs on something that failed fails, too, and says less.
            raise next((error for error in errors if not isinstance(error, FailedBranchError)), errors[0])
        return list(events)

    def _take(self, event: Event, pieces: dict[int, Piece]) -> None:
        if isinstance(event, Ready):
            self.counts.prompt += event.num_tokens
            self.counts.cached += event.num_tokens - event.computed_tokens
        elif isinstance(event, Delta):
            piece = self._piece(event.branch, pieces)
            piece.text += event.text
            piece.logprobs += event.logprobs or ()
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise EngineClosedError("the generation was cancelled by the engine; try again")
            self._piece(event.branch, pieces).reason = event.reason
            self.counts.completion += event.usage.completion_tokens
            self._unfinished -= 1

    def _piece(self, branch: int, pieces: dict[int, Piece]) -> Piece:
        prompt, place = divmod(branch - self._first, self._per_prompt)
        index = prompt * self._job.n + (place - 1 if self._job.n > 1 else 0)
        if index not in pieces:
            pieces[index] = Piece(index)
        return pieces[index]
