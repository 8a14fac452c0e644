"""What a client's commands do to its branches. Runs in the engine thread, between steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from branchline.engine._core import BranchTree, OutOfBranchesError
from branchline.engine.branch import NO_TOKENS, Branch, ChatState, ForkInto, Queued, Session, Tokens
from branchline.engine.content import ContentEncoder, is_short
from branchline.engine.errors import (
    BranchlineError,
    ContextLengthError,
    DuplicateBranchError,
    EngineError,
    EngineOverloadedError,
    FailedBranchError,
    InvalidParameterError,
    InvalidRequestError,
    PoolTooSmallError,
    ReleasedBranchError,
    UnknownBranchError,
)
from branchline.engine.model.rng import branch_key
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.types import (
    Adopt,
    Append,
    Attach,
    Cancel,
    Command,
    Content,
    Context,
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
    Ready,
    Release,
    SamplingParams,
    Timing,
    Usage,
)
from branchline.engine.types import ErrorInfo as ErrorOnTheWire
from branchline.engine.work import Generation, Work

ROOT_KEY = 0
MAX_CHILDREN_PER_FORK = 65536


class CommandRunner:
    """Applies commands. A branch's commands take effect in order; those that must wait are queued on the branch."""

    def __init__(
        self,
        *,
        tree: BranchTree,
        scheduler: Scheduler,
        encoder: ContentEncoder,
        check_params: Callable[[SamplingParams], None],
        make_generation: Callable[[Branch, Generate, int], Generation],
        stop_work: Callable[[Work], None],
        context_length: int,
        default_max_tokens: int,
        executor: Executor,
        call_in_engine: Callable[[Callable[[], None]], None],
        sessions: dict[str, Session],
    ) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self._encoder = encoder
        self._check_params = check_params
        self._make_generation = make_generation
        self._stop_work = stop_work
        self._context_length = context_length
        self._default_max_tokens = default_max_tokens
        self._executor = executor
        self._call_in_engine = call_in_engine
        self.sessions = sessions
        self._unsettled: deque[Branch] = deque()
        self.num_forks = 0

    # --- commands ---------------------------------------------------------------------------------------------------

    def apply(self, session: Session, command: Command) -> None:
        """Take one command. Never raises for what a client did: errors leave as `Failed` events."""
        match command:
            case Context():
                self._context(session, command)
            case Fork():
                self._fork(session, command)
            case Attach():
                self._attach(session, command)
            case Cancel():
                self._cancel(session, command)
            case Release():
                for branch_id in command.branches:
                    self._release(session, branch_id)
            case Adopt() | Pin() | Race():
                named = command.branches[0] if isinstance(command, Race) else command.branch
                emit_failed(session, named, InvalidRequestError(f"this engine doesn't know {type(command).__name__}"))
            case _:
                try:
                    branch = self._find(session, command.branch)
                except BranchlineError as err:
                    emit_failed(session, command.branch, err, None if isinstance(command, Append) else command.request)
                else:
                    branch.queue.append(command)
                    self.touch(branch)

    def close(self, session: Session) -> None:
        """Release all the session's branches and send it nothing more."""
        session.closed = True
        for branch_id in list(session.branches):
            self._release(session, branch_id)
        session.outbox.clear()

    def _context(self, session: Session, command: Context) -> None:
        try:
            branch = self._new_branch(session, command.branch)
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        try:
            branch.node = self._tree.root()
        except OutOfBranchesError as err:
            self.fail_branch(branch, EngineOverloadedError(f"no room for another branch ({err}): release some"))
            return
        branch.key = ROOT_KEY
        branch.queue.append(command)
        self.touch(branch)

    def _fork(self, session: Session, command: Fork) -> None:
        if not 1 <= command.count <= MAX_CHILDREN_PER_FORK:
            err = InvalidParameterError(f"count = {command.count}: expected 1 to {MAX_CHILDREN_PER_FORK}", param="count")
            emit_failed(session, command.parent, err)
            return
        children = []
        for branch_id in range(command.first, command.first + command.count):
            try:
                children.append(self._new_branch(session, branch_id))
            except BranchlineError as err:
                emit_failed(session, branch_id, err)
        try:
            parent = self._find(session, command.parent)
        except BranchlineError as err:
            for child in children:
                self.fail_branch(child, err)
            return
        parent.queue.append(ForkInto(children, command.first))
        self.touch(parent)

    def _attach(self, session: Session, command: Attach) -> None:
        try:
            child = self._new_branch(session, command.branch)
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        try:
            owner = self.sessions.get(command.source_session)
            if owner is None:
                raise UnknownBranchError(
                    f"branch {command.source} of another session: that session is closed or isn't on this engine; "
                    "keep the session that owns a shared branch open while others attach to it"
                )
            source = self._find(owner, command.source)
        except BranchlineError as err:
            self.fail_branch(child, err)
            return
        source.queue.append(ForkInto([child], command.branch))
        self.touch(source)

    def _cancel(self, session: Session, command: Cancel) -> None:
        try:
            branch = self._find(session, command.branch)
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        waiting = [queued for queued in branch.queue if isinstance(queued, Generate)]
        for queued in waiting:
            branch.queue.remove(queued)
            emit_cancelled(branch, queued)
        if branch.work is not None and branch.work.generation is not None:
            self._stop_work(branch.work)
        self.touch(branch)

    def _release(self, session: Session, branch_id: int) -> None:
        try:
            branch = self._find(session, branch_id)
        except BranchlineError as err:
            emit_failed(session, branch_id, err)
            return
        del session.branches[branch_id]
        branch.released = True
        # Forks that were queued before still take effect, and so does what they wait for.
        kept = max((i + 1 for i, queued in enumerate(branch.queue) if isinstance(queued, ForkInto)), default=0)
        if session.closed:
            kept = max(
                (
                    i + 1
                    for i, queued in enumerate(branch.queue)
                    if isinstance(queued, ForkInto) and any(not child.session.closed for child in queued.children)
                ),
                default=0,
            )
        while len(branch.queue) > kept:
            queued = branch.queue.pop()
            if isinstance(queued, Generate):
                emit_cancelled(branch, queued)
            elif isinstance(queued, Inspect):
                emit_failed(session, branch_id, self._released_error(branch_id), queued.request)
        if kept == 0 and branch.work is not None:
            self._stop_work(branch.work)
        self.touch(branch)

    # --- a branch's turns -------------------------------------------------------------------------------------------

    def touch(self, branch: Branch) -> None:
        """Have `settle` look at the branch."""
        self._unsettled.append(branch)

    def settle(self) -> None:
        """Let queued commands take effect, on all branches that something happened to, until each must wait.

        Called when all commands that came were applied, so that an append and the generation after it are one prefill. A
        work list, not recursion: chains of forks may be thousands deep."""
        while self._unsettled:
            self._settle(self._unsettled.popleft())

    def _settle(self, branch: Branch) -> None:
        while branch.queue:
            if branch.error is None and branch.busy:
                return
            command = branch.queue.popleft()
            if branch.error is not None:
                self._refuse(branch, command)
                continue
            try:
                self._turn(branch, command)
            except BranchlineError as err:
                if isinstance(command, Generate | Inspect):
                    emit_failed(branch.session, branch.id, err, command.request)
                else:
                    self.fail_branch(branch, err)
        if branch.error is None and branch.busy:
            return
        if branch.error is None and len(branch.pending) > 1 and not branch.released:
            self._start_flush(branch)
            return
        self.answer_ready(branch)
        if branch.released and branch.node is not None:
            node, branch.node = branch.node, None
            branch.pending = NO_TOKENS
            self._tree.release(node)

    def work_ended(self, work: Work) -> None:
        """The branch's work is over (done, stopped or failed): go on with its queue."""
        work.branch.work = None
        self.touch(work.branch)

    def _turn(self, branch: Branch, command: Queued) -> None:
        match command:
            case Context() | Append():
                self._extend(branch, command.content)
            case Generate():
                self._start_generation(branch, command)
            case _:
                if len(branch.pending) > 1:
                    branch.queue.appendleft(command)
                    self._start_flush(branch)
                elif isinstance(command, ForkInto):
                    self._fork_now(branch, command)
                else:
                    self._inspect(branch, command)

    def _extend(self, branch: Branch, content: Content) -> None:
        began = time.monotonic()
        last = int(branch.pending[-1]) if len(branch.pending) else None
        if is_short(content):
            tokens, chat = self._encoder.encode(content, branch.chat, last)
            self._extended(branch, tokens, chat, began)
            return
        branch.tokenizing = True
        held = branch.chat

        def tokenize() -> None:
            try:
                tokens, chat = self._encoder.encode(content, held, last)
            except BranchlineError as err:
                failure = err
                self._call_in_engine(lambda: tokenized(failure))
            except Exception as err:  # whatever a tokenizer or a template raises must reach its client
                unexpected = EngineError(f"tokenising failed: {err!r}")
                self._call_in_engine(lambda: tokenized(unexpected))
            else:
                self._call_in_engine(lambda: tokenized((tokens, chat)))

        def tokenized(outcome: tuple[Tokens, ChatState | None] | BranchlineError) -> None:
            branch.tokenizing = False
            if branch.released and branch.node is None:
                return
            try:
                if isinstance(outcome, BranchlineError):
                    raise outcome
                self._extended(branch, *outcome, began)
            except BranchlineError as err:
                self.fail_branch(branch, err)
            self.touch(branch)

        self._executor.submit(tokenize)

    def _extended(self, branch: Branch, tokens: Tokens, chat: ChatState | None, began: float) -> None:
        assert branch.node is not None
        length = self._tree.length(branch.node) + len(branch.pending) + len(tokens)
        if length > self._context_length:
            raise ContextLengthError(
                f"the branch would have {length} tokens, {len(tokens)} of them new: "
                f"the context holds {self._context_length}; shorten the text"
            )
        pending = np.concatenate((branch.pending, tokens))
        self._check_fits(branch, len(pending))
        branch.pending = pending
        branch.chat = chat
        branch.unanswered.append((len(tokens), began))

    def _check_fits(self, branch: Branch, num_tokens: int) -> None:
        """Raise PoolTooSmallError if so many tokens can't be added even when the branch is alone in the pool."""
        assert branch.node is not None
        _, _, shared_pages, private_pages, _ = self._tree.describe(branch.node)
        need = shared_pages + private_pages + self._tree.pages_needed(branch.node, num_tokens)
        if need > self._tree.num_pages:
            raise PoolTooSmallError(
                f"{num_tokens} tokens need {need} pages of {self._tree.page_tokens} with what the branch holds: "
                f"the pool has {self._tree.num_pages} in all; shorten the text or max_tokens, or give the engine a larger pool"
            )

    def _start_flush(self, branch: Branch) -> None:
        branch.work = Work(branch, None, time.monotonic())
        self._scheduler.add(branch.work)

    def _start_generation(self, branch: Branch, command: Generate) -> None:
        params = command.params.validate()
        self._check_params(params)
        assert branch.node is not None
        length = self._tree.length(branch.node) + len(branch.pending)
        if length == 0:
            raise InvalidRequestError("the branch is empty: append something before generating")
        left = self._context_length - length
        if left < (params.max_tokens or 1):
            wanted = f"max_tokens = {params.max_tokens}" if params.max_tokens else "generating"
            raise ContextLengthError(
                f"the branch has {length} tokens and the context holds {self._context_length}: {left} are left, "
                f"{wanted} needs {params.max_tokens or 1}",
                param="max_tokens",
            )
        max_tokens = params.max_tokens or min(left, self._default_max_tokens)
        self._check_fits(branch, len(branch.pending) + max_tokens - 1)
        branch.work = Work(branch, self._make_generation(branch, command, max_tokens), time.monotonic(), command.service)
        self._scheduler.add(branch.work)

    def _fork_now(self, parent: Branch, command: ForkInto) -> None:
        assert parent.node is not None
        # A child that was released in the meantime is made only if forks of its own wait for it.
        children = [child for child in command.children if child.queue or not child.released]
        began = time.perf_counter()
        try:
            nodes = self._tree.fork_many(parent.node, len(children)).tolist() if children else []
        except OutOfBranchesError as err:
            failure = EngineOverloadedError(f"no room for {len(children)} more branches ({err}): release some")
            for child in children:
                self.fail_branch(child, failure)
            return
        fork_s = time.perf_counter() - began
        self.num_forks += len(children)
        for child, node in zip(children, nodes, strict=True):
            child.node = node
            child.key = branch_key(parent.key, parent.num_children)
            child.pending = parent.pending
            child.chat = parent.chat
            parent.num_children += 1
        if children:
            emit(children[0].session, Forked(parent.id, command.first, len(children), fork_s))
        for child in children:
            self.touch(child)

    def _inspect(self, branch: Branch, command: Inspect) -> None:
        assert branch.node is not None
        length, shared, shared_pages, private_pages, depth = self._tree.describe(branch.node)
        length += len(branch.pending)
        emit(branch.session, Info(branch.id, command.request, length, shared, shared_pages, private_pages, depth))

    def answer_ready(self, branch: Branch) -> None:
        """Send the `Ready` events that are owed: all but the branch's last token is computed."""
        if not branch.unanswered or branch.node is None or branch.error is not None:
            return
        now = time.monotonic()
        length = self._tree.length(branch.node) + len(branch.pending)
        length -= sum(added for added, _ in branch.unanswered)
        for added, began in branch.unanswered:
            length += added
            emit(branch.session, Ready(branch.id, length, added, now - began))
        branch.unanswered.clear()

    # --- errors -----------------------------------------------------------------------------------------------------

    def fail_branch(self, branch: Branch, err: BranchlineError) -> None:
        """Mark an idle branch as failed: its content isn't what was asked for. Its queued commands fail."""
        branch.error = err
        branch.unanswered.clear()
        branch.pending = NO_TOKENS
        emit_failed(branch.session, branch.id, err)
        self.touch(branch)

    def _refuse(self, branch: Branch, command: Queued) -> None:
        assert branch.error is not None
        err = branch.error
        if not isinstance(err, FailedBranchError):
            err = FailedBranchError(f"branch {branch.id} can't be used, an earlier command failed: {err.message}")
        if isinstance(command, ForkInto):
            for child in command.children:
                self.fail_branch(child, err)
        elif isinstance(command, Generate | Inspect):
            emit_failed(branch.session, branch.id, err, command.request)
        else:
            emit_failed(branch.session, branch.id, err)

    def _find(self, session: Session, branch_id: int) -> Branch:
        branch = session.branches.get(branch_id)
        if branch is not None:
            return branch
        if 0 <= branch_id < session.next_id:
            raise self._released_error(branch_id)
        raise UnknownBranchError(f"branch {branch_id}: this session has made no such branch")

    @staticmethod
    def _released_error(branch_id: int) -> ReleasedBranchError:
        return ReleasedBranchError(f"branch {branch_id} was released: fork before releasing to keep its content in use")

    @staticmethod
    def _new_branch(session: Session, branch_id: int) -> Branch:
        if branch_id < session.next_id:
            raise DuplicateBranchError(
                f"branch id {branch_id} was used before: ids of a session must grow, the next free one is {session.next_id}"
            )
        session.next_id = branch_id + 1
        branch = session.branches[branch_id] = Branch(session, branch_id)
        return branch


def emit(session: Session, event: Event) -> None:
    """Put an event into the session's next batch; a closed session gets none."""
    if not session.closed:
        session.outbox.append(event)


def emit_cancelled(branch: Branch, command: Generate) -> None:
    """End a generation that hadn't begun."""
    emit(branch.session, Finished(branch.id, command.request, "cancelled", Usage(0, 0, 0), Timing(0.0, 0.0, 0.0)))


def emit_failed(session: Session, branch_id: int, err: BranchlineError, request: int | None = None) -> None:
    """Put a `Failed` event into the session's next batch."""
    emit(session, Failed(branch_id, ErrorOnTheWire(err.code, err.message, err.param), request))
