"""First come, first served."""

from __future__ import annotations

from branchline.engine.scheduler.policies.base import Policy as Base
from branchline.engine.scheduler.work import Rank, Work


class Policy(Base):
    """In the order of arrival; priorities, classes and tenants don't matter."""

    def order(self, work: Work) -> Rank:
        return (work.submitted,)
