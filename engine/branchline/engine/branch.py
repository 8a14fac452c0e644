"""A client's session and its branches, as the engine thread keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branchline.engine.errors import BranchlineError
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.types import DEFAULT_SERVICE, Adopt, Append, Context, Event, Generate, Inspect, Message, Pin, Service

if TYPE_CHECKING:
    from branchline.engine.races import RunningRace
    from branchline.engine.work import Work

Sink = Callable[[tuple[Event, ...]], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A command that waits for its branch's turn. `at`: monotonic seconds when it came; deadlines and timings count from it."""

    command: Context | Append | Generate
    at: float


@dataclass(slots=True, eq=False)
class ForkInto:
    """A `Fork` or `Attach` that waits for its parent's turn; the children exist already, without K/V."""

    children: list[Branch]
    first: int


@dataclass(slots=True, eq=False)
class AdoptFrom:
    """An `Adopt` that waits for its branch's turn, and for its child's."""

    child: Branch
    command: Adopt


@dataclass(slots=True, eq=False)
class GoInto:
    """An adopted branch's own end of an `Adopt`: when its turn comes nothing runs on it any more."""

    parent: Branch


Queued = Asked | Inspect | Pin | ForkInto | AdoptFrom | GoInto


@dataclass(frozen=True, slots=True)
class ChatState:
    """The messages that a branch holds. `open`: its text ends in a generation prompt, perhaps with a reply after it."""

    messages: tuple[Message, ...]
    open: bool


@dataclass(slots=True, eq=False)
class Branch:
    """One branch of a session.

    Attributes:
        tenant: whom its work is done for.
        strand: its tokens, and their K/V.
        made: its `Context` came, or the fork that makes it has taken effect.
        key: of its random stream (see model/rng.py); follows the path of forks from the root.
        unanswered: `Ready` events still owed: (tokens added, when its turn came).
        cached_told: tokens found in the prefix cache that `Ready` events have told of.
        queue: commands that wait for what runs now.
        work: what runs or waits for a slot now.
        service, asked_at: of what was last appended.
        waits_to_go: its turn to be adopted has come.
        race: that its next generation takes part in.
        error: set when a command failed; all later ones fail with FailedBranchError.
        released: the client gave it up; kept only until forks that it queued before have taken effect.
    """

    session: Session
    id: int
    tenant: Tenant
    strand: Strand
    made: bool = False
    key: int = 0
    num_children: int = 0
    chat: ChatState | None = None
    unanswered: list[tuple[int, float]] = field(default_factory=list)
    cached_told: int = 0
    queue: deque[Queued] = field(default_factory=deque)
    work: Work | None = None
    service: Service = DEFAULT_SERVICE
    asked_at: float = 0.0
    tokenizing: bool = False
    waits_to_go: bool = False
    race: RunningRace | None = None
    error: BranchlineError | None = None
    released: bool = False

    @property
    def busy(self) -> bool:
        """Whether its next command must wait."""
        return self.work is not None or self.tokenizing or self.waits_to_go or not self.made


@dataclass(slots=True, eq=False)
class Session:
    """One client's branches and its way back.

    Attributes:
        tenant: whom its branches work for unless they say otherwise.
        branches: by client-minted id; only those that are not released.
        next_id: ids below it were used: one that isn't in `branches` was released.
        outbox: events of the step under way; they leave as one batch.
        heard: monotonic seconds of the last sign of life.
    """

    id: str
    sink: Sink
    client: str
    tenant: Tenant
    heard: float
    branches: dict[int, Branch] = field(default_factory=dict)
    next_id: int = 0
    outbox: list[Event] = field(default_factory=list)
    closed: bool = False
