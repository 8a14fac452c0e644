"""A session: one client's branches on one engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NoReturn, Unpack

from branchline.agents.branch import Branch
from branchline.agents.content import ContentLike, Serving, to_content, to_service
from branchline.agents.link import BranchState, Link
from branchline.agents.transport.base import Transport
from branchline.engine.errors import ForeignHandleError, InvalidParameterError, ReleasedBranchError, UnknownBranchError
from branchline.engine.types import Attach, Context, EngineStats, Fork, ModelInfo, Race
from branchline.orchestrator.protocol import BranchHandle, SessionOpened


class Session:
    """What `connect` gives. Belongs to the event loop in which it was opened, and to one thread.

    `async with` closes it at the end; closing releases all its branches. A session that is garbage is closed.
    """

    def __init__(self, transport: Transport, opened: SessionOpened, link: Link, *, app: str) -> None:
        self.app = app
        self._transport = transport
        self._opened = opened
        self._link = link
        weakref.finalize(self, link.close_soon).atexit = False

    @property
    def id(self) -> str:
        """The session's id; who knows it can use the session."""
        return self._opened.session

    @property
    def info(self) -> ModelInfo:
        """The served model and the engine's limits."""
        return self._opened.model

    @property
    def num_sends(self) -> int:
        """Command batches sent until now, keep-alive ones included."""
        return self._link.num_sends

    def context(
        self,
        content: ContentLike,
        *,
        add_generation_prompt: bool | None = None,
        pin: bool = False,
        **service: Unpack[Serving],
    ) -> Branch:
        """Make a root branch that holds a text, messages, or token ids. Returns at once; `Branch.ready` waits.

        Messages whose last one is the user's are followed by the opening of the assistant's turn, so that `generate`
        answers; pass `add_generation_prompt=False` if forks append more messages.

        Args:
            pin: keep its pages while it lives. Without, an idle branch may have to give them up where memory is short, and is
                computed again when it's next used.
            service: how soon: `priority`, `qos`, `deadline_ms` (see docs/scheduling.md).

        Raises InvalidParameterError, and what ended the session if something did.
        """
        made = to_content(content, add_generation_prompt=add_generation_prompt)
        how_soon = to_service(service)
        state = self._new_state()
        self._link.post(Context(state.id, made, pin, how_soon))
        return self._add(state)

    def attach(self, handle: BranchHandle) -> Branch:
        """A fork, in this session, of a branch of any session on the same engine.

        Args:
            handle: from `Branch.share`, here or in another process.

        Raises ForeignHandleError if the branch lies on another engine (`connect(handle)` opens a session there) or if a
        `Branch` is passed; UnknownBranchError for a branch that this session doesn't hold any more. What is wrong with a
        branch of another session is raised by the call that waits.
        """
        given: object = handle
        if not isinstance(given, BranchHandle):
            if isinstance(given, Branch):
                raise ForeignHandleError(
                    "attach takes a handle, not a Branch: pass `await branch.share()`, or use branch.fork()"
                )
            raise InvalidParameterError(f"handle: expected a BranchHandle, got {type(given).__name__}", param="handle")
        if handle.replica != self._opened.replica:
            raise ForeignHandleError(
                f"the branch lies on replica {handle.replica!r}, this session on {self._opened.replica!r}: "
                "open a session there with connect(handle)"
            )
        state = self._new_state()
        if handle.session == self.id:
            parent = self._link.branches.get(handle.branch)
            if parent is None:
                raise UnknownBranchError(f"branch {handle.branch} of this session was released or never made")
            self._link.post(Fork(handle.branch, state.id))
            parent.children.append(state)
        else:
            self._link.post(Attach(state.id, handle.session, handle.branch))
        return self._add(state)

    def release(self, *branches: Branch) -> None:
        """Release many branches by one command.

        Raises ForeignHandleError or ReleasedBranchError, and then releases none.
        """
        self._check_own(branches)
        for branch in branches:
            branch._finalizer.detach()
        if branches:
            self._link.release(tuple([branch.id for branch in branches]))

    async def race(self, branches: Sequence[Branch], winners: int = 1) -> list[Branch]:
        """Wait for the first `winners` of the branches whose generation ends by itself (not cancelled or failed).

        At the step at which that is known the others are released, and what runs on them is stopped: their generations end
        with the reason "cancelled". Ask for the generations first. A branch can be in one race at a time.

        Returns:
            The winners, in the order in which they ended; fewer than asked for if too few could win.

        Raises InvalidParameterError, ForeignHandleError, ReleasedBranchError.
        """
        self._check_own(branches)
        if not 1 <= winners <= len(branches):
            raise InvalidParameterError(
                f"winners = {winners} of {len(branches)} branches: expected 1 to all of them", param="winners"
            )
        by_id = {branch.id: branch for branch in branches}
        request = self._link.new_request(branches[0].id)
        self._link.post(Race(tuple(by_id), request.id, winners))
        await request.wait()
        assert request.raced is not None
        return [by_id[branch_id] for branch_id in request.raced.winners]

    def prune(self, branches: Iterable[Branch], where: Callable[[Branch], bool]) -> list[Branch]:
        """Release those of the branches for which `where` is true, in one command; what runs on them is stopped by the next
        step. Returns the others. Raises like `release`."""
        given = list(branches)
        losers = [branch for branch in given if where(branch)]
        self.release(*losers)
        return [branch for branch in given if branch not in losers]

    async def flush(self) -> None:
        """Wait until the engine has accepted all that was asked before. Raises what ended the session."""
        await self._link.flush()

    async def stats(self) -> EngineStats:
        """The engine's counters. Raises TransportError, SessionClosedError."""
        self._link.raise_if_lost()
        return await self._transport.stats()

    async def aclose(self) -> None:
        """Close the session: all its branches are released, calls that wait raise SessionClosedError. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        await self.aclose()

    def _check_own(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            if branch.session is not self:
                raise ForeignHandleError(f"{branch!r} belongs to another session: name it there")
            if branch.released:
                raise ReleasedBranchError(f"branch {branch.id} was released already")
        if len({branch.id for branch in branches}) != len(branches):
            raise ReleasedBranchError("a branch is named twice: expected each once")

    def _new_state(self) -> BranchState:
        self._link.raise_if_lost()
        state = BranchState(self._link.next_branch)
        self._link.next_branch += 1
        return state

    def _add(self, state: BranchState) -> Branch:
        self._link.branches[state.id] = state
        return Branch(self, state)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Session can't be pickled: open one with connect() in the other process")

    def __repr__(self) -> str:
        return f"<Session {self.id[:8]} on {self.info.name}, {len(self._link.branches)} branches>"
