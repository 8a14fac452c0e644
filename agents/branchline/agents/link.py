"""One session's outbox and event demultiplexer: commands go out in coalesced batches, events come back to their branches.

Everything runs on the session's event loop, but for `*_soon`, which finalisers call from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from functools import partial

from branchline.agents.errors import ConnectionLostError, SessionClosedError, again
from branchline.agents.generation import Request
from branchline.agents.transport.base import Transport
from branchline.engine.errors import (
    BranchlineError,
    CapacityError,
    FailedBranchError,
    InvalidRequestError,
    ReleasedBranchError,
    SessionNotFoundError,
)
from branchline.engine.types import (
    Adopt,
    Adopted,
    Append,
    Attach,
    Cancel,
    Command,
    Context,
    Delta,
    Event,
    Failed,
    Finished,
    Fork,
    Forked,
    Generate,
    Info,
    Inspect,
    Pin,
    Race,
    Raced,
    Ready,
    Release,
)
from branchline.orchestrator.protocol import SessionOpened

PINGS_PER_TIMEOUT = 3


class BranchState:
    """What a session knows of one branch.

    Attributes:
        owed, answered: commands that make or fill the branch: how many were posted, how many took effect.
        ready, forked: the last event of each kind.
        error: why the branch is unusable; `told`: a call has raised it already.
    """

    __slots__ = ("answered", "children", "error", "forked", "id", "owed", "ready", "released", "told", "waiters")

    def __init__(self, branch_id: int) -> None:
        self.id = branch_id
        self.owed = 1
        self.answered = 0
        self.ready: Ready | None = None
        self.forked: Forked | None = None
        self.error: BranchlineError | None = None
        self.told = False
        self.released = False
        self.children: list[BranchState] = []
        self.waiters: list[tuple[int, asyncio.Future[None]]] = []

    def answer(self) -> None:
        """One owed command took effect."""
        self.answered += 1
        if self.waiters:
            due = [waiter for count, waiter in self.waiters if count <= self.answered]
            self.waiters = [(count, waiter) for count, waiter in self.waiters if count > self.answered]
            for waiter in due:
                wake(waiter)

    def fail(self, err: BranchlineError) -> None:
        """Make the branch, and the children whose fork hasn't taken effect, unusable. The first error stays."""
        pending = [self]
        while pending:
            state = pending.pop()
            if state.error is None:
                state.error = err if state is self else _inherited(err)
            pending.extend(child for child in state.children if child.forked is None)
            state.children = []
            state.wake_all()

    def wake_all(self) -> None:
        """Let all waiting calls look again."""
        waiters, self.waiters = self.waiters, []
        for _, waiter in waiters:
            wake(waiter)


def _inherited(err: BranchlineError) -> FailedBranchError:
    failed = FailedBranchError(f"the branch that this one was forked from failed: {err.message}")
    failed.__cause__ = err
    return failed


def wake(waiter: asyncio.Future[None]) -> None:
    """Finish a future that may have been cancelled in the meantime."""
    if not waiter.done():
        waiter.set_result(None)


class Link:
    """Posts commands, and gives events to branches and requests. `lost` is set once, when no more can come."""

    def __init__(self, transport: Transport, opened: SessionOpened, *, on_close: Callable[[], None] | None) -> None:
        self.opened = opened
        self.loop = asyncio.get_running_loop()
        self.lost: BranchlineError | None = None
        self.branches: dict[int, BranchState] = {}
        self.requests: dict[int, Request] = {}
        self.next_branch = 0
        self.next_request = 0
        self.num_sends = 0
        self._transport = transport
        self._on_close = on_close
        self._outbox: list[Command] = []
        self._posted = 0
        self._accepted = 0
        self._flushers: list[tuple[int, asyncio.Future[None]]] = []
        self._wake_sender = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        # In a context of their own: where a session is opened within a Serve request, Serve cancels what the request started
        # when its client leaves.
        self._sender = self.loop.create_task(self._send(), name="branchline-send", context=contextvars.Context())
        self._reader = self.loop.create_task(self._read(), name="branchline-read", context=contextvars.Context())

    # --- commands ---------------------------------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Queue a command; it leaves with all others that are posted before the loop turns. Raises what `lost` says."""
        self.raise_if_lost()
        self._outbox.append(command)
        self._posted += 1
        self._wake_sender.set()

    def new_request(self, branch_id: int) -> Request:
        """A request that waits for its answer. Raises what `lost` says."""
        self.raise_if_lost()
        request = Request(self.next_request, branch_id, self.loop)
        self.next_request += 1
        self.requests[request.id] = request
        return request

    def raise_if_lost(self) -> None:
        """Raise why the session can't be used any more, if it can't."""
        if self.lost is None and self.loop.is_closed():
            self.lose(SessionClosedError("the session's event loop has ended: open a session inside the loop that uses it"))
        if self.lost is not None:
            raise again(self.lost)

    async def flush(self) -> None:
        """Wait until the engine has accepted everything that was posted before. Raises what `lost` says."""
        self.raise_if_lost()
        target = self._posted
        if self._accepted < target:
            waiter = self.loop.create_future()
            self._flushers.append((target, waiter))
            await waiter
            if self._accepted < target:
                self.raise_if_lost()

    async def _send(self) -> None:
        interval_s = self.opened.timeout_s / PINGS_PER_TIMEOUT
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake_sender.wait()
            self._wake_sender.clear()
            batch, self._outbox = self._outbox, []
            try:
                self.num_sends += 1
                await self._transport.send(batch)
            except (CapacityError, InvalidRequestError) as err:
                self._refused(batch, err)
            except Exception as err:  # whatever a transport raises, the calls that wait must hear of it
                self._lose_by(err)
                return
            self._accepted += len(batch)
            due = [waiter for target, waiter in self._flushers if target <= self._accepted]
            self._flushers = [(target, waiter) for target, waiter in self._flushers if target > self._accepted]
            for waiter in due:
                wake(waiter)

    def _refused(self, batch: list[Command], err: BranchlineError) -> None:
        """None of the batch took effect: tell those who wait for it. What gives things back is sent again later."""
        for command in batch:
            match command:
                case Context() | Append() | Attach() | Adopt():
                    self._fail_branch(command.branch, err)
                case Fork():
                    for branch_id in range(command.first, command.first + command.count):
                        self._fail_branch(branch_id, err)
                case Generate() | Inspect() | Race():
                    self._fail_request(command.request, err)
                case Cancel() | Release() | Pin():
                    self._outbox.append(command)
                    self._posted += 1

    # --- events -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            async for batch in self._transport.events():
                for event in batch.events:
                    self._dispatch(event)
                if batch.error is not None:
                    raise batch.error.exception()
        except asyncio.CancelledError:
            self.lose(SessionClosedError("the session was closed"))
            raise
        except Exception as err:  # whatever a transport raises, the calls that wait must hear of it
            self._lose_by(err)
        else:
            self.lose(SessionNotFoundError("the engine closed the session; open a new one"))

    def _dispatch(self, event: Event) -> None:
        match event:
            case Delta():
                request = self.requests.get(event.request)
                if request is not None:
                    request.deliver(event)
            case Finished():
                request = self.requests.pop(event.request, None)
                if request is not None:
                    request.finish(event)
            case Ready():
                state = self.branches.get(event.branch)
                if state is not None:
                    state.ready = event
                    state.answer()
            case Forked():
                self._forked(event)
            case Adopted():
                state = self.branches.get(event.branch)
                if state is not None:
                    state.answer()
            case Raced():
                for branch_id in event.losers:
                    self.gave_up(branch_id)
                request = self.requests.pop(event.request, None)
                if request is not None:
                    request.end_race(event)
            case Info():
                request = self.requests.pop(event.request, None)
                if request is not None:
                    request.inform(event)
            case Failed():
                err = event.error.exception()
                if event.request is None:
                    self._fail_branch(event.branch, err)
                else:
                    self._fail_request(event.request, err)

    def _forked(self, event: Forked) -> None:
        for branch_id in range(event.first, event.first + event.count):
            state = self.branches.get(branch_id)
            if state is not None and state.forked is None:
                state.forked = event
                state.answer()
        parent = self.branches.get(event.parent)
        if parent is not None and parent.children:
            parent.children = [child for child in parent.children if child.forked is None]

    def _fail_branch(self, branch_id: int, err: BranchlineError) -> None:
        state = self.branches.get(branch_id)
        if state is not None:
            state.fail(err)

    def _fail_request(self, request_id: int, err: BranchlineError) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        state = self.branches.get(request.branch)
        if state is not None and state.error is not None and isinstance(err, FailedBranchError):
            err.__cause__ = state.error
        request.fail(err)

    # --- giving back ------------------------------------------------------------------------------------------------

    def release(self, branch_ids: tuple[int, ...]) -> None:
        """Release branches in one command; calls that wait for them raise ReleasedBranchError."""
        if self.lost is None:
            self.post(Release(branch_ids))
        for branch_id in branch_ids:
            self.gave_up(branch_id)

    def gave_up(self, branch_id: int) -> None:
        """A branch is gone in the engine, or will be in its turn."""
        state = self.branches.pop(branch_id, None)
        if state is not None:
            state.released = True
            if state.error is None:
                state.error = ReleasedBranchError(f"branch {branch_id} was released while a call waited for it")
            state.wake_all()

    def abandon(self, request_id: int) -> None:
        """Cancel a generation that nobody waits for. One that shares its branch with another live one runs on."""
        request = self.requests.get(request_id)
        if request is None or request.abandoned or self.lost is not None or request.branch not in self.branches:
            return
        request.abandoned = True
        if sum(other.branch == request.branch for other in self.requests.values()) == 1:
            self.post(Cancel(request.branch))

    def drop_branch_soon(self, branch_id: int) -> None:
        """A branch object was garbage: release it. Any thread."""
        if branch_id in self.branches:
            self._soon(self._drop_branch, branch_id)

    def drop_request_soon(self, request_id: int) -> None:
        """A generation object was garbage: cancel it. Any thread."""
        if request_id in self.requests:
            self._soon(self.abandon, request_id)

    def close_soon(self) -> None:
        """The session object was garbage: close it. Any thread."""
        self._soon(self._start_closing)

    def _soon(self, function: Callable[..., object], *args: int) -> None:
        if self.lost is None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: its session went with it
                self.loop.call_soon_threadsafe(function, *args)

    def _drop_branch(self, branch_id: int) -> None:
        if branch_id in self.branches and self.lost is None:
            self.release((branch_id,))

    # --- the end ----------------------------------------------------------------------------------------------------

    def _lose_by(self, err: Exception) -> None:
        if isinstance(err, BranchlineError):
            self.lose(err)
            return
        lost = ConnectionLostError(f"the connection to the engine broke: {err!r}")
        lost.__cause__ = err
        self.lose(lost)

    def lose(self, err: BranchlineError) -> None:
        """End: every call that waits raises `err`, and so does every later one. The first error stays."""
        if self.lost is not None:
            return
        self.lost = err
        if self.loop.is_closed():
            return
        requests, self.requests = self.requests, {}
        for request in requests.values():
            request.fail(err)
        for state in self.branches.values():
            state.wake_all()
        for _, waiter in self._flushers:
            wake(waiter)
        for task in (self._sender, self._reader):
            if task is not _current_task():
                task.cancel()

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = self.loop.create_task(self._close(), name="branchline-close")
        return self._closing

    async def close(self) -> None:
        """Close the session and all that it holds. Idempotent."""
        await asyncio.shield(self._start_closing())

    async def _close(self) -> None:
        self.lose(SessionClosedError("the session was closed"))
        await asyncio.gather(self._sender, self._reader, return_exceptions=True)
        try:
            await self._transport.close()
        finally:
            if self._on_close is not None:
                await self.loop.run_in_executor(None, partial(self._on_close))


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
