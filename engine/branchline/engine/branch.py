"""A client's session and its branches, as the engine thread keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import BranchlineError
from branchline.engine.types import Append, Context, Event, Generate, Inspect, Message

if TYPE_CHECKING:
    from branchline.engine.work import Work

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False
Sink = Callable[[tuple[Event, ...]], None]


@dataclass(slots=True, eq=False)
class ForkInto:
    """A `Fork` or `Attach` that waits for its parent's turn; the children exist already, without K/V."""

    children: list[Branch]
    first: int


Queued = Context | Append | Generate | Inspect | ForkInto


@dataclass(frozen=True, slots=True)
class ChatState:
    """The messages that a branch holds. `open`: its text ends in a generation prompt, perhaps with a reply after it."""

    messages: tuple[Message, ...]
    open: bool


@dataclass(slots=True, eq=False)
class Branch:
    """One branch of a session.

    Attributes:
        node: the core's handle; None until the fork that makes it has taken effect, and after the release.
        key: of its random stream (see model/rng.py); follows the path of forks from the root.
        pending: tokens at the end whose K/V isn't computed yet. Once work is done it is never empty on a branch with
            content: the last token stays pending, because whoever generates needs that token's logits.
        unanswered: `Ready` events still owed: (tokens added, when its turn came).
        queue: commands that wait for what runs now.
        work: what runs or waits for a slot now.
        error: set when a command failed; all later ones fail with FailedBranchError.
        released: the client gave it up; kept only until forks that it queued before have taken effect.
    """

    session: Session
    id: int
    node: int | None = None
    key: int = 0
    num_children: int = 0
    pending: Tokens = field(default_factory=lambda: NO_TOKENS)
    chat: ChatState | None = None
    unanswered: list[tuple[int, float]] = field(default_factory=list)
    queue: deque[Queued] = field(default_factory=deque)
    work: Work | None = None
    tokenizing: bool = False
    error: BranchlineError | None = None
    released: bool = False

    @property
    def busy(self) -> bool:
        """Whether its next command must wait."""
        return self.work is not None or self.tokenizing or self.node is None


@dataclass(slots=True, eq=False)
class Session:
    """One client's branches and its way back.

    Attributes:
        branches: by client-minted id; only those that are not released.
        next_id: ids below it were used: one that isn't in `branches` was released.
        outbox: events of the step under way; they leave as one batch.
        heard: monotonic seconds of the last sign of life.
    """

    id: str
    sink: Sink
    client: str
    heard: float
    branches: dict[int, Branch] = field(default_factory=dict)
    next_id: int = 0
    outbox: list[Event] = field(default_factory=list)
    closed: bool = False
