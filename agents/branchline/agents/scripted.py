"""What commands do to a scripted engine's branches. No thread and no lock: `testing.ScriptedEngine` has those."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from branchline.engine.errors import (
    BranchlineError,
    DuplicateBranchError,
    EngineError,
    FailedBranchError,
    InvalidParameterError,
    ReleasedBranchError,
    UnknownBranchError,
)
from branchline.engine.types import (
    Adopt,
    Adopted,
    Append,
    Attach,
    Cancel,
    Command,
    Content,
    Context,
    Delta,
    ErrorInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
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
    Text,
    Timing,
    TokenIds,
    Usage,
)

Reply = Callable[[str], str | Iterable[str]]
Sink = Callable[[tuple[Event, ...]], None]

PAGE_TOKENS = 16
DEFAULT_MAX_TOKENS = 512


def pieces_of(text: str) -> list[str]:
    """The text's tokens: words with the white space before them."""
    return re.findall(r"\s*\S+|\s+$", text)


@dataclass(eq=False)
class Run:
    """A generation under way: where its pieces come from, and what was given out. `held`: text that may begin a stop."""

    command: Generate
    pieces: Iterator[str]
    submitted: float
    prompt_tokens: int
    shared_tokens: int
    count: int = 0
    first_at: float | None = None
    held: str = ""


@dataclass(eq=False)
class ForkInto:
    children: list[ScriptedBranch]
    first: int


@dataclass(eq=False)
class AdoptFrom:
    child: ScriptedBranch


@dataclass(eq=False)
class ScriptedRace:
    """A race: who may still win, and who has won."""

    command: Race
    session: ScriptedSession
    branches: list[ScriptedBranch]
    still_in: set[ScriptedBranch]
    winners: list[int] = field(default_factory=list)


@dataclass(eq=False)
class ScriptedBranch:
    session: ScriptedSession
    id: int
    pieces: list[str] = field(default_factory=list)
    shared: int = 0
    depth: int = 0
    made: bool = False
    released: bool = False
    error: BranchlineError | None = None
    queue: deque[Context | Append | Generate | Inspect | Pin | ForkInto | AdoptFrom] = field(default_factory=deque)
    run: Run | None = None
    adopter: ScriptedBranch | None = None
    race: ScriptedRace | None = None


@dataclass(eq=False)
class ScriptedSession:
    id: str
    sink: Sink
    heard: float
    branches: dict[int, ScriptedBranch] = field(default_factory=dict)
    next_id: int = 0
    outbox: list[Event] = field(default_factory=list)


class ScriptedBranches:
    """The sessions of a scripted engine and what runs on their branches."""

    def __init__(self, reply: Reply) -> None:
        self.sessions: dict[str, ScriptedSession] = {}
        self.running: list[ScriptedBranch] = []
        self.prefill_tokens = self.decode_tokens = self.forks = 0
        self._reply = reply
        self._token_ids: dict[str, int] = {}
        self._texts: list[str] = []

    def apply(self, session: ScriptedSession, command: Command) -> None:
        """Take one command; what was wrong with it leaves as a `Failed` event."""
        match command:
            case Context():
                branch = self._new(session, command.branch)
                if branch is not None:
                    branch.made = True
                    branch.queue.append(command)
                    self._pump(branch)
            case Fork():
                self._fork(session, command)
            case Attach():
                self._attach(session, command)
            case Cancel():
                self._cancel(session, command.branch)
            case Release():
                for branch_id in command.branches:
                    self._release(session, branch_id)
            case Adopt():
                self._adopt(session, command)
            case Race():
                self._race(session, command)
            case Append() | Generate() | Inspect() | Pin():
                try:
                    branch = self._branch(session, command.branch)
                except BranchlineError as err:
                    request = command.request if isinstance(command, Generate | Inspect) else None
                    _fail(session, command.branch, err, request)
                else:
                    branch.queue.append(command)
                    self._pump(branch)

    def release_all(self, session: ScriptedSession) -> None:
        """The session is closed: give up all that it has."""
        for branch_id in list(session.branches):
            self._release(session, branch_id)

    def _new(self, session: ScriptedSession, branch_id: int) -> ScriptedBranch | None:
        if branch_id < session.next_id:
            _fail(
                session,
                branch_id,
                DuplicateBranchError(f"branch id {branch_id} is taken: ids ascend, the next is {session.next_id}"),
            )
            return None
        session.next_id = branch_id + 1
        branch = session.branches[branch_id] = ScriptedBranch(session, branch_id)
        return branch

    def _branch(self, session: ScriptedSession, branch_id: int) -> ScriptedBranch:
        branch = session.branches.get(branch_id)
        if branch is not None:
            return branch
        if branch_id < session.next_id:
            raise ReleasedBranchError(f"branch {branch_id} was released")
        raise UnknownBranchError(f"no branch {branch_id} in this session")

    def _fork(self, session: ScriptedSession, command: Fork) -> None:
        if command.count < 1:
            err = InvalidParameterError(f"count = {command.count}: expected at least 1", param="count")
            _fail(session, command.parent, err)
            return
        made = [self._new(session, branch_id) for branch_id in range(command.first, command.first + command.count)]
        children = [child for child in made if child is not None]
        try:
            parent = self._branch(session, command.parent)
        except BranchlineError as err:
            self._poison(children, err)
            return
        parent.queue.append(ForkInto(children, command.first))
        self._pump(parent)

    def _attach(self, session: ScriptedSession, command: Attach) -> None:
        child = self._new(session, command.branch)
        if child is None:
            return
        owner = self.sessions.get(command.source_session)
        try:
            if owner is None:
                raise UnknownBranchError(f"branch {command.source} of another session: that session is closed")
            source = self._branch(owner, command.source)
        except BranchlineError as err:
            self._poison([child], err)
            return
        source.queue.append(ForkInto([child], command.branch))
        self._pump(source)

    def _adopt(self, session: ScriptedSession, command: Adopt) -> None:
        try:
            branch, child = self._branch(session, command.branch), self._branch(session, command.child)
        except BranchlineError as err:
            _fail(session, command.branch, err)
            return
        del session.branches[child.id]
        child.adopter = branch
        branch.queue.append(AdoptFrom(child))
        self._pump(branch)

    def _race(self, session: ScriptedSession, command: Race) -> None:
        try:
            branches = [self._branch(session, branch_id) for branch_id in command.branches]
            if not 1 <= command.winners <= len(branches):
                raise InvalidParameterError(f"winners = {command.winners} of {len(branches)} branches", param="winners")
        except BranchlineError as err:
            _fail(session, command.branches[0] if command.branches else 0, err, command.request)
            return
        race = ScriptedRace(command, session, branches, set(branches))
        for branch in branches:
            branch.race = race

    def _leave_race(self, branch: ScriptedBranch, won: bool) -> None:
        race, branch.race = branch.race, None
        if race is None:
            return
        race.still_in.discard(branch)
        if won:
            race.winners.append(branch.id)
        if len(race.winners) < race.command.winners and race.still_in:
            return
        losers = [other for other in race.branches if other.id not in race.winners and not other.released]
        for other in race.branches:
            other.race = None
        for loser in losers:
            self._release(race.session, loser.id)
        race.session.outbox.append(Raced(race.command.request, tuple(race.winners), tuple([loser.id for loser in losers])))

    def _cancel(self, session: ScriptedSession, branch_id: int) -> None:
        try:
            branch = self._branch(session, branch_id)
        except BranchlineError as err:
            _fail(session, branch_id, err)
            return
        for queued in [queued for queued in branch.queue if isinstance(queued, Generate)]:
            branch.queue.remove(queued)
            nothing = Finished(branch_id, queued.request, "cancelled", Usage(0, 0, 0), Timing(0.0, 0.0, 0.0))
            session.outbox.append(nothing)
        if branch.run is not None:
            self._finish(branch, branch.run, "cancelled")
        self._pump(branch)

    def _release(self, session: ScriptedSession, branch_id: int) -> None:
        try:
            branch = self._branch(session, branch_id)
        except BranchlineError as err:
            _fail(session, branch_id, err)
            return
        del session.branches[branch_id]
        branch.released = True
        # Forks that were asked for before still take effect.
        kept = max((i + 1 for i, queued in enumerate(branch.queue) if isinstance(queued, ForkInto)), default=0)
        while len(branch.queue) > kept:
            queued = branch.queue.pop()
            if isinstance(queued, Generate | Inspect):
                _fail(session, branch_id, ReleasedBranchError(f"branch {branch_id} was released"), queued.request)
            elif isinstance(queued, AdoptFrom):
                self._end_adopted(queued.child)
        if branch.run is not None and not kept:
            self._finish(branch, branch.run, "cancelled")
        self._leave_race(branch, False)

    def _end_adopted(self, child: ScriptedBranch) -> None:
        child.released = True
        if child.run is not None:
            self._finish(child, child.run, "cancelled")

    # --- a branch's turns -------------------------------------------------------------------------------------------

    def _pump(self, branch: ScriptedBranch) -> None:
        """Let queued commands take effect until a generation runs."""
        while branch.queue and branch.run is None and (branch.made or branch.error is not None):
            command = branch.queue.popleft()
            session = branch.session
            if branch.error is not None:
                err = FailedBranchError(f"branch {branch.id} failed before: {branch.error.message}")
                if isinstance(command, ForkInto):
                    self._poison(command.children, err)
                elif isinstance(command, AdoptFrom):
                    self._end_adopted(command.child)
                    _fail(session, branch.id, err)
                else:
                    _fail(session, branch.id, err, command.request if isinstance(command, Generate | Inspect) else None)
                continue
            match command:
                case AdoptFrom(child=child):
                    if child.error is None and (child.run is not None or child.queue or not child.made):
                        branch.queue.appendleft(command)
                        return
                    if child.error is not None:
                        self._poison([branch], FailedBranchError(f"branch {child.id} failed before: {child.error.message}"))
                        continue
                    branch.pieces, branch.shared, branch.depth = child.pieces, child.shared, child.depth
                    child.released = True
                    session.outbox.append(Adopted(branch.id, child.id, len(branch.pieces)))
                case Pin():
                    pass  # a scripted engine's memory is never short
                case Context() | Append():
                    try:
                        added = pieces_of(self.text_of(command.content))
                    except BranchlineError as err:
                        self._poison([branch], err)
                        continue
                    branch.pieces.extend(added)
                    self.prefill_tokens += len(added)
                    session.outbox.append(Ready(branch.id, len(branch.pieces), len(added), 0.0))
                case ForkInto():
                    self._fork_now(branch, command)
                case Inspect():
                    session.outbox.append(_info(branch, command.request))
                case Generate():
                    self._start(branch, command)
        if branch.adopter is not None and not branch.queue and branch.run is None:
            adopter, branch.adopter = branch.adopter, None
            self._pump(adopter)

    def _fork_now(self, parent: ScriptedBranch, command: ForkInto) -> None:
        self.forks += len(command.children)
        for child in command.children:
            child.pieces = list(parent.pieces)
            child.shared = len(parent.pieces)
            child.depth = parent.depth + 1
            child.made = True
        parent.shared = len(parent.pieces)
        if command.children:
            forked = Forked(parent.id, command.first, len(command.children), 1e-6)
            command.children[0].session.outbox.append(forked)
        for child in command.children:
            self._pump(child)

    def _start(self, branch: ScriptedBranch, command: Generate) -> None:
        try:
            command.params.validate()
            reply = self._reply("".join(branch.pieces))
        except BranchlineError as err:
            _fail(branch.session, branch.id, err, command.request)
            return
        except Exception as err:  # the user's function may raise anything; its generation fails, the engine goes on
            _fail(branch.session, branch.id, EngineError(f"the reply function raised {err!r}"), command.request)
            return
        pieces = iter(pieces_of(reply) if isinstance(reply, str) else reply)
        branch.run = Run(command, pieces, time.monotonic(), len(branch.pieces), branch.shared)
        self.running.append(branch)

    def advance(self, branch: ScriptedBranch) -> None:
        """One token of a running generation."""
        run = branch.run
        if run is None:
            return
        try:
            piece = next(run.pieces, None)
        except Exception as err:  # as in `_start`
            failure = err if isinstance(err, BranchlineError) else EngineError(f"the reply function raised {err!r}")
            self._end(branch)
            _fail(branch.session, branch.id, failure, run.command.request)
            self._pump(branch)
            return
        if piece is None:
            self._finish(branch, run, "stop", stop=0)
            return
        run.first_at = run.first_at or time.monotonic()
        run.count += 1
        self.decode_tokens += 1
        branch.pieces.append(piece)
        params = run.command.params
        text = run.held + piece
        found = [(text.index(stop), stop) for stop in params.stop if stop in text]
        stopped = min(found)[1] if found else None
        if stopped is not None:
            text, run.held = text[: text.index(stopped)], ""
        else:
            keep = max((_overlap(text, stop) for stop in params.stop), default=0)
            text, run.held = text[: len(text) - keep], text[len(text) - keep :]
        branch.session.outbox.append(Delta(branch.id, run.command.request, (self.token_id(piece),), text))
        if stopped is not None:
            self._finish(branch, run, "stop", stop=stopped)
        elif run.count >= (params.max_tokens or DEFAULT_MAX_TOKENS):
            self._finish(branch, run, "length")

    def _finish(self, branch: ScriptedBranch, run: Run, reason: FinishReason, stop: str | int | None = None) -> None:
        self._end(branch)
        if run.held:
            branch.session.outbox.append(Delta(branch.id, run.command.request, (), run.held))
        now = time.monotonic()
        usage = Usage(run.prompt_tokens, run.count, run.shared_tokens)
        timing = Timing(0.0, (run.first_at or now) - run.submitted, now - run.submitted)
        branch.session.outbox.append(Finished(branch.id, run.command.request, reason, usage, timing, stop))
        self._leave_race(branch, reason != "cancelled")
        self._pump(branch)

    def _end(self, branch: ScriptedBranch) -> None:
        branch.run = None
        self.running.remove(branch)

    def _poison(self, branches: Iterable[ScriptedBranch], err: BranchlineError) -> None:
        for branch in branches:
            branch.error = err
            _fail(branch.session, branch.id, err)
            self._pump(branch)

    # --- text and tokens --------------------------------------------------------------------------------------------

    def text_of(self, content: Content) -> str:
        """The text that a content adds to a branch. Raises InvalidParameterError for a token id that was never given out."""
        if isinstance(content, Text):
            return content.text
        if isinstance(content, TokenIds):
            try:
                return "".join([self._texts[token - 1] for token in content.ids if token])
            except IndexError:
                raise InvalidParameterError(f"token ids {content.ids}: not all were given out", param="ids") from None
        lines = [f"{message.role}: {message.content or ''}\n" for message in content.messages]
        return "".join(lines) + ("assistant:" if content.add_generation_prompt else "")

    def token_id(self, piece: str) -> int:
        """The id of a piece; 0 is the end."""
        if piece not in self._token_ids:
            self._texts.append(piece)
            self._token_ids[piece] = len(self._texts)
        return self._token_ids[piece]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that may begin the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _info(branch: ScriptedBranch, request: int) -> Info:
    private = len(branch.pieces) - branch.shared
    return Info(
        branch=branch.id,
        request=request,
        num_tokens=len(branch.pieces),
        shared_tokens=branch.shared,
        shared_pages=-(-branch.shared // PAGE_TOKENS),
        private_pages=-(-private // PAGE_TOKENS),
        depth=branch.depth,
    )


def _fail(session: ScriptedSession, branch_id: int, err: BranchlineError, request: int | None = None) -> None:
    session.outbox.append(Failed(branch_id, ErrorInfo(err.code, err.message, err.param), request))
