"""What the engines of a fleet serve: a version of each tenant's policy, and how an engine that joins comes to it.

    read what is served -> serve it, and go on -> joined
            \\--------------\\-- a policy that can not be had --> lacking, until a request or an update brings it

Invariants
- An engine that joins serves all of it but what it lacks, and runs. Whoever had it pause is gone, or else holds back
  its work.
- What is amiss with one tenant's policy costs requests of that tenant alone. An engine that is gone, or slow with what
  it was to read, or that can serve nobody, does not join.
- Once it has joined it holds nothing of a tenant that is not served: of one that left while it joined, or before, when
  another proxy had it serve that. What is not served yet, it reads again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from infra.engines.deadlines import Deadline
from infra.engines.errors import EngineClosed
from infra.engines.protocol import BASE, Engine
from infra.proxy.members import Member
from rl.errors import DeadlineExceeded, GenerationFailure

LATE = (TimeoutError, DeadlineExceeded)

logger = logging.getLogger(__name__)


class Policies:
    """Lives on one event loop. The deadlines are those of one policy on one engine."""

    def __init__(self, control: Deadline, load: Deadline) -> None:
        self.served: dict[str, tuple[int, Path]] = {}
        """Version and its files by tenant."""
        self._control, self._load = control, load

    def versions(self) -> dict[str, int]:
        return {tenant: version for tenant, (version, _) in self.served.items()}

    async def ready(self, member: Member) -> None:
        """Have an engine read what is served. Raises what an engine does that is gone or late."""
        for tenant, (version, directory) in list(self.served.items()):
            try:
                async with self._load.over(f"reading {tenant!r}"):
                    await member.engine.prefetch(tenant, version, directory)
            except (EngineClosed, *LATE):
                raise
            except Exception as error:
                logger.info("engine %s can not read version %d of %r: %s", member.facts.name, version, tenant, error)

    async def bring(self, member: Member) -> None:
        """Have an engine serve what is served, and go on: a proxy that died may have left it paused, and nothing but
        this would tell it to. Raises as `ready`, and when it can serve nothing of it."""
        failures: dict[str, Exception] = {}
        for tenant, (version, directory) in self.served.items():
            try:
                async with self._control.over(f"serving {tenant!r}"):
                    await publish(member.engine, tenant, version, directory)
            except (EngineClosed, *LATE):
                raise
            except Exception as error:
                failures[tenant] = error
                logger.warning("engine %s joins without %r: %s", member.facts.name, tenant, error)
        if failures and len(failures) == len(self.served):
            raise next(iter(failures.values()))
        async with self._control.over("going on"):
            for tenant in set(await member.engine.held()) - self.served.keys():
                await member.engine.withdraw_adapter(tenant)
            await member.engine.resume()
        member.lacks = set(failures)

    async def supply(self, member: Member, tenant: str, swap: asyncio.Lock) -> None:
        """Bring an engine to what it lacks of a tenant's. `swap` is held while what is served changes. Raises
        GenerationFailure while that can not be had, EngineClosed for an engine that is gone."""
        if tenant not in member.lacks:
            return
        try:
            version, directory = self.served[tenant]
            async with self._load.over(f"reading {tenant!r}"):
                await member.engine.prefetch(tenant, version, directory)
            async with swap:
                if tenant in member.lacks:
                    await self._late_publish(member, tenant)
                    member.lacks.discard(tenant)
        except EngineClosed:
            raise
        except Exception as error:
            raise GenerationFailure(f"engine {member.facts.name} can not serve {tenant!r}: {error}") from error

    async def _late_publish(self, member: Member, tenant: str) -> None:
        try:
            async with self._control.over(f"serving {tenant!r}"):
                await publish(member.engine, tenant, *self.served[tenant])
        except LATE as error:  # it may be done with it only after a later version, so this engine is of no use
            raise EngineClosed(f"engine {member.facts.name} is late: {error}") from error


async def publish(engine: Engine, tenant: str, version: int, directory: Path) -> None:
    """Make it the tenant's policy on one engine."""
    if tenant == BASE:
        await engine.update_weights(version, directory)
    else:
        await engine.publish_adapter(tenant, version, directory)
