"""Races: of several branches the first whose generations end stay, the others are released at that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from branchline.engine.branch import Branch, Session
from branchline.engine.outbox import emit
from branchline.engine.types import Raced


@dataclass(slots=True, eq=False)
class RunningRace:
    """One `Race`.

    Attributes:
        branches: all that take part.
        still_in: those of which it isn't known how they end.
        winners: in the order in which they ended.
    """

    session: Session
    request: int
    num_winners: int
    branches: list[Branch]
    still_in: set[Branch] = field(default_factory=set)
    winners: list[Branch] = field(default_factory=list)

    def begin(self, release: Callable[[Branch], None]) -> None:
        """All branches take part from now on."""
        self.still_in = {branch for branch in self.branches if branch.error is None}
        for branch in self.still_in:
            branch.race = self
        self._judge(release)

    def ended(self, branch: Branch, won: bool, release: Callable[[Branch], None]) -> None:
        """A branch's generation ended by itself (`won`), or it can't win any more."""
        branch.race = None
        self.still_in.discard(branch)
        if won:
            self.winners.append(branch)
        self._judge(release)

    def _judge(self, release: Callable[[Branch], None]) -> None:
        if len(self.winners) < self.num_winners and self.still_in:
            return
        for branch in self.branches:
            branch.race = None
        losers = [branch for branch in self.branches if branch not in self.winners and not branch.released]
        for branch in losers:
            release(branch)
        winners = tuple(branch.id for branch in self.winners)
        emit(self.session, Raced(self.request, winners, tuple(branch.id for branch in losers)))
