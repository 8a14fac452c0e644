"""What is expected to end soonest first."""

from __future__ import annotations

from branchline.engine.scheduler.policies.base import Policy as Base
from branchline.engine.scheduler.work import Rank, Work

# So many tokens fewer are worth `ageing_s` seconds of waiting.
_TOKENS_PER_STEP = 256


class Policy(Base):
    """Fewest expected tokens first, with ageing: long work isn't put off for ever. Running work yields to work that is
    expected to take less than half of what it still takes itself."""

    compares_expected = True

    def order(self, work: Work) -> Rank:
        return (work.submitted + self.config.ageing_s * work.expected_tokens / _TOKENS_PER_STEP,)

    def may_preempt(self, waiting: Work, running: Work) -> bool:
        return 2 * waiting.expected_tokens < running.expected_tokens
