"""By priority, with ageing."""

from __future__ import annotations

from branchline.engine.scheduler.policies.base import Policy as Base
from branchline.engine.scheduler.policies.base import urgency
from branchline.engine.scheduler.work import Rank, Work


class Policy(Base):
    """The most urgent first. Running work yields to work of a higher priority (or class of service)."""

    def order(self, work: Work) -> Rank:
        return (urgency(work, self.config.ageing_s),)

    def may_preempt(self, waiting: Work, running: Work) -> bool:
        return waiting.level > running.level and waiting.rank < running.rank
