"""Tenants share one trainer and one set of engines: whose batch is trained next, and who may start more.

The queue is FIFO by completed batch. Two things come before arrival: a higher priority, and the fair share: a tenant
that had more than `slack` seconds of training above what the least served of those waiting had (each divided by its
weight) stands back. And one comes before both: a batch that was passed over `patience` times goes next.

Invariants
- A tenant has at most one batch in the queue, as under `alpha` 0; the queue is never empty-handed while one waits.
- No batch is passed over more than `patience` + (waiting tenants) times, whatever the priorities.
- Of two tenants of one priority that always have a batch waiting, neither gets more than `slack` and one batch
  ahead of its share.
- A tenant that was away has no claim to what it did not ask for: it comes back at the level of the least served.
- Admission gives all free slots away while somebody wants them, but for those that are kept for whoever comes next and
  needs more of them at once; and nobody more than its quota.
- Of tenants of one priority that always want more, none is kept from its share of the slots by what others began. A
  tenant that wants something and is passed over `patience` times by others' groups starts one, whatever the priorities.

Pure: no clock; what a batch cost is told afterwards with `served`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TenantShare:
    """What a tenant is entitled to."""

    weight: float = 1.0
    """Of the training time and of the engines, relative to the other tenants."""
    priority: int = 0
    """Higher goes first."""
    quota: int | None = None
    """Trajectories at once, at most."""

    def __post_init__(self) -> None:
        if self.weight <= 0 or (self.quota is not None and self.quota < 1):
            raise ValueError(f"a tenant's weight and quota must be above 0: {self}")


@dataclass
class _Waiting:
    arrived: int
    passed_over: int = 0


class TenantQueue:
    """Completed batches in front of the trainer."""

    def __init__(self, shares: Mapping[str, TenantShare], slack: float = 0.0, patience: int = 64):
        """`slack` in seconds of training; `patience` in batches of others. Raises ValueError for negative ones."""
        if slack < 0 or patience < 1:
            raise ValueError(f"slack ({slack}) must not be negative, patience ({patience}) at least 1")
        self._shares, self._slack, self._patience = dict(shares), slack, patience
        self._waiting: dict[str, _Waiting] = {}
        self._had: dict[str, float] = {}
        """Seconds of training by weight, since a common beginning."""
        self._level = 0.0
        """What the least served of those waiting had, at the last time that one was taken."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def share(self, tenant: str) -> TenantShare:
        return self._shares.get(tenant, TenantShare())

    def entitle(self, shares: Mapping[str, TenantShare]) -> None:
        """From now on these are all the tenants, with these shares. One that left is forgotten."""
        self._shares = dict(shares)
        for tenant in self._had.keys() - shares.keys():
            del self._had[tenant]
            self.withdraw(tenant)

    def offer(self, tenant: str) -> None:
        """A batch of this tenant is complete. Raises ValueError when one of its batches waits already."""
        if tenant in self._waiting:
            raise ValueError(f"tenant {tenant!r} offers a second batch before its first one was trained")
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._level)
        self._waiting[tenant] = _Waiting(self._arrivals)
        self._arrivals += 1

    def withdraw(self, tenant: str) -> None:
        """Forget the batch of a tenant that failed or left."""
        self._waiting.pop(tenant, None)

    def take(self) -> str | None:
        """The tenant whose batch is trained next, which leaves the queue; None when none waits."""
        if not self._waiting:
            return None
        self._level = max(self._level, min(self._had[t] for t in self._waiting))
        overdue = [t for t, w in self._waiting.items() if w.passed_over >= self._patience]
        candidates = overdue or self._entitled()
        chosen = min(candidates, key=lambda t: self._waiting[t].arrived)
        arrived = self._waiting.pop(chosen).arrived
        for waiting in self._waiting.values():
            waiting.passed_over += waiting.arrived < arrived
        return chosen

    def served(self, tenant: str, seconds: float) -> None:
        """The trainer spent so long on a batch of this tenant."""
        self._had[tenant] = self._had.get(tenant, 0.0) + seconds / self.share(tenant).weight

    def _entitled(self) -> list[str]:
        """Those of the highest priority that are within their share."""
        top = max(self.share(t).priority for t in self._waiting)
        first = [t for t in self._waiting if self.share(t).priority == top]
        least = min(self._had[t] for t in first)
        return [t for t in first if self._had[t] <= least + self._slack]


@dataclass(frozen=True)
class Demand:
    """What a tenant would start now."""

    wanted: int
    """Trajectories that its staleness bound allows, and are not started."""
    in_flight: int = 0
    together: int = 1
    """Trajectories that start together, as a group: only whole ones are given."""


class PassedOver:
    """How many groups of others were started while each tenant wanted to start one, since its last."""

    def __init__(self, patience: int = 64):
        self._patience = patience
        self._groups: dict[str, int] = {}

    def groups(self, tenant: str) -> int:
        return self._groups.get(tenant, 0)

    def overdue(self, tenant: str) -> bool:
        return self.groups(tenant) >= self._patience

    def note(self, started: Mapping[str, int], wanting: Iterable[str]) -> None:
        """So many groups were started, while these tenants wanted to. Who wants nothing is forgotten."""
        total = sum(started.values())
        self._groups = {t: 0 if started.get(t) else self._groups.get(t, 0) + total for t in wanting}


def allot(
    free: int,
    demands: Mapping[str, Demand],
    shares: Mapping[str, TenantShare],
    batches_waiting: int = 0,
    passed_over: PassedOver | None = None,
) -> dict[str, int]:
    """How many of the `free` trajectories each tenant may start now.

    While the trainer has work (`batches_waiting`), by weighted fair share: whoever holds the least for its weight
    gets the next one, and of equals whoever was passed over most. While it has none, a batch that is nearly started
    is completed first, for a slot that makes a batch whole keeps the trainer busy sooner; but beyond its tenant's
    share only if it becomes whole now, or who has begun would keep out who comes. Higher priorities come before both,
    and a first group of those that are overdue before everything."""
    given = dict.fromkeys(demands, 0)
    passed_over = passed_over or PassedOver()

    def share(tenant: str) -> TenantShare:
        return shares.get(tenant, TenantShare())

    begun_with = free
    slots = free + sum(demand.in_flight for demand in demands.values())
    level = slots / max(1e-9, sum(share(tenant).weight for tenant in demands))
    """What each would hold for its weight if all held the same."""

    def room(tenant: str) -> int:
        demand, quota = demands[tenant], share(tenant).quota
        held = demand.in_flight + given[tenant]
        return min(demand.wanted - given[tenant], demand.wanted if quota is None else max(0, quota - held))

    def need(tenant: str) -> tuple[float, ...]:
        demand, priority = demands[tenant], -share(tenant).priority
        held = (demand.in_flight + given[tenant]) / share(tenant).weight
        waited = -share(tenant).weight * passed_over.groups(tenant) if not given[tenant] else 0.0
        if passed_over.overdue(tenant) and not given[tenant]:
            return 0, priority, 0, 0, 0, waited
        if batches_waiting == 0 and held > 0 and (held < level or demand.wanted <= begun_with):
            return 1, priority, 0, demand.wanted - given[tenant], held, waited
        return 1, priority, 1, held, 0, waited

    # One that is given does not change what the others need: the order of all others stays.
    waiting = [(need(tenant), tenant) for tenant, demand in demands.items() if room(tenant) >= demand.together]
    heapq.heapify(waiting)
    while waiting:
        _, tenant = heapq.heappop(waiting)
        size = demands[tenant].together
        if size > free:  # what is free is kept for it, or small groups would always be before it
            break
        given[tenant] += size
        free -= size
        if room(tenant) >= size:
            heapq.heappush(waiting, (need(tenant), tenant))
    return {tenant: count for tenant, count in given.items() if count}
