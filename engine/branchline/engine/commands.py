"""Takes the commands of sessions as they come; what must wait is queued on its branch. Runs in the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from branchline.engine.branch import AdoptFrom, Asked, Branch, ForkInto, GoInto, Session
from branchline.engine.errors import (
    BranchlineError,
    DuplicateBranchError,
    InvalidParameterError,
    InvalidRequestError,
    ReleasedBranchError,
    UnknownBranchError,
)
from branchline.engine.outbox import emit_cancelled, emit_failed
from branchline.engine.races import RunningRace
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenant, Tenants
from branchline.engine.turns import Turns
from branchline.engine.types import (
    Adopt,
    Append,
    Attach,
    Cancel,
    Command,
    Context,
    Fork,
    Generate,
    Inspect,
    Pin,
    Race,
    Release,
)
from branchline.engine.work import Work

ROOT_KEY = 0
MAX_CHILDREN_PER_FORK = 65536


class CommandRunner:
    """Applies commands. Never raises for what a client did: errors leave as `Failed` events."""

    def __init__(self, turns: Turns, tenants: Tenants, stop_work: Callable[[Work], None]) -> None:
        self._turns = turns
        self._tenants = tenants
        turns.release = self.release
        self._stop_work = stop_work
        self.sessions: dict[str, Session] = {}

    def apply(self, session: Session, command: Command) -> None:
        """Take one command."""
        match command:
            case Context():
                self._context(session, command)
            case Fork():
                self._fork(session, command)
            case Attach():
                self._attach(session, command)
            case Adopt():
                self._adopt(session, command)
            case Race():
                self._race(session, command)
            case Cancel():
                self._cancel(session, command)
            case Release():
                for branch_id in command.branches:
                    self._release_id(session, branch_id)
            case Append() | Generate() | Inspect() | Pin():
                try:
                    branch = self._find(session, command.branch)
                except BranchlineError as err:
                    request = command.request if isinstance(command, Generate | Inspect) else None
                    emit_failed(session, command.branch, err, request)
                else:
                    if isinstance(command, Append | Generate):
                        branch.queue.append(Asked(command, time.monotonic()))
                    else:
                        branch.queue.append(command)
                    if isinstance(command, Generate):
                        self._turns.join_waiting_append(branch)
                    self._turns.touch(branch)

    def close(self, session: Session) -> None:
        """Release all the session's branches and send it nothing more."""
        session.closed = True
        for branch in list(session.branches.values()):
            self.release(branch)
        session.outbox.clear()

    def release(self, branch: Branch) -> None:
        """What runs on a branch is stopped, what waits on it is called off, and its own pages return. Does nothing if the
        branch was released before."""
        if branch.released:
            return
        self._give_up_name(branch)
        branch.released = True
        kept = _kept_after_release(branch)
        while len(branch.queue) > kept:
            queued = branch.queue.pop()
            if isinstance(queued, Asked):
                if isinstance(queued.command, Generate):
                    emit_cancelled(branch, queued.command)
            elif isinstance(queued, Inspect):
                emit_failed(branch.session, branch.id, _released_error(branch.id), queued.request)
            elif isinstance(queued, AdoptFrom):
                self.release(queued.child)
            elif isinstance(queued, GoInto):
                self._turns.touch(queued.parent)
        if kept == 0 and branch.work is not None:
            self._stop_work(branch.work)
        if branch.race is not None:
            branch.race.ended(branch, False, self.release)
        branch.waits_to_go = False
        self._turns.touch(branch)

    # --- one command each -------------------------------------------------------------------------------------------

    def _context(self, session: Session, command: Context) -> None:
        try:
            tenant = self._tenant(session, command)
            tenant.check_branches(1)
            branch = self._new_branch(session, command.branch, tenant)
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        branch.made = True
        branch.key = ROOT_KEY
        branch.strand.pinned = command.pin
        branch.queue.append(Asked(command, time.monotonic()))
        self._turns.touch(branch)

    def _fork(self, session: Session, command: Fork) -> None:
        if not 1 <= command.count <= MAX_CHILDREN_PER_FORK:
            err = InvalidParameterError(f"count = {command.count}: expected 1 to {MAX_CHILDREN_PER_FORK}", param="count")
            emit_failed(session, command.parent, err)
            return
        tenant, refusal = session.tenant, None
        try:
            parent = self._find(session, command.parent)
            tenant = parent.tenant
            tenant.check_branches(command.count)
        except BranchlineError as err:
            refusal = err
        children = []
        for branch_id in range(command.first, command.first + command.count):
            try:
                children.append(self._new_branch(session, branch_id, tenant))
            except BranchlineError as err:
                emit_failed(session, branch_id, err)
        if refusal is not None:
            for child in children:
                self._turns.fail(child, refusal)
            return
        parent.queue.append(ForkInto(children, command.first))
        self._turns.touch(parent)

    def _attach(self, session: Session, command: Attach) -> None:
        try:
            session.tenant.check_branches(1)
            child = self._new_branch(session, command.branch, session.tenant)
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
            self._turns.fail(child, err)
            return
        source.queue.append(ForkInto([child], command.branch))
        self._turns.touch(source)

    def _adopt(self, session: Session, command: Adopt) -> None:
        try:
            branch = self._find(session, command.branch)
            child = self._find(session, command.child)
            if branch is child:
                raise InvalidRequestError(f"branch {branch.id} can't adopt itself: name another branch as the child")
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        self._give_up_name(child)
        child.queue.append(GoInto(branch))
        branch.queue.append(AdoptFrom(child, command))
        self._turns.touch(child)
        self._turns.touch(branch)

    def _race(self, session: Session, command: Race) -> None:
        branches: list[Branch] = []
        first = command.branches[0] if command.branches else 0
        try:
            if not 1 <= command.winners <= len(command.branches):
                raise InvalidParameterError(
                    f"winners = {command.winners} of {len(command.branches)} branches: expected 1 to all of them",
                    param="winners",
                )
            for branch_id in command.branches:
                branch = self._find(session, branch_id)
                if branch.race is not None or branch in branches:
                    raise InvalidRequestError(f"branch {branch_id} takes part in a race already: it can be in one at a time")
                branches.append(branch)
        except BranchlineError as err:
            emit_failed(session, first, err, command.request)
            return
        RunningRace(session, command.request, command.winners, branches).begin(self.release)

    def _cancel(self, session: Session, command: Cancel) -> None:
        try:
            branch = self._find(session, command.branch)
        except BranchlineError as err:
            emit_failed(session, command.branch, err)
            return
        waiting = [queued for queued in branch.queue if isinstance(queued, Asked) and isinstance(queued.command, Generate)]
        for queued in waiting:
            branch.queue.remove(queued)
            if isinstance(queued.command, Generate):
                emit_cancelled(branch, queued.command)
        if branch.work is not None and branch.work.generation is not None:
            self._stop_work(branch.work)
        elif waiting and branch.race is not None:
            branch.race.ended(branch, False, self.release)
        self._turns.touch(branch)

    def _release_id(self, session: Session, branch_id: int) -> None:
        try:
            branch = self._find(session, branch_id)
        except BranchlineError as err:
            emit_failed(session, branch_id, err)
        else:
            self.release(branch)

    # --- names ------------------------------------------------------------------------------------------------------

    def _find(self, session: Session, branch_id: int) -> Branch:
        branch = session.branches.get(branch_id)
        if branch is not None:
            return branch
        if 0 <= branch_id < session.next_id:
            raise _released_error(branch_id)
        raise UnknownBranchError(f"branch {branch_id}: this session has made no such branch")

    def _tenant(self, session: Session, command: Context) -> Tenant:
        if command.tenant is None or command.tenant == session.tenant.name:
            return session.tenant
        if session.tenant.name:
            raise InvalidParameterError(
                f"tenant = {command.tenant!r}: the session is {session.tenant.name!r}'s, and works for no other", param="tenant"
            )
        return self._tenants.get(command.tenant)

    def _new_branch(self, session: Session, branch_id: int, tenant: Tenant) -> Branch:
        if branch_id < session.next_id:
            raise DuplicateBranchError(
                f"branch id {branch_id} was used before: ids of a session must grow, the next free one is {session.next_id}"
            )
        session.next_id = branch_id + 1
        tenant.branches += 1
        strand = Strand(tenant=self._tenants.core_number(tenant))
        branch = session.branches[branch_id] = Branch(session, branch_id, tenant, strand)
        return branch

    @staticmethod
    def _give_up_name(branch: Branch) -> None:
        if branch.session.branches.pop(branch.id, None) is not None:
            branch.tenant.branches -= 1


def _kept_after_release(branch: Branch) -> int:
    """How many of its queued commands still take effect: forks that were asked for before, and what they wait for."""
    closed = branch.session.closed

    def counts(queued: object) -> bool:
        return isinstance(queued, ForkInto) and not (closed and all(child.session.closed for child in queued.children))

    return max((i + 1 for i, queued in enumerate(branch.queue) if counts(queued)), default=0)


def _released_error(branch_id: int) -> ReleasedBranchError:
    return ReleasedBranchError(f"branch {branch_id} was released: fork before releasing to keep its content in use")
