"""A branch: what an agent holds, forks, extends and asks."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack, overload

from branchline.agents.content import ContentLike, Generating, Serving, split_settings, to_content, to_params, to_service
from branchline.agents.errors import again
from branchline.agents.generation import Generation, Request, Stream
from branchline.agents.link import BranchState
from branchline.engine.errors import FailedBranchError, ForeignHandleError, InvalidParameterError, ReleasedBranchError
from branchline.engine.types import Adopt, Append, Cancel, Fork, Forked, Generate, Info, Inspect, Pin, Ready, SamplingParams
from branchline.orchestrator.protocol import BranchHandle

if TYPE_CHECKING:
    from branchline.agents.session import Session


class Branch:
    """A sequence of tokens whose K/V lies in the engine. `Session.context` makes the first, `fork` all others.

    Calls that take effect in the engine return at once; they happen in the order in which they were made, and what was
    wrong is raised by the call that waits for it: `ready`, `inspect`, a generation. Once `release` was called, or the
    session is lost, every call raises at once.

    A branch that is garbage is released. `with branch:` releases it at the end. It can't be pickled: `share` makes a handle
    that can.
    """

    __slots__ = ("__weakref__", "_finalizer", "_session", "_state")

    def __init__(self, session: Session, state: BranchState) -> None:
        self._session = session
        self._state = state
        self._finalizer = weakref.finalize(self, session._link.drop_branch_soon, state.id)
        self._finalizer.atexit = False

    # --- growing ----------------------------------------------------------------------------------------------------

    @overload
    def fork(self) -> Branch: ...
    @overload
    def fork(self, n: int) -> list[Branch]: ...
    def fork(self, n: int | None = None) -> Branch | list[Branch]:
        """Make a child, or a list of `n` children, that start with all that this branch holds. Copies no K/V.

        Costs no round trip: the children can be used at once. They start when all that was asked of this branch before has
        ended. The branch itself can go on, and be released, without effect on them.

        Raises InvalidParameterError (n < 1), ReleasedBranchError.
        """
        if n is None:
            return self._fork(1)[0]
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidParameterError(f"n = {n!r}: expected an integer >= 1", param="n")
        return self._fork(n)

    def _fork(self, count: int) -> list[Branch]:
        self._check()
        link = self._session._link
        first = link.next_branch
        link.post(Fork(self._state.id, first, count))
        link.next_branch += count
        states = [BranchState(branch_id) for branch_id in range(first, first + count)]
        link.branches.update((state.id, state) for state in states)
        self._state.children.extend(states)
        return [Branch(self._session, state) for state in states]

    def append(self, content: ContentLike, *, add_generation_prompt: bool | None = None, **service: Unpack[Serving]) -> Branch:
        """Put text, messages or token ids at the end (after what is being generated there). Returns this branch.

        `content.to_content` says what is taken; `service` how soon: `priority`, `qos`, `deadline_ms`. Raises
        InvalidParameterError, ReleasedBranchError.
        """
        self._check()
        made = to_content(content, add_generation_prompt=add_generation_prompt)
        self._session._link.post(Append(self._state.id, made, to_service(service)))
        self._state.owed += 1
        return self

    def adopt(self, child: Branch) -> Branch:
        """Make the child's state this branch's own, and give the child up. Copies no K/V. Returns this branch.

        Any branch of the session can be adopted. It takes effect when all that was asked of both before has ended; what this
        branch held before is given up. Its random stream stays its own.

        Raises InvalidParameterError (of itself), ForeignHandleError, ReleasedBranchError.
        """
        self._check()
        if child is self:
            raise InvalidParameterError("a branch can't adopt itself: name another branch", param="child")
        if child._session is not self._session:
            raise ForeignHandleError(f"{child!r} belongs to another session: a branch adopts one of its own session")
        child._check()
        link = self._session._link
        link.post(Adopt(self._state.id, child._state.id))
        self._state.owed += 1
        child._finalizer.detach()
        link.gave_up(child._state.id)
        return self

    def pin(self) -> Branch:
        """Keep the branch's pages while it lives, also when memory is short. Returns this branch."""
        return self._pin(True)

    def unpin(self) -> Branch:
        """Let the branch's pages be given up when it's idle and memory is short. Returns this branch."""
        return self._pin(False)

    def _pin(self, pinned: bool) -> Branch:
        self._check()
        self._session._link.post(Pin(self._state.id, pinned))
        return self

    def generate(self, params: SamplingParams | None = None, /, **settings: Unpack[Generating]) -> Generation:
        """Start to generate; `await` what comes back for the `Result`. The output stays at the end of the branch.

        Args:
            params: how to choose tokens and when to stop; None: the defaults.
            settings: single fields of `SamplingParams`, which take precedence; and how soon: `priority`, `qos`,
                `deadline_ms` (docs/scheduling.md).

        Raises InvalidParameterError, ReleasedBranchError.
        """
        return Generation(self, self._session._link, self._start(params, settings))

    def stream(self, params: SamplingParams | None = None, /, **settings: Unpack[Generating]) -> Stream:
        """Start to generate; iterate over what comes back for the text as it is made. Else like `generate`."""
        return Stream(self, self._session._link, self._start(params, settings))

    def _start(self, params: SamplingParams | None, settings: Generating) -> Request:
        self._check()
        sampling, serving = split_settings(settings)
        checked, service = to_params(params, sampling), to_service(serving)
        request = self._session._link.new_request(self._state.id)
        self._session._link.post(Generate(self._state.id, request.id, checked, service))
        return request

    # --- waiting ----------------------------------------------------------------------------------------------------

    async def ready(self) -> Branch:
        """Wait until all that was appended so far is computed, or the fork has taken effect. Returns this branch.

        Raises what made that fail, the first time; afterwards FailedBranchError, caused by it.
        """
        self._check()
        state, link = self._state, self._session._link
        owed = state.owed
        while state.answered < owed and state.error is None:
            link.raise_if_lost()
            waiter = link.loop.create_future()
            state.waiters.append((owed, waiter))
            await waiter
        if state.error is None:
            return self
        if state.told:
            raise FailedBranchError(f"branch {state.id} can't be used: {state.error.message}") from state.error
        state.told = not state.released
        raise again(state.error)

    async def inspect(self) -> Info:
        """The branch's sizes in tokens and pages, once all that was asked before has taken effect.

        Raises FailedBranchError, ReleasedBranchError.
        """
        self._check()
        request = self._session._link.new_request(self._state.id)
        self._session._link.post(Inspect(self._state.id, request.id))
        await request.wait()
        assert request.info is not None
        return request.info

    @property
    def last_ready(self) -> Ready | None:
        """What the last content that was computed took; None until there is one."""
        return self._state.ready

    @property
    def forked(self) -> Forked | None:
        """How the fork that made this branch went; None for a root, and until it took effect."""
        return self._state.forked

    # --- giving back ------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop what is generated, or waits to be, on this branch by the next step; the branch keeps what came.
        Generations that were stopped end with the reason "cancelled"."""
        self._check()
        self._session._link.post(Cancel(self._state.id))

    def release(self) -> None:
        """Give the branch up: what runs on it is stopped, its own pages return, its children live on.

        Raises ReleasedBranchError if it was released before.
        """
        self._check_unreleased()
        self._finalizer.detach()
        self._session._link.release((self._state.id,))

    @property
    def released(self) -> bool:
        """Whether it was given up."""
        return self._state.released

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        if not self._state.released:
            self.release()

    async def __aenter__(self) -> Branch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.__exit__(kind, err, tb)

    # --- names ------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """Its number in its session."""
        return self._state.id

    @property
    def session(self) -> Session:
        """The session that it belongs to."""
        return self._session

    async def share(self) -> BranchHandle:
        """A handle that others can attach to: `Session.attach` in any process that reaches the engine.

        Waits until the engine has accepted what was asked of this session before. The branch must not be released before
        the others have attached to it. Raises ReleasedBranchError.
        """
        self._check()
        await self._session._link.flush()
        return self.handle

    @property
    def handle(self) -> BranchHandle:
        """The branch's name, without waiting: good where this session sends what it was asked before others attach."""
        self._check()
        session = self._session
        return BranchHandle(session.app, session._link.opened.replica, session._link.opened.session, self._state.id)

    def _check(self) -> None:
        self._check_unreleased()
        self._session._link.raise_if_lost()

    def _check_unreleased(self) -> None:
        if self._state.released:
            raise ReleasedBranchError(f"branch {self._state.id} was released: fork or make another one before releasing it")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Branch can't be pickled: send `await branch.share()` and use Session.attach on the other side")

    def __repr__(self) -> str:
        note = ", released" if self._state.released else ", failed" if self._state.error is not None else ""
        return f"<Branch {self._state.id} of session {self._session.id[:8]}{note}>"
