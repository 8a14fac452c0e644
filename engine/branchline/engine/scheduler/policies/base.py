"""What a scheduling policy decides."""

from __future__ import annotations

import abc
from typing import ClassVar

from branchline.engine.config import SchedulingConfig
from branchline.engine.scheduler.tenants import Tenant
from branchline.engine.scheduler.work import Rank, Work


class Policy(abc.ABC):
    """Who goes first, and who must yield to whom. One instance belongs to one engine and is used from its thread.

    A policy of your own is a subclass that `scheduling.policy` names as "package.module:Class". It is asked when work
    arrives, is admitted or must yield: never once a token.

    Attributes:
        compares_expected: whether `may_preempt` reads `running.expected_tokens`. It is brought up to date for that, for all
            that runs; where this is False it is as old as the work's last place in the queue.
    """

    compares_expected: ClassVar[bool] = False

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def order(self, work: Work) -> Rank:
        """The work's rank among those of its tenant: lower goes first. Asked when it comes, and again when it yielded."""

    def share(self, tenant: Tenant) -> float:
        """Lower goes first among tenants; where it is equal for all, as here, ranks alone decide."""
        return 0.0

    def may_preempt(self, waiting: Work, running: Work) -> bool:
        """Whether `running` yields to `waiting`, which finds no room. For no two works may it be true both ways."""
        return False


def urgency(work: Work, ageing_s: float) -> float:
    """When a work would have come had it had priority 0: each step of priority is worth `ageing_s` seconds of waiting.

    Waiting makes all works more urgent at the same rate, so that their order never changes while they wait, and none waits for
    ever behind later ones of a higher priority."""
    return work.submitted - ageing_s * work.level
