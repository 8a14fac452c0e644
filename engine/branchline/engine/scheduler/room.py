"""Whether there is room for a work, and who must yield to make some."""

from __future__ import annotations

from collections.abc import Iterator

from branchline.engine._core import BranchTree
from branchline.engine.config import SchedulingConfig
from branchline.engine.errors import PoolTooSmallError, TenantLimitError
from branchline.engine.scheduler.kv_cache import KvCache
from branchline.engine.scheduler.lengths import OutputLengths
from branchline.engine.scheduler.policies.base import Policy
from branchline.engine.scheduler.slots import Slots
from branchline.engine.scheduler.strand import Strand
from branchline.engine.scheduler.tenants import Tenants
from branchline.engine.scheduler.work import Work

# Outputs are promised pages for the length that this share of them doesn't pass.
_LIKELY = 0.75
# Whom what runs doesn't yield to is tried again after so many steps, or when other work runs.
_STEPS_BETWEEN_TRIALS = 8


class Room:
    """Slots and pages: wanted, promised, and to be had from those who yield. Decides; changes nothing but parked K/V."""

    def __init__(
        self,
        tree: BranchTree,
        config: SchedulingConfig,
        policy: Policy,
        tenants: Tenants,
        cache: KvCache,
        slots: Slots,
        lengths: OutputLengths,
    ) -> None:
        self._tree = tree
        self._config = config
        self._policy = policy
        self._tenants = tenants
        self._cache = cache
        self._slots = slots
        self._lengths = lengths
        self._may_yield = config.preemption and type(policy).may_preempt is not Policy.may_preempt
        self._refused: tuple[Work, int] | None = None
        self._trials_to_skip = 0

    def check_fits(self, strand: Strand, num_tokens: int) -> None:
        """Raises PoolTooSmallError, or TenantLimitError, if a strand that has `num_tokens` beyond what its node holds can't
        be held even when it is alone."""
        tree = self._tree
        if strand.node is None:
            need = -(-num_tokens // tree.page_tokens)
        else:
            _, _, shared_pages, private_pages, _ = tree.describe(strand.node)
            need = shared_pages + private_pages + tree.pages_needed(strand.node, num_tokens)
        if need > tree.num_pages:
            raise PoolTooSmallError(
                f"{num_tokens} tokens need {need} pages of {tree.page_tokens} with what the branch holds: "
                f"the pool has {tree.num_pages} in all; shorten the text or max_tokens, or give the engine a larger pool"
            )
        if self._config.isolate_tenants:
            tenant = self._tenants.all[strand.tenant]
            limit = tenant.config.max_pages
            if limit is not None and need > limit:
                raise TenantLimitError(
                    f"{num_tokens} tokens need {need} pages of {tree.page_tokens} with what the branch holds: "
                    f"tenant {tenant.name!r} may own {limit}; shorten the text or max_tokens"
                )

    def expected_output(self, work: Work) -> int:
        """Tokens that the work is expected to generate yet."""
        if self._config.reserve == "max":
            return work.max_tokens - work.num_generated
        return self._lengths.remaining(work.num_generated, work.max_tokens, _LIKELY)

    def tokens_promised(self, work: Work) -> int:
        """Tokens of K/V that it is promised pages for."""
        left = work.prefill_left
        return left if work.max_tokens == 0 else min(work.most_left, left + self.expected_output(work))

    def pages_wanted(self, work: Work) -> int:
        """Pages of those that nobody holds that the work takes for what it's promised."""
        strand, num_tokens = work.strand, self.tokens_promised(work)
        if strand.node is not None:
            return self._tree.pages_needed(strand.node, num_tokens)
        found, idle_pages = self._cache.peek(strand)
        page_tokens = self._tree.page_tokens
        return -(-num_tokens // page_tokens) - found // page_tokens + idle_pages

    def is_over_limit(self, work: Work) -> bool:
        """Whether its tenant's own limit of pages keeps the work waiting. Takes K/V of the tenant's idle branches first."""
        limit = work.tenant.config.max_pages
        if limit is None:
            return False
        tenant = work.strand.tenant
        wanted = self.pages_wanted(work)
        while self._tree.tenant_pages(tenant) - self._tree.tenant_cached_pages(tenant) + wanted > limit:
            if not self._cache.reclaim_from(tenant, work.strand):
                return True
        return False

    def over_limit(self, work: Work) -> TenantLimitError:
        """What to say of a work that its tenant's pinned branches leave no pages."""
        tenant = work.strand.tenant
        held = self._tree.tenant_pages(tenant) - self._tree.tenant_cached_pages(tenant)
        return TenantLimitError(
            f"{self.pages_wanted(work)} pages are needed, and tenant {work.tenant.name!r} holds {held} of the "
            f"{work.tenant.config.max_pages} that it may own with pinned branches: unpin or release some"
        )

    def find(self, work: Work) -> list[Work] | None:
        """Who must yield so that the work can run: nobody, some, or None: it can't run now. Idle branches give up their K/V
        first."""
        victims: list[Work] = []
        if self._slots.num_free == 0:
            if not self._is_worth_a_trial(work):
                return None
            victim = min(self._candidates(work), key=self._tokens_lost, default=None)
            if victim is None:
                self._refuse(work)
                return None
            victims = [victim]
        self._cache.unpark(work.strand)
        found = self._find_pages(work, victims)
        if found is None:
            self._cache.park(work.strand)
        return found

    def last_in_rank(self) -> Work:
        """The running work that everybody goes before."""
        return max(self._slots.works.values(), key=lambda work: (self._policy.share(work.tenant), work.rank))

    def _find_pages(self, work: Work, victims: list[Work]) -> list[Work] | None:
        page_tokens = self._tree.page_tokens
        promised = int(self._slots.promised_pages(page_tokens) / self._config.overcommit)
        freed = sum(self._pages_freed(victim) for victim in victims)
        lacking = self.pages_wanted(work) + promised - freed - self._cache.available
        while lacking > 0 and self._cache.num_parked:
            # What parked branches give up may be what the work itself would find: what it wants is counted again.
            self._cache.reclaim(self._cache.available + lacking)
            lacking = self.pages_wanted(work) + promised - freed - self._cache.available
        if lacking <= 0:
            return victims
        if not self._slots.works and promised == 0:
            return None
        if not self._is_worth_a_trial(work):
            return None
        # Those that free most pages for the least that must be computed again.
        others = [(*self._private_part(other), other) for other in self._candidates(work) if other not in victims]
        others.sort(key=lambda entry: (entry[1] / max(entry[0], 1), -entry[0]))
        simulated: list[Work] = []
        try:
            for _, _, other in others:
                if lacking <= 0:
                    break
                # The policy may look at how much each tenant has running.
                if self._policy.may_preempt(work, other):
                    simulated.append(other)
                    other.tenant.running -= 1
                    lacking -= self._pages_freed(other)
        finally:
            for other in simulated:
                other.tenant.running += 1
        if lacking > 0:
            self._refuse(work)
            return None
        return victims + simulated

    def _is_worth_a_trial(self, work: Work) -> bool:
        if not self._may_yield:
            return False
        if self._refused == (work, self._slots.version) and self._trials_to_skip > 0:
            self._trials_to_skip -= 1
            return False
        return True

    def _refuse(self, work: Work) -> None:
        self._refused, self._trials_to_skip = (work, self._slots.version), _STEPS_BETWEEN_TRIALS

    def _candidates(self, work: Work) -> Iterator[Work]:
        for other in self._slots.works.values():
            if self._policy.compares_expected:
                self._slots.count(other)
                other.expected_tokens = other.prefill_left + self.expected_output(other)
            if self._policy.may_preempt(work, other):
                yield other

    def _private_part(self, work: Work) -> tuple[int, int]:
        assert work.strand.node is not None
        return self._tree.private_part(work.strand.node)

    def _tokens_lost(self, work: Work) -> int:
        return self._private_part(work)[1]

    def _pages_freed(self, work: Work) -> int:
        promised = self._slots.promised_to(work, self._tree.page_tokens)
        return promised + (0 if work.strand.pinned else self._private_part(work)[0])
