"""What a branch's commands do when their turn comes. Runs in the engine thread, between steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from branchline.engine._core import BranchTree, OutOfBranchesError
from branchline.engine.branch import AdoptFrom, Asked, Branch, ChatState, ForkInto, GoInto, Queued
from branchline.engine.content import ContentEncoder, is_short
from branchline.engine.errors import (
    BranchlineError,
    ContextLengthError,
    EngineError,
    EngineOverloadedError,
    FailedBranchError,
    InvalidRequestError,
    ReleasedBranchError,
)
from branchline.engine.model.rng import branch_key
from branchline.engine.outbox import emit, emit_failed
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.strand import Strand, Tokens
from branchline.engine.types import (
    Adopted,
    Append,
    Content,
    Context,
    Forked,
    Generate,
    Info,
    Inspect,
    Pin,
    Ready,
    SamplingParams,
)
from branchline.engine.work import Generation, Work


class Turns:
    """Lets queued commands take effect, each branch's in order, as far as nothing that runs is in their way.

    Attributes:
        release: what the `Release` of a branch does; set once, before the first command.
        num_forks: children made since the start.
    """

    release: Callable[[Branch], None]

    def __init__(
        self,
        *,
        tree: BranchTree,
        scheduler: Scheduler,
        encoder: ContentEncoder,
        check_params: Callable[[SamplingParams], None],
        make_generation: Callable[[Branch, Generate, int], Generation],
        context_length: int,
        default_max_tokens: int,
        executor: Executor,
        call_in_engine: Callable[[Callable[[], None]], None],
    ) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._encoder = encoder
        self._check_params = check_params
        self._make_generation = make_generation
        self._context_length = context_length
        self._default_max_tokens = default_max_tokens
        self._executor = executor
        self._call_in_engine = call_in_engine
        self._unsettled: deque[Branch] = deque()
        self.num_forks = 0

    def touch(self, branch: Branch) -> None:
        """Have `settle` look at the branch."""
        self._unsettled.append(branch)

    def settle(self) -> None:
        """Let queued commands take effect, on all branches that something happened to, until each must wait.

        Called when all commands that came were applied, so that an append and the generation after it are one prefill. A
        work list, not recursion: chains of forks may be thousands deep."""
        while self._unsettled:
            self._settle(self._unsettled.popleft())

    def work_ended(self, branch: Branch) -> None:
        """The branch's work is over (done, stopped or failed): go on with its queue."""
        branch.work = None
        self.touch(branch)

    def join_waiting_append(self, branch: Branch) -> None:
        """A generation came for a branch whose appended tokens still wait for a slot: they are computed with it, and as soon
        as it wants."""
        work = branch.work
        if len(branch.queue) == 1 and work is not None and work.generation is None and work.slot is None:
            self._scheduler.remove(work, time.monotonic())
            branch.work = None

    def answer_ready(self, branch: Branch, *, computed: bool = True) -> None:
        """Send the `Ready` events that are owed: all but the branch's last token is computed, or needn't be any more."""
        if not branch.unanswered or not branch.made or branch.error is not None:
            return
        now = time.monotonic()
        length = branch.strand.length(self._tree)
        length -= sum(added for added, _ in branch.unanswered)
        found = branch.strand.cached - branch.cached_told
        branch.cached_told = branch.strand.cached
        for added, began in branch.unanswered:
            length += added
            of_these = min(found, added) if computed else added
            found -= of_these
            emit(branch.session, Ready(branch.id, length, added - of_these, now - began))
        branch.unanswered.clear()

    def fail(self, branch: Branch, err: BranchlineError) -> None:
        """Mark an idle branch as failed: its content isn't what was asked for. Its queued commands fail."""
        branch.error = err
        branch.unanswered.clear()
        self._end_race(branch)
        emit_failed(branch.session, branch.id, err)
        self.touch(branch)

    def fail_generation(self, branch: Branch, request: int, err: BranchlineError) -> None:
        """A generation failed; its branch is as it was before."""
        self._end_race(branch)
        emit_failed(branch.session, branch.id, err, request)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end_race(self, branch: Branch) -> None:
        if branch.race is not None:
            branch.race.ended(branch, False, self.release)

    def _settle(self, branch: Branch) -> None:
        while branch.queue:
            if branch.error is None and branch.busy:
                return
            command = branch.queue.popleft()
            if branch.error is not None:
                self._refuse(branch, command)
                continue
            if isinstance(command, AdoptFrom) and not self._can_adopt(command):
                branch.queue.appendleft(command)
                return  # the child's turn touches this branch
            try:
                self._turn(branch, command)
            except BranchlineError as err:
                if isinstance(command, Asked) and isinstance(command.command, Generate):
                    self.fail_generation(branch, command.command.request, err)
                elif isinstance(command, Inspect):
                    emit_failed(branch.session, branch.id, err, command.request)
                else:
                    self.fail(branch, err)
        if branch.error is None and branch.busy:
            return
        if branch.error is None and len(branch.strand.pending) > 1 and branch.unanswered and not branch.released:
            self._start_flush(branch)
            return
        self.answer_ready(branch)
        if branch.released:
            self._cache.release(branch.strand)
            branch.strand = Strand()
        elif branch.error is not None:
            self._cache.release(branch.strand)
        else:
            self._cache.park(branch.strand)

    def _turn(self, branch: Branch, command: Queued) -> None:
        match command:
            case Asked(command=Generate() as generate, at=at):
                self._start_generation(branch, generate, at)
            case Asked(command=Context() | Append() as append, at=at):
                branch.service, branch.asked_at = append.service.validate(), at
                self._extend(branch, append.content)
            case Pin(pinned=False):
                branch.strand.pinned = False
            case GoInto():
                self._end_race(branch)
                if branch.unanswered and not self._brought_back(branch):
                    branch.queue.appendleft(command)
                    return
                self.answer_ready(branch)
                branch.waits_to_go = True
                self.touch(command.parent)
            case AdoptFrom():
                self._adopt(branch, command)
            case _:
                if isinstance(command, Pin):
                    branch.strand.pinned = True
                    self._cache.unpark(branch.strand)
                if not self._brought_back(branch):
                    branch.queue.appendleft(command)
                elif isinstance(command, ForkInto):
                    self._fork(branch, command)
                elif isinstance(command, Inspect):
                    self._inspect(branch, command)

    def _brought_back(self, branch: Branch) -> bool:
        """Whether the K/V of all tokens but the last is there; if not, the work that computes it has begun."""
        strand = branch.strand
        if len(strand.pending) > 1 or strand.swapped is not None:
            self._start_flush(branch)
            return False
        if strand.node is None:
            try:
                self._cache.bring_back(strand)
            except OutOfBranchesError as err:
                raise EngineOverloadedError(f"no room for another branch ({err}): release some") from err
        return True

    def _extend(self, branch: Branch, content: Content) -> None:
        began = time.monotonic()
        pending = branch.strand.pending
        last = int(pending[-1]) if len(pending) else None
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
            if not (branch.released and not branch.queue):
                try:
                    if isinstance(outcome, BranchlineError):
                        raise outcome
                    self._extended(branch, *outcome, began)
                except BranchlineError as err:
                    self.fail(branch, err)
            self.touch(branch)

        self._executor.submit(tokenize)

    def _extended(self, branch: Branch, tokens: Tokens, chat: ChatState | None, began: float) -> None:
        strand = branch.strand
        length = strand.length(self._tree) + len(tokens)
        if length > self._context_length:
            raise ContextLengthError(
                f"the branch would have {length} tokens, {len(tokens)} of them new: "
                f"the context holds {self._context_length}; shorten the text"
            )
        pending = np.concatenate((strand.pending, tokens))
        self._scheduler.check_fits(strand, len(pending))
        strand.pending = pending
        branch.chat = chat
        branch.unanswered.append((len(tokens), began))

    def _start_flush(self, branch: Branch) -> None:
        now = time.monotonic()
        submitted = branch.asked_at if branch.unanswered else now
        work = Work(strand=branch.strand, tenant=branch.tenant, submitted=submitted, service=branch.service, branch=branch)
        try:
            self._scheduler.add(work, now)
        except BranchlineError as err:
            self.fail(branch, err)
        else:
            branch.work = work

    def _start_generation(self, branch: Branch, command: Generate, submitted: float) -> None:
        params = command.params.validate()
        service = command.service.validate()
        self._check_params(params)
        strand = branch.strand
        length = strand.length(self._tree)
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
        self._scheduler.check_fits(strand, len(strand.pending) + max_tokens - 1)
        now = time.monotonic()
        work = Work(
            strand=strand,
            tenant=branch.tenant,
            submitted=submitted,
            service=service,
            max_tokens=max_tokens,
            branch=branch,
            generation=self._make_generation(branch, command, length),
        )
        self._scheduler.add(work, now)
        branch.work = work

    def _fork(self, parent: Branch, command: ForkInto) -> None:
        strand = parent.strand
        assert strand.node is not None
        # A child that was released in the meantime is made only if forks of its own wait for it.
        children = [child for child in command.children if child.queue or not child.released]
        began = time.perf_counter()
        try:
            nodes = self._tree.fork_many(strand.node, len(children)).tolist() if children else []
        except OutOfBranchesError as err:
            failure = EngineOverloadedError(f"no room for {len(children)} more branches ({err}): release some")
            for child in children:
                self.fail(child, failure)
            return
        fork_s = time.perf_counter() - began
        self.num_forks += len(children)
        inherited = self._tree.length(strand.node)
        for child, node in zip(children, nodes, strict=True):
            child.strand = Strand(
                node=node, pending=strand.pending, tenant=strand.tenant, computed=inherited, inherited=inherited
            )
            child.made = True
            child.key = branch_key(parent.key, parent.num_children)
            child.chat = parent.chat
            parent.num_children += 1
        if children:
            emit(children[0].session, Forked(parent.id, command.first, len(children), fork_s))
        for child in children:
            self.touch(child)

    @staticmethod
    def _can_adopt(command: AdoptFrom) -> bool:
        return command.child.waits_to_go or command.child.released or command.child.error is not None

    def _adopt(self, branch: Branch, command: AdoptFrom) -> None:
        child = command.child
        if child.error is not None:
            raise FailedBranchError(
                f"branch {child.id} can't be adopted, an earlier command on it failed: {child.error.message}"
            )
        if child.released:
            raise ReleasedBranchError(f"branch {child.id} can't be adopted: it lost a race, and was released")
        self.answer_ready(branch, computed=False)
        if branch.strand.pinned:
            # In its next turn, with all of the K/V there.
            branch.queue.appendleft(Pin(branch.id))
        child.strand.pinned = False
        self._cache.release(branch.strand)
        branch.strand, child.strand = child.strand, Strand()
        branch.chat = child.chat
        branch.cached_told = branch.strand.cached
        emit(branch.session, Adopted(branch.id, child.id, branch.strand.length(self._tree)))

    def _inspect(self, branch: Branch, command: Inspect) -> None:
        strand = branch.strand
        assert strand.node is not None
        held, _, shared_pages, tail_pages, depth = self._tree.describe(strand.node)
        private_pages, private_tokens = self._tree.private_part(strand.node)
        shared, shared_pages = held - private_tokens, shared_pages + tail_pages - private_pages
        length = held + len(strand.pending)
        emit(branch.session, Info(branch.id, command.request, length, shared, shared_pages, private_pages, depth))

    def _refuse(self, branch: Branch, command: Queued) -> None:
        assert branch.error is not None
        err = branch.error
        if not isinstance(err, FailedBranchError):
            err = FailedBranchError(f"branch {branch.id} can't be used, an earlier command failed: {err.message}")
        match command:
            case ForkInto():
                for child in command.children:
                    self.fail(child, err)
            case GoInto():
                self.touch(command.parent)
            case AdoptFrom():
                self.release(command.child)
                emit_failed(branch.session, branch.id, err)
            case Asked(command=Generate() as generate):
                self.fail_generation(branch, generate.request, err)
            case Inspect():
                emit_failed(branch.session, branch.id, err, command.request)
            case _:
                emit_failed(branch.session, branch.id, err)
