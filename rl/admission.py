"""How many generations of a tenant and of a domain may be in flight: one state machine, without clock or I/O.

    submit -> running ------------------------------ leave -> gone, and those that waited for it run
          \\-> waiting (in order of arrival) --------/
          \\-> refused (too many wait already)

Invariants
- Never more than its limit of a tenant or a domain run; who has no limit never waits.
- Work conserving and first come, first served: when a place is free, the first of those that could take it has it. A
  domain that is full holds up no other.
- Never more than `WAITING` times its limit of a domain, or of a tenant, wait.
"""

from __future__ import annotations

from collections import Counter
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
    _waiting: dict[int, tuple[str, str]] = field(default_factory=dict)
    _queued: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def submit(self, ticket: int, tenant: str, domain: str) -> bool:
        """Whether it runs at once; else it waits until a `leave` names its ticket. Raises TooMany."""
        if self._fits(tenant, domain):
            self._start(tenant, domain)
            return True
        for name, key, limit in self._limits(tenant, domain):
            if self._queued[key] >= WAITING * limit:
                raise TooMany(f"{name}: {limit} generations run and {self._queued[key]} wait, which is as many as may")
        self._waiting[ticket] = (tenant, domain)
        self._queued.update([(tenant,), (tenant, domain)])
        return False

    def leave(self, ticket: int, tenant: str, domain: str) -> list[int]:
        """It ended, or waits no more; the tickets of those that run now."""
        if ticket in self._waiting:
            self._forget(ticket)
            return []
        self.running.subtract([(tenant,), (tenant, domain)])
        started = []
        for waiting, (of_tenant, of_domain) in list(self._waiting.items()):
            if self._fits(of_tenant, of_domain):
                self._forget(waiting)
                self._start(of_tenant, of_domain)
                started.append(waiting)
        return started

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _limits(self, tenant: str, domain: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
        if tenant in self.tenants:
            yield f"tenant {tenant}", (tenant,), self.tenants[tenant]
        if (tenant, domain) in self.domains:
            yield f"domain {domain}", (tenant, domain), self.domains[tenant, domain]

    def _fits(self, tenant: str, domain: str) -> bool:
        return all(self.running[key] < limit for _, key, limit in self._limits(tenant, domain))

    def _start(self, tenant: str, domain: str) -> None:
        self.running.update([(tenant,), (tenant, domain)])

    def _forget(self, ticket: int) -> None:
        tenant, domain = self._waiting.pop(ticket)
        self._queued.subtract([(tenant,), (tenant, domain)])
