"""Whom work is done for: shares and limits."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from branchline.engine.config import SchedulingConfig, TenantConfig
from branchline.engine.errors import TenantLimitError

MAX_TENANTS = 1 << 16
_MINUTE_S = 60.0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant, as an engine knows it.

    Attributes:
        number: from 0, in the order in which tenants came; the core counts pages for it.
        counter: service that it got, divided by its weight (see policies/fair.py).
        branches: alive now.
        works: that wait or run now.
        running: that have a slot now.
    """

    name: str
    number: int
    config: TenantConfig
    counter: float = 0.0
    branches: int = 0
    works: int = 0
    running: int = 0
    _allowance: float = 0.0
    _refilled: float | None = None

    def check_branches(self, more: int) -> None:
        """Raises TenantLimitError if `more` branches are too many."""
        limit = self.config.max_branches
        if limit is not None and self.branches + more > limit:
            raise TenantLimitError(
                f"tenant {self.name!r} has {self.branches} branches and asked for {more} more: "
                f"its limit is {limit}; release some"
            )

    def check_rate(self, now: float) -> None:
        """Raises TenantLimitError if the minute's tokens are used up; says when the next will be there."""
        limit = self.config.tokens_per_minute
        if limit is None:
            return
        self._refill(now, limit)
        if self._allowance <= 0:
            wait = (1 - self._allowance) * _MINUTE_S / limit
            raise TenantLimitError(
                f"tenant {self.name!r} has used its {limit} tokens a minute: try again in {wait:.1f} s", retry_after_s=wait
            )

    def charge(self, cost: float, num_tokens: int, now: float) -> None:
        """Count service: `cost` for the share, `num_tokens` for the rate. What is under way may overdraw the rate."""
        self.counter += cost / self.config.weight
        if self.config.tokens_per_minute is not None:
            self._refill(now, self.config.tokens_per_minute)
            self._allowance -= num_tokens

    def _refill(self, now: float, limit: int) -> None:
        # A token bucket that holds one minute's tokens.
        if self._refilled is None:
            self._allowance = float(limit)
        else:
            self._allowance = min(float(limit), self._allowance + (now - self._refilled) * limit / _MINUTE_S)
        self._refilled = now


class Tenants:
    """All tenants that an engine has heard of."""

    def __init__(self, config: SchedulingConfig) -> None:
        self._config = config
        self._by_name: dict[str, Tenant] = {}
        self._lock = threading.Lock()
        self.all: list[Tenant] = []
        self._with_work: dict[Tenant, None] = {}
        self._last_counter = 0.0

    def get(self, name: str) -> Tenant:
        """The tenant of that name. Raises TenantLimitError after 65,536 names."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self.all) == MAX_TENANTS:
                raise TenantLimitError(
                    f"tenant {name!r} would be one more than the {MAX_TENANTS} that an engine can tell apart"
                )
            tenant = Tenant(name, len(self.all), self._config.tenants.get(name, self._config.default_tenant))
            self._by_name[name] = tenant
            self.all.append(tenant)
        return tenant

    def work_came(self, tenant: Tenant) -> None:
        """A work more is to be done for the tenant. One that had none can't claim the service of that time: its counter is
        lifted to the least of those that have (all must be up to date), or to that of the last one that had."""
        if tenant.works == 0:
            others = [other.counter for other in self._with_work]
            tenant.counter = max(tenant.counter, min(others) if others else self._last_counter)
            self._with_work[tenant] = None
        tenant.works += 1

    def work_went(self, tenant: Tenant) -> None:
        """A work less."""
        tenant.works -= 1
        if tenant.works == 0:
            self._last_counter = tenant.counter
            del self._with_work[tenant]

    def core_number(self, tenant: Tenant) -> int:
        """What the core counts its pages under, and keeps its cached prefixes under: one for all unless they are isolated."""
        return tenant.number if self._config.isolate_tenants else 0
