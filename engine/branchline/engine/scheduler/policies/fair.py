"""Weighted fair service between tenants."""

from __future__ import annotations

from branchline.engine.scheduler.policies.priority import Policy as Priority
from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.scheduler.work import Work


class Policy(Priority):
    """The tenant that was served least goes first, and within a tenant the most urgent work.

    Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows by
    the tokens that are computed (1 each) and generated (2 each) for it, divided by its weight; one that comes back is lifted
    to the least counter of those that have work, so that it can't claim service for the time when it wanted none. Over what
    the paper has: running work yields to a tenant that was served less and has less than half as much of the batch for its
    weight, so that a storm of one tenant doesn't make the others wait until it is over. (Yielding for smaller differences
    costs more in what is computed again than it evens out.)
    """

    def share(self, tenant: Tenant) -> float:
        return tenant.counter

    def may_preempt(self, waiting: Work, running: Work) -> bool:
        mine, theirs = waiting.tenant, running.tenant
        if mine is theirs:
            return super().may_preempt(waiting, running)
        has_less = theirs.running / theirs.config.weight > 2 * (mine.running + 1) / mine.config.weight
        return has_less and mine.counter <= theirs.counter
