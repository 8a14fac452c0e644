"""A session: one client's branches on one engine."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import NoReturn

from branchline.agents.branch import Branch
from branchline.agents.content import ContentLike, to_content
from branchline.agents.link import BranchState, Link
from branchline.agents.transport.base import Transport
from branchline.engine.errors import ForeignHandleError, InvalidParameterError, ReleasedBranchError, UnknownBranchError
from branchline.engine.types import Attach, Context, EngineStats, Fork, ModelInfo
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

    def context(self, content: ContentLike, *, add_generation_prompt: bool | None = None) -> Branch:
        """Make a root branch that holds a text, messages, or token ids. Returns at once; `Branch.ready` waits.

        Messages whose last one is the user's are followed by the opening of the assistant's turn, so that `generate`
        answers; pass `add_generation_prompt=False` if forks append more messages.

        Raises InvalidParameterError, and what ended the session if something did.
        """
        made = to_content(content, add_generation_prompt=add_generation_prompt)
        state = self._new_state()
        self._link.post(Context(state.id, made))
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
        for branch in branches:
            if branch.session is not self:
                raise ForeignHandleError(f"{branch!r} belongs to another session: release it there")
            if branch.released:
                raise ReleasedBranchError(f"branch {branch.id} was released already")
        if len({branch.id for branch in branches}) != len(branches):
            raise ReleasedBranchError("a branch is named twice: each can be released once")
        for branch in branches:
            branch._finalizer.detach()
        if branches:
            self._link.release(tuple([branch.id for branch in branches]))

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
