"""The limits of `rl.admission` on one event loop: a generation holds a place, or waits for one.

Invariant: a place is given back on every way out, also by one that waited and was cancelled as it got it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from infra.proxy.refusals import Denied
from rl.admission import Admission, TooMany
from rl.config.run import RunConfig

BUSY = 429
"""Status of a refusal for want of places."""


class Places:
    """Of one proxy."""

    def __init__(self, policy: Admission):
        self._policy = policy
        self._tickets = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @classmethod
    def of(cls, config: RunConfig, tenant: str) -> Places:
        """What the run's configuration says, for the tenant under whose name the engine serves it."""
        domains = {(tenant, d.name): d.generations for d in config.domains if d.generations is not None}
        total = config.rollout.generations
        return cls(Admission({} if total is None else {tenant: total}, domains))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, tenant: str, domain: str) -> AsyncIterator[None]:
        """Hold a place. Raises Denied (429, `too_many_requests`) when too many wait already."""
        ticket = next(self._tickets)
        try:
            admitted = self._policy.submit(ticket, tenant, domain)
        except TooMany as error:
            raise Denied("too_many_requests", BUSY, str(error)) from error
        try:
            if not admitted:
                turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
                try:
                    await turn
                finally:
                    self._waiting.pop(ticket, None)
            yield
        finally:
            for started in self._policy.leave(ticket, tenant, domain):
                if not self._waiting[started].done():
                    self._waiting[started].set_result(None)
