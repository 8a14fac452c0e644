"""Where a request goes, as plain functions: no Ray here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

GRACE_S: Final = 1.0


class Decision(Enum):
    """What to do with a request."""

    PINNED = "pinned"
    """Send it to the replica that it names, and to no other."""
    WAIT = "wait"
    """It names a replica that isn't known here: perhaps it has just come up."""
    ANY = "any"
    """Send it to the least loaded replica."""


def decide(wanted: str, known: Sequence[str], waited_s: float, grace_s: float = GRACE_S) -> Decision:
    """Decide from the replica that a request names ("" for none), those that are up, and how long it waits already.

    A named replica that doesn't show up within the grace is gone, and its sessions with it: any other replica then answers
    that it has no such session, which is the truth and a typed error.
    """
    if not wanted:
        return Decision.ANY
    if wanted in known:
        return Decision.PINNED
    return Decision.WAIT if waited_s < grace_s else Decision.ANY


def least_loaded(load: Mapping[str, int]) -> str:
    """The name with the smallest load; of equals the first one. Raises ValueError when there is none."""
    return min(load, key=lambda name: load[name])
