"""How many generations of a tenant and of a domain may be in flight: one state machine, without clock or I/O.

    submit -> running ------------------------------ leave -> gone, and those that waited for it run
          \\-> waiting (in order of arrival) --------/
          \\-> refused (too many wait already)

Invariants
- Never more than its limit of a tenant or a domain run; who has no limit never waits.
- Work conserving and first come, first served: when a place is free, the first of those that could take it has it. A
  domain that is full holds up no other.
- Never more than `WAITING` times its limit of a domain, or of a tenant, wait.
- What an end costs does not depend on how many wait: only the first ones of the domains of its tenant are looked at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

WAITING = 16


class TooMany(Exception):
    """Too many wait already; the message says for what."""


@dataclass(slots=True)
class Admission:
    """Limits by tenant and by (tenant, domain); who is not named there has none."""

    tenants: Mapping[str, int] = field(default_factory=dict)
    domains: Mapping[tuple[str, str], int] = field(default_factory=dict)
    running: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _waiting: dict[str, dict[str, OrderedDict[int, int]]] = field(default_factory=dict)
    """By tenant and domain: tickets, in order of arrival, with the number of their arrival."""
    _arrivals: int = 0
    _queued: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def submit(self, ticket: int, tenant: str, domain: str) -> bool:
        """Whether it runs at once; else it waits until a `leave` names its ticket. Raises TooMany."""
        if self._fits(tenant, domain):
            self._start(tenant, domain)
            return True
        for name, key, limit in self._limits(tenant, domain):
            if self._queued[key] >= WAITING * limit:
                raise TooMany(f"{name}: {limit} generations run and {self._queued[key]} wait, which is as many as may")
        self._arrivals += 1
        self._waiting.setdefault(tenant, {}).setdefault(domain, OrderedDict())[ticket] = self._arrivals
        self._queued.update([(tenant,), (tenant, domain)])
        return False

    def leave(self, ticket: int, tenant: str, domain: str) -> list[int]:
        """It ended, or waits no more; the tickets of those that run now."""
        if ticket in self._waiting.get(tenant, {}).get(domain, ()):
            self._forget(ticket, tenant, domain)
            return []
        self.running.subtract([(tenant,), (tenant, domain)])
        started: list[int] = []
        while (first := self._first(tenant)) is not None:
            waiting, of_domain = first
            self._forget(waiting, tenant, of_domain)
            self._start(tenant, of_domain)
            started.append(waiting)
        return started

    def _first(self, tenant: str) -> tuple[int, str] | None:
        """The ticket of this tenant, with its domain, that waits longest of those that can run."""
        heads = [
            (number, ticket, domain)
            for domain, queue in self._waiting.get(tenant, {}).items()
            if self._fits(tenant, domain)
            for ticket, number in (next(iter(queue.items())),)
        ]
        if not heads:
            return None
        _, ticket, domain = min(heads)
        return ticket, domain

    @property
    def waiting(self) -> int:
        return sum(len(queue) for domains in self._waiting.values() for queue in domains.values())

    def _limits(self, tenant: str, domain: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
        if tenant in self.tenants:
            yield f"tenant {tenant}", (tenant,), self.tenants[tenant]
        if (tenant, domain) in self.domains:
            yield f"domain {domain}", (tenant, domain), self.domains[tenant, domain]

    def _fits(self, tenant: str, domain: str) -> bool:
        return all(self.running[key] < limit for _, key, limit in self._limits(tenant, domain))

    def _start(self, tenant: str, domain: str) -> None:
        self.running.update([(tenant,), (tenant, domain)])

    def _forget(self, ticket: int, tenant: str, domain: str) -> None:
        queues = self._waiting[tenant]
        del queues[domain][ticket]
        if not queues[domain]:
            del queues[domain]
        if not queues:
            del self._waiting[tenant]
        self._queued.subtract([(tenant,), (tenant, domain)])
