"""A deterministic engine without a model, for tests of programs that use the SDK.

    engine = ScriptedEngine(lambda prompt: "yes" if "?" in prompt else "no")
    async with connect(engine) as session:
        assert (await session.context("Is it?").generate()).text == "yes"

It does what the real engine does with commands, branches and errors; only the tokens come from a function. One token is one
piece: a word with the white space before it. Messages read as "role: content" lines.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from branchline.engine.errors import (
    BranchlineError,
    DuplicateBranchError,
    EngineClosedError,
    EngineError,
    FailedBranchError,
    InvalidParameterError,
    ReleasedBranchError,
    SessionNotFoundError,
    UnknownBranchError,
)
from branchline.engine.types import (
    Append,
    Attach,
    Cancel,
    Command,
    Content,
    Context,
    Delta,
    EngineStats,
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
    ModelInfo,
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
PAGE_BYTES = 16384
NUM_PAGES = 4096
DEFAULT_MAX_TOKENS = 512


def pieces_of(text: str) -> list[str]:
    """The text's tokens: words with the white space before them."""
    return re.findall(r"\s*\S+|\s+$", text)


@dataclass(eq=False)
class _Run:
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
class _ForkInto:
    children: list[_Branch]
    first: int


@dataclass(eq=False)
class _Branch:
    session: _Session
    id: int
    pieces: list[str] = field(default_factory=list)
    shared: int = 0
    depth: int = 0
    made: bool = False
    released: bool = False
    error: BranchlineError | None = None
    queue: deque[Context | Append | Generate | Inspect | _ForkInto] = field(default_factory=deque)
    run: _Run | None = None


@dataclass(eq=False)
class _Session:
    id: str
    sink: Sink
    heard: float
    branches: dict[int, _Branch] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    outbox: list[Event] = field(default_factory=list)


class ScriptedEngine:
    """Answers by a function of the branch's whole text.

    Args:
        reply: gives the text to generate, or its pieces one by one (also without end); a BranchlineError that it raises
            fails the generation.
        step_s: seconds of a step; in each, every running generation gets one token.
        session_timeout_s: a session from which nothing was heard for so long is closed.
    """

    def __init__(self, reply: Reply, *, step_s: float = 0.0, session_timeout_s: float = 60.0) -> None:
        self.info = ModelInfo(
            name="scripted",
            architecture="scripted",
            num_parameters=0,
            vocab_size=2**31 - 1,
            context_length=2**20,
            dtype="float32",
            attention="none",
            device="cpu",
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
            num_pages=NUM_PAGES,
            max_batch=4096,
        )
        self._reply = reply
        self._step_s = step_s
        self._session_timeout_s = session_timeout_s
        self._sessions: dict[str, _Session] = {}
        self._token_ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._inbox: deque[tuple[_Session, tuple[Command, ...]]] = deque()
        self._running: list[_Branch] = []
        self._wake = threading.Condition()
        self._closed = False
        self._steps = self._prefill_tokens = self._decode_tokens = self._forks = 0
        self._idle_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="scripted-engine", daemon=True)
        self._thread.start()

    # --- what clients call, from any thread -------------------------------------------------------------------------

    def open_session(self, sink: Sink, client: str = "") -> str:
        """Make a session; `sink` gets the events of each step, in the engine's thread. Raises EngineClosedError."""
        with self._wake:
            self._raise_if_closed()
            session = _Session(secrets.token_hex(16), sink, time.monotonic())
            self._sessions[session.id] = session
        return session.id

    def submit(self, session: str, commands: Sequence[Command]) -> None:
        """Take commands, in order. Raises SessionNotFoundError, EngineClosedError."""
        with self._wake:
            found = self._find(session)
            self._inbox.append((found, tuple(commands)))
            self._wake.notify()

    def touch(self, session: str) -> None:
        """Tell that the session's client lives. Raises SessionNotFoundError, EngineClosedError."""
        with self._wake:
            self._find(session)

    def close_session(self, session: str) -> None:
        """Release all that the session has. Closing one that is gone does nothing."""
        with self._wake:
            found = self._sessions.pop(session, None)
            if found is not None:
                self._inbox.append((found, (Release(tuple(found.branches)),)))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """Counters since the start, and what is there now."""
        with self._wake:
            branches = [branch for session in self._sessions.values() for branch in session.branches.values()]
            held = sum(-(-(len(branch.pieces) - branch.shared) // PAGE_TOKENS) for branch in branches)
            return EngineStats(
                steps=self._steps,
                prefill_tokens=self._prefill_tokens,
                decode_tokens=self._decode_tokens,
                forks=self._forks,
                branches=len(branches),
                running=len(self._running),
                waiting=sum(len(branch.queue) for branch in branches),
                sessions=len(self._sessions),
                pages_free=NUM_PAGES - held,
                pages_total=NUM_PAGES,
                copied_bytes=0,
                tensor_s=0.0,
                plan_s=0.0,
                python_s=0.0,
                idle_s=self._idle_s,
            )

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, session: str) -> _Session:
        self._raise_if_closed()
        found = self._sessions.get(session)
        if found is None:
            raise SessionNotFoundError(f"no session {session[:8]}…: closed, expired or never opened; open a new one")
        found.heard = time.monotonic()
        return found

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                began = time.perf_counter()
                if not self._inbox and not self._running and not self._closed:
                    self._wake.wait(self._session_timeout_s)
                self._idle_s += time.perf_counter() - began
                if self._closed:
                    self._sessions.clear()
                    return
                self._expire()
                touched = {session.id: session for session in self._sessions.values()}
                while self._inbox:
                    session, commands = self._inbox.popleft()
                    for command in commands:
                        self._apply(session, command)
                for branch in list(self._running):
                    self._advance(branch)
                self._steps += bool(self._running)
                outgoing = []
                for session in touched.values():
                    if session.outbox:
                        outgoing.append((session.sink, tuple(session.outbox)))
                        session.outbox.clear()
            for sink, events in outgoing:
                sink(events)
            if self._step_s and self._running:
                time.sleep(self._step_s)

    def _expire(self) -> None:
        oldest = time.monotonic() - self._session_timeout_s
        for session in [session for session in self._sessions.values() if session.heard < oldest]:
            del self._sessions[session.id]
            self._apply(session, Release(tuple(session.branches)))

    def _apply(self, session: _Session, command: Command) -> None:
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
            case Append() | Generate() | Inspect():
                try:
                    branch = self._branch(session, command.branch)
                except BranchlineError as err:
                    _fail(session, command.branch, err, None if isinstance(command, Append) else command.request)
                else:
                    branch.queue.append(command)
                    self._pump(branch)

    def _new(self, session: _Session, branch_id: int) -> _Branch | None:
        if branch_id in session.branches or branch_id in session.released:
            _fail(session, branch_id, DuplicateBranchError(f"branch id {branch_id} is taken: mint a new one"))
            return None
        branch = session.branches[branch_id] = _Branch(session, branch_id)
        return branch

    def _branch(self, session: _Session, branch_id: int) -> _Branch:
        branch = session.branches.get(branch_id)
        if branch is not None:
            return branch
        if branch_id in session.released:
            raise ReleasedBranchError(f"branch {branch_id} was released")
        raise UnknownBranchError(f"no branch {branch_id} in this session")

    def _fork(self, session: _Session, command: Fork) -> None:
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
        parent.queue.append(_ForkInto(children, command.first))
        self._pump(parent)

    def _attach(self, session: _Session, command: Attach) -> None:
        child = self._new(session, command.branch)
        if child is None:
            return
        owner = self._sessions.get(command.source_session)
        try:
            if owner is None:
                raise UnknownBranchError(f"branch {command.source} of another session: that session is closed")
            source = self._branch(owner, command.source)
        except BranchlineError as err:
            self._poison([child], err)
            return
        source.queue.append(_ForkInto([child], command.branch))
        self._pump(source)

    def _cancel(self, session: _Session, branch_id: int) -> None:
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

    def _release(self, session: _Session, branch_id: int) -> None:
        try:
            branch = self._branch(session, branch_id)
        except BranchlineError as err:
            _fail(session, branch_id, err)
            return
        del session.branches[branch_id]
        session.released.add(branch_id)
        branch.released = True
        # Forks that were asked for before still take effect.
        kept = max((i + 1 for i, queued in enumerate(branch.queue) if isinstance(queued, _ForkInto)), default=0)
        while len(branch.queue) > kept:
            queued = branch.queue.pop()
            if isinstance(queued, Generate | Inspect):
                _fail(session, branch_id, ReleasedBranchError(f"branch {branch_id} was released"), queued.request)
        if branch.run is not None and not kept:
            self._finish(branch, branch.run, "cancelled")

    # --- a branch's turns -------------------------------------------------------------------------------------------

    def _pump(self, branch: _Branch) -> None:
        """Let queued commands take effect until a generation runs."""
        while branch.queue and branch.run is None and (branch.made or branch.error is not None):
            command = branch.queue.popleft()
            session = branch.session
            if branch.error is not None:
                err = FailedBranchError(f"branch {branch.id} failed before: {branch.error.message}")
                if isinstance(command, _ForkInto):
                    self._poison(command.children, err)
                else:
                    _fail(session, branch.id, err, None if isinstance(command, Context | Append) else command.request)
                continue
            match command:
                case Context() | Append():
                    try:
                        added = pieces_of(self.text_of(command.content))
                    except BranchlineError as err:
                        self._poison([branch], err)
                        continue
                    branch.pieces.extend(added)
                    self._prefill_tokens += len(added)
                    session.outbox.append(Ready(branch.id, len(branch.pieces), len(added), 0.0))
                case _ForkInto():
                    self._fork_now(branch, command)
                case Inspect():
                    session.outbox.append(_info(branch, command.request))
                case Generate():
                    self._start(branch, command)

    def _fork_now(self, parent: _Branch, command: _ForkInto) -> None:
        self._forks += len(command.children)
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

    def _start(self, branch: _Branch, command: Generate) -> None:
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
        branch.run = _Run(command, pieces, time.monotonic(), len(branch.pieces), branch.shared)
        self._running.append(branch)

    def _advance(self, branch: _Branch) -> None:
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
        self._decode_tokens += 1
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

    def _finish(self, branch: _Branch, run: _Run, reason: FinishReason, stop: str | int | None = None) -> None:
        self._end(branch)
        if run.held:
            branch.session.outbox.append(Delta(branch.id, run.command.request, (), run.held))
        now = time.monotonic()
        usage = Usage(run.prompt_tokens, run.count, run.shared_tokens)
        timing = Timing(0.0, (run.first_at or now) - run.submitted, now - run.submitted)
        branch.session.outbox.append(Finished(branch.id, run.command.request, reason, usage, timing, stop))
        self._pump(branch)

    def _end(self, branch: _Branch) -> None:
        branch.run = None
        self._running.remove(branch)

    def _poison(self, branches: Iterable[_Branch], err: BranchlineError) -> None:
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


def _info(branch: _Branch, request: int) -> Info:
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


def _fail(session: _Session, branch_id: int, err: BranchlineError, request: int | None = None) -> None:
    session.outbox.append(Failed(branch_id, ErrorInfo(err.code, err.message, err.param), request))
