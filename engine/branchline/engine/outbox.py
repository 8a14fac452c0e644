"""Events into a session's next batch."""

from __future__ import annotations

from branchline.engine.branch import Branch, Session
from branchline.engine.errors import BranchlineError
from branchline.engine.types import ErrorInfo, Event, Failed, Finished, Generate, Timing, Usage


def emit(session: Session, event: Event) -> None:
    """Put an event into the session's next batch; a closed session gets none."""
    if not session.closed:
        session.outbox.append(event)


def emit_cancelled(branch: Branch, command: Generate) -> None:
    """End a generation that hadn't begun."""
    emit(branch.session, Finished(branch.id, command.request, "cancelled", Usage(0, 0, 0), Timing(0.0, 0.0, 0.0)))


def emit_failed(session: Session, branch_id: int, err: BranchlineError, request: int | None = None) -> None:
    """Put a `Failed` event into the session's next batch."""
    emit(session, Failed(branch_id, ErrorInfo.of(err), request))
