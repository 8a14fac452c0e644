"""Who is told what the scheduler decides."""

from __future__ import annotations

from typing import Protocol

from branchline.engine.errors import BranchlineError
from branchline.engine.scheduler.work import Work


class Listener(Protocol):
    """Told at once, in the engine's thread."""

    def admitted(self, work: Work) -> None:
        """It has a slot, for the first time or again."""

    def yielded(self, work: Work, slot: int) -> None:
        """It gave its slot up, and waits."""

    def computed(self, work: Work) -> None:
        """A work without generation is done, and out."""

    def dropped(self, work: Work, slot: int | None, err: BranchlineError) -> None:
        """It can't be done, and is out; `slot`: the one that it had."""
