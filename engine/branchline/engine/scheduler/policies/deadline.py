"""Earliest deadline first."""

from __future__ import annotations

from branchline.engine.scheduler.policies.base import Policy as Base
from branchline.engine.scheduler.work import Rank, Work

# Work without a deadline is ordered as if it had to end so many seconds after it came.
_ASSUMED_S = {"interactive": 10.0, "standard": 60.0, "batch": 600.0}


class Policy(Base):
    """Earliest deadline first (Liu and Layland 1973). Running work yields to work that has an earlier deadline of its own."""

    def order(self, work: Work) -> Rank:
        deadline = work.deadline
        return (work.submitted + _ASSUMED_S[work.service.qos] if deadline is None else deadline,)

    def may_preempt(self, waiting: Work, running: Work) -> bool:
        return waiting.deadline is not None and waiting.rank < running.rank
