"""A running generation: awaited for its result, or read piece by piece."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Generator
from types import TracebackType
from typing import TYPE_CHECKING

from branchline.agents.errors import again
from branchline.agents.result import Result
from branchline.engine.errors import BranchlineError
from branchline.engine.types import Delta, Finished, Info, PositionLogprobs, Raced

if TYPE_CHECKING:
    from branchline.agents.branch import Branch
    from branchline.agents.link import Link


class Request:
    """What came for one request id; the link fills it, the user's object reads it.

    Attributes:
        wants_pieces: its reader is woken by each piece of output, not by the end alone.
        abandoned: nobody wants it any more; it was cancelled, or runs on because it shares its branch.
    """

    __slots__ = ("abandoned", "branch", "deltas", "error", "finished", "id", "info", "loop", "raced", "waiters", "wants_pieces")

    def __init__(self, request_id: int, branch: int, loop: asyncio.AbstractEventLoop) -> None:
        self.id = request_id
        self.branch = branch
        self.loop = loop
        self.deltas: list[Delta] = []
        self.finished: Finished | None = None
        self.info: Info | None = None
        self.raced: Raced | None = None
        self.error: BranchlineError | None = None
        self.wants_pieces = False
        self.abandoned = False
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return any(end is not None for end in (self.finished, self.info, self.raced, self.error))

    def deliver(self, delta: Delta) -> None:
        """New output came."""
        self.deltas.append(delta)
        if self.wants_pieces:
            self._wake()

    def finish(self, event: Finished) -> None:
        """It ended well."""
        self.finished = event
        self._wake()

    def inform(self, event: Info) -> None:
        """An inspection's answer came."""
        self.info = event
        self._wake()

    def end_race(self, event: Raced) -> None:
        """A race is over."""
        self.raced = event
        self._wake()

    def fail(self, err: BranchlineError) -> None:
        """It ended with an error."""
        self.error = err
        self._wake()

    def _wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self) -> None:
        """Wait until something comes that the waiter wants."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        self.waiters.append(waiter)
        try:
            await waiter
        finally:
            if not waiter.done() or waiter.cancelled():
                self.waiters = [other for other in self.waiters if other is not waiter]

    async def wait(self) -> None:
        """Wait until it ended. Raises its error."""
        while not self.ended:
            await self.changed()
        if self.error is not None:
            raise again(self.error)

    def result(self) -> Result:
        """All that came, put together; only once it ended well."""
        assert self.finished is not None
        logprobs: list[PositionLogprobs] = []
        for delta in self.deltas:
            logprobs.extend(delta.logprobs or ())
        return Result(
            text="".join([delta.text for delta in self.deltas]),
            tokens=tuple([token for delta in self.deltas for token in delta.tokens]),
            reason=self.finished.reason,
            usage=self.finished.usage,
            timing=self.finished.timing,
            stop=self.finished.stop,
            logprobs=tuple(logprobs) if logprobs else None,
        )


class Generation:
    """A generation under way. `await` it for its `Result`.

    It belongs to who holds it: cancelling the task that waits, or dropping the object, cancels the generation. It keeps its
    branch from being released as garbage.
    """

    __slots__ = ("__weakref__", "_branch", "_link", "_request")

    def __init__(self, branch: Branch, link: Link, request: Request) -> None:
        self._branch = branch
        self._link = link
        self._request = request
        weakref.finalize(self, link.drop_request_soon, request.id).atexit = False

    def __await__(self) -> Generator[object, None, Result]:
        return self.result().__await__()

    async def result(self) -> Result:
        """Wait for the end. Raises what made the generation fail. May be called often, also at the same time."""
        try:
            await self._request.wait()
        except asyncio.CancelledError:
            if not self._request.waiters:
                self.cancel()
            raise
        return self._request.result()

    def cancel(self) -> None:
        """Stop it by the next step. What waits for it gets a `Result` with the reason "cancelled"."""
        self._link.abandon(self._request.id)

    @property
    def branch(self) -> Branch:
        """The branch that it runs on."""
        return self._branch

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._request.ended

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that came until now."""
        return tuple([token for delta in self._request.deltas for token in delta.tokens])

    @property
    def num_tokens(self) -> int:
        """How many tokens came until now."""
        return sum([len(delta.tokens) for delta in self._request.deltas])

    def __repr__(self) -> str:
        state = "ended" if self.done else "running"
        return f"<{type(self).__name__} {self._request.id} on branch {self._request.branch}, {state}>"


class Stream(Generation):
    """A generation read while it runs: `async for text in stream`; then `await stream.result()` has all of it.

    A piece is never half a character, nor a part of a stop string. One reader at a time. Leaving an
    `async with branch.stream(…) as stream` cancels what still runs; so does dropping the object, also by `break`.
    """

    __slots__ = ("_read",)

    def __init__(self, branch: Branch, link: Link, request: Request) -> None:
        super().__init__(branch, link, request)
        request.wants_pieces = True
        self._read = 0

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """The next piece of text that isn't empty. Raises what made the generation fail."""
        request = self._request
        while True:
            while self._read < len(request.deltas):
                text = request.deltas[self._read].text
                self._read += 1
                if text:
                    return text
            if request.error is not None:
                raise again(request.error)
            if request.finished is not None:
                raise StopAsyncIteration
            try:
                await request.changed()
            except asyncio.CancelledError:
                self.cancel()
                raise

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()
