"""An engine without a model: the engine's methods and its thread, commands and events, with a text that is made up.

What it generates depends on the branch's text and path alone, one character of `ALPHABET` a step and a branch, so the same
request gives the same text whatever else runs. A prompt that holds `FAIL` fails at its fourth token.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from branchline.engine.config import EngineConfig
from branchline.engine.errors import (
    BranchlineError,
    ContextLengthError,
    DuplicateBranchError,
    EngineClosedError,
    EngineOverloadedError,
    EngineStepError,
    FailedBranchError,
    InvalidRequestError,
    ModelNotFoundError,
    ReleasedBranchError,
    SessionNotFoundError,
    UnknownBranchError,
)
from branchline.engine.types import (
    Adopt,
    Append,
    Attach,
    Cancel,
    Chat,
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
    Pin,
    PositionLogprobs,
    Race,
    Ready,
    Release,
    Text,
    Timing,
    TokenLogprob,
    Usage,
)

ALPHABET = "abcdefgh ijkl, mnop. 日本語😀👩‍🚀éñ\n"
FAIL = "FAIL"
PAGE_TOKENS = 16
NUM_PAGES = 512
CONTEXT_LENGTH = 1024


@dataclass
class FakeBranch:
    id: int
    text: str = ""
    own: int = 0
    path: tuple[int, ...] = ()
    children: int = 0
    forked: bool = True
    error: BranchlineError | None = None
    queue: list[Command] = field(default_factory=list)
    job: Generate | None = None
    job_tokens: int = 0
    job_text: str = ""
    job_prompt: int = 0


@dataclass
class FakeSession:
    sink: Callable[[tuple[Event, ...]], None]
    branches: dict[int, FakeBranch] = field(default_factory=dict)
    next_id: int = 0
    outbox: list[Event] = field(default_factory=list)


class FakeEngine:
    def __init__(self, config: EngineConfig, step_s: float = 0.002) -> None:
        self.info = ModelInfo(
            name=config.served_name or "fake", architecture="fake", num_parameters=0, vocab_size=len(ALPHABET),
            context_length=config.context_length or CONTEXT_LENGTH, dtype="float32", attention="reference", device="cpu",
            page_tokens=PAGE_TOKENS, page_bytes=1024, num_pages=NUM_PAGES, max_batch=config.max_batch,
        )  # fmt: skip
        self.config = config
        self.step_s = step_s
        self.sessions: dict[str, FakeSession] = {}
        self.steps = self.tokens = self.forks = 0
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[str], None] | None = None) -> FakeEngine:
        if config.model == "no-such-model":
            raise ModelNotFoundError("no model 'no-such-model': `branchline models` lists the built-in ones", param="model")
        return cls(config)

    def open_session(self, sink: Callable[[tuple[Event, ...]], None], client: str = "", tenant: str = "") -> str:
        self._raise_if_closed()
        session = secrets.token_hex(8)
        with self._lock:
            self.sessions[session] = FakeSession(sink)
        return session

    def submit(self, session: str, commands: Sequence[Command]) -> None:
        with self._lock:
            asking = self._find(session)
            asked = sum(isinstance(command, Generate) for command in commands)
            branches = [branch for session in self.sessions.values() for branch in session.branches.values()]
            busy = sum(branch.job is not None for branch in branches)
            busy += sum(isinstance(queued, Generate) for branch in branches for queued in branch.queue)
            if asked and busy + asked > self.config.max_waiting:
                raise EngineOverloadedError(f"{busy} requests run and {asked} more came: at most {self.config.max_waiting} may")
            for command in commands:
                self._apply(asking, command)
        self._wake.set()

    def touch(self, session: str) -> None:
        self._find(session)

    def close_session(self, session: str) -> None:
        with self._lock:
            self.sessions.pop(session, None)

    def stats(self) -> EngineStats:
        with self._lock:
            branches = [branch for session in self.sessions.values() for branch in session.branches.values()]
            used = sum(math.ceil(branch.own / PAGE_TOKENS) for branch in branches)
            return EngineStats(
                steps=self.steps, prefill_tokens=0, decode_tokens=self.tokens, forks=self.forks, branches=len(branches),
                running=sum(branch.job is not None for branch in branches), waiting=0, sessions=len(self.sessions),
                pages_free=NUM_PAGES - used, pages_total=NUM_PAGES, copied_bytes=0,
                tensor_s=self.steps * self.step_s, plan_s=0.0, python_s=0.0, idle_s=0.0,
            )  # fmt: skip

    def count_tokens(self, content: Content) -> int:
        return len(text_of(content))

    def close(self) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join()

    def _raise_if_closed(self) -> None:
        if self._stopped.is_set():
            raise EngineClosedError("the engine was closed")

    def _find(self, session: str) -> FakeSession:
        self._raise_if_closed()
        if session not in self.sessions:
            raise SessionNotFoundError(f"no session {session}")
        return self.sessions[session]

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                busy = self._step()
            if busy:
                time.sleep(self.step_s)
            else:
                self._wake.wait()
            self._wake.clear()

    def _step(self) -> bool:
        busy = False
        for session in list(self.sessions.values()):
            for branch in list(session.branches.values()):
                while branch.forked and branch.job is None and branch.queue:
                    try:
                        self._turn(session, branch, branch.queue.pop(0))
                    except BranchlineError as err:
                        self._fail(session, branch, err, None)
                if branch.job is not None:
                    busy = True
                    self._advance(session, branch, branch.job)
            events, session.outbox = tuple(session.outbox), []
            if events:
                session.sink(events)
        self.steps += busy
        return busy

    def _apply(self, session: FakeSession, command: Command) -> None:
        try:
            if isinstance(command, Context):
                self._make(session, command.branch).queue.append(command)
            elif isinstance(command, Fork):
                children = [self._make(session, command.first + i) for i in range(command.count)]
                self._of(session, command.parent).queue.append(command)
                for child in children:
                    child.forked = False
            elif isinstance(command, Attach):
                child = self._make(session, command.branch)
                source = self.sessions.get(command.source_session)
                if source is None:
                    raise UnknownBranchError(f"session {command.source_session} isn't on this engine")
                self._fork_into(self._of(source, command.source), child)
                session.outbox.append(Forked(command.source, command.branch, 1, 0.0))
            elif isinstance(command, Cancel):
                branch = self._of(session, command.branch)
                if branch.job is not None:
                    self._finish(session, branch, branch.job, "cancelled", None)
            elif isinstance(command, Release):
                for branch_id in command.branches:
                    self._of(session, branch_id)
                    del session.branches[branch_id]
            elif isinstance(command, Adopt | Pin | Race):
                raise InvalidRequestError(f"the fake engine doesn't know {type(command).__name__}")
            else:
                self._of(session, command.branch).queue.append(command)
        except BranchlineError as err:
            number = command.branches[0] if isinstance(command, Release) else getattr(command, "branch", 0)
            session.outbox.append(Failed(number, _info(err), getattr(command, "request", None)))

    def _make(self, session: FakeSession, branch: int) -> FakeBranch:
        if branch < session.next_id:
            raise DuplicateBranchError(f"branch {branch} is taken")
        session.next_id = branch + 1
        session.branches[branch] = FakeBranch(branch)
        return session.branches[branch]

    def _of(self, session: FakeSession, branch: int) -> FakeBranch:
        if branch not in session.branches:
            kind = ReleasedBranchError if branch < session.next_id else UnknownBranchError
            raise kind(f"no branch {branch}")
        return session.branches[branch]

    def _turn(self, session: FakeSession, branch: FakeBranch, command: Command) -> None:
        if branch.error is not None:
            err = FailedBranchError(f"branch {branch.id}: {branch.error.message}")
            if isinstance(command, Fork):
                for i in range(command.count):
                    self._fail(session, session.branches[command.first + i], err, None)
            elif isinstance(command, Generate):
                session.outbox.append(Failed(branch.id, _info(err), command.request))
        elif isinstance(command, Context | Append):
            text = text_of(command.content)
            if len(branch.text) + len(text) > self.info.context_length:
                raise ContextLengthError(f"{len(text)} tokens: the context holds {self.info.context_length}")
            branch.text += text
            branch.own += len(text)
            session.outbox.append(Ready(branch.id, len(branch.text), len(text), 0.0))
        elif isinstance(command, Fork):
            for i in range(command.count):
                self._fork_into(branch, session.branches[command.first + i])
            session.outbox.append(Forked(branch.id, command.first, command.count, 0.0))
        elif isinstance(command, Generate):
            command.params.validate()
            branch.job, branch.job_tokens, branch.job_text, branch.job_prompt = command, 0, "", len(branch.text)
        elif isinstance(command, Inspect):
            pages = math.ceil(branch.own / PAGE_TOKENS)
            session.outbox.append(Info(branch.id, command.request, len(branch.text), 0, 0, pages, len(branch.path)))

    def _fork_into(self, parent: FakeBranch, child: FakeBranch) -> None:
        child.text, child.path = parent.text, (*parent.path, parent.children)
        child.forked = True
        parent.children += 1
        self.forks += 1

    def _advance(self, session: FakeSession, branch: FakeBranch, job: Generate) -> None:
        if FAIL in branch.text and branch.job_tokens == 3:
            branch.job = None
            session.outbox.append(Failed(branch.id, _info(EngineStepError("the fake engine was told to fail")), job.request))
            return
        seed = f"{branch.text}|{branch.path}|{branch.job_tokens}|{job.params.seed}"
        token = hashlib.sha256(seed.encode()).digest()[0] % len(ALPHABET)
        text = ALPHABET[token]
        self.tokens += 1
        branch.job_tokens += 1
        branch.own += 1
        limit = job.params.max_tokens or self.config.default_max_tokens
        logprobs = None
        if job.params.logprobs is not None:
            chosen = TokenLogprob(token, text, -0.5)
            logprobs = (
                PositionLogprobs(chosen, tuple(TokenLogprob(i, ALPHABET[i], -1.0 - i) for i in range(job.params.logprobs))),
            )
        stop = next((stop for stop in job.params.stop if (branch.job_text + text).endswith(stop)), None)
        branch.job_text += text
        session.outbox.append(Delta(branch.id, job.request, (token,), "" if stop else text, logprobs))
        if stop is not None:
            self._finish(session, branch, job, "stop", stop)
        elif branch.job_tokens >= limit:
            self._finish(session, branch, job, "length", None)

    def _finish(self, session: FakeSession, branch: FakeBranch, job: Generate, reason: FinishReason, stop: str | None) -> None:
        branch.job = None
        usage = Usage(branch.job_prompt, branch.job_tokens, 0)
        branch.text += branch.job_text
        session.outbox.append(Finished(branch.id, job.request, reason, usage, Timing(0.0, 0.0, 0.0), stop))

    def _fail(self, session: FakeSession, branch: FakeBranch, err: BranchlineError, request: int | None) -> None:
        branch.error, branch.forked = err, True
        session.outbox.append(Failed(branch.id, _info(err), request))


def text_of(content: Content) -> str:
    """The text that the fake engine holds for a content, a character a token."""
    if isinstance(content, Text):
        return content.text
    if isinstance(content, Chat):
        return "".join(f"<{message.role}>{message.content or ''}" for message in content.messages)
    return "".join(ALPHABET[i % len(ALPHABET)] for i in content.ids)


def _info(err: BranchlineError) -> ErrorInfo:
    return ErrorInfo(err.code, err.message, err.param)
