"""Environments of one domain, constructed; some of them ahead of need.

Invariants
- What instances share is prepared once before the first is constructed; a failed preparation is tried again by the
  next who needs it.
- Constructing and preparing run in daemon threads: they may block, and one that hangs costs only who waits for it.
- An instance leaves this pool once; what never left is closed with it, and what came too late is closed then.
- A pool that is closed gives nothing away and constructs nothing, until it is opened again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import TypeVar

from envs.calls import Overdue, bounded
from envs.protocol import Environment
from envs.registry import environment_class, make_environment
from envs.threads import in_daemon
from rl.config.work import DeadlineSection, DomainSection
from rl.errors import EnvironmentStartFailure, EnvironmentTimeout, RollmillError

logger = logging.getLogger("rollmill.environments")
T = TypeVar("T")


class WarmPool:
    """All methods run on the worker's event loop."""

    def __init__(self, section: DomainSection, deadlines: DeadlineSection):
        self._section, self._deadlines = section, deadlines
        self._ready: deque[Environment] = deque()
        self._shut = False
        self._preparing: asyncio.Task[None] | None = None
        self._filling: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()  # held here, for the loop does not

    @property
    def ready(self) -> int:
        """Instances that wait to be taken."""
        return len(self._ready)

    async def take(self) -> Environment:
        """A fresh instance. Raises EnvironmentStartFailure, EnvironmentTimeout."""
        if self._shut:
            raise self._over()
        environment = self._ready.popleft() if self._ready else await self._construct()
        if self._shut:
            await close(environment, self._deadlines.environment_step)
            raise self._over()
        self.fill()
        return environment

    def open(self) -> None:
        """Give away again."""
        self._shut = False

    def fill(self) -> None:
        """Construct in the background until `warm` instances are ready; a failure leaves it to the next `take`."""
        if not self._shut and self.ready < self._section.warm and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    def shut(self) -> None:
        """Give nothing away from now on."""
        self._shut = True
        for task in (self._filling, self._preparing):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Close what was never taken, and give nothing away any more."""
        self.shut()
        while self._ready:
            await close(self._ready.popleft(), self._deadlines.environment_step)

    async def _fill(self) -> None:
        try:
            while self.ready < self._section.warm:
                self._ready.append(await self._construct())
        except RollmillError as error:
            logger.warning("warming up: %s", error)

    async def _construct(self) -> Environment:
        if self._preparing is None or (self._preparing.done() and self._failed(self._preparing)):
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())
        preparing = self._preparing
        await asyncio.wait({preparing})  # others wait for it, too
        if preparing.cancelled():
            raise self._over()
        preparing.result()
        work = in_daemon(lambda: make_environment(self._section), f"construct-{self._section.name}")
        making = asyncio.get_running_loop().create_task(work)
        try:
            return await self._named("construct", self._deadlines.reset, asyncio.shield(making))
        except BaseException:
            making.add_done_callback(self._close_late)
            raise

    def _close_late(self, making: asyncio.Task[Environment]) -> None:
        """Close what was constructed after everybody had given up on it."""
        if not self._failed(making):
            late = close(making.result(), self._deadlines.environment_step)
            task = making.get_loop().create_task(late)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _over(self) -> EnvironmentStartFailure:
        return EnvironmentStartFailure(f"{self._section.name}: not constructed, for the run is over")

    @staticmethod
    def _failed(task: asyncio.Task[T]) -> bool:
        return task.cancelled() or task.exception() is not None

    async def _prepare(self) -> None:
        section = self._section
        kind = environment_class(section.environment, f"domains.{section.name}.environment")
        work = in_daemon(lambda: kind.prepare(section.environment_options), f"prepare-{section.name}")
        await self._named("prepare", self._deadlines.prepare, work)

    async def _named(self, what: str, deadline_s: float, call: Awaitable[T]) -> T:
        name = self._section.name
        try:
            return await bounded(call, deadline_s)
        except Overdue as error:
            raise EnvironmentTimeout(f"{name}: {what} took longer than {deadline_s:g} s") from error
        except Exception as error:
            raise EnvironmentStartFailure(f"{name}: {what} raised {error!r}") from error


async def close(environment: Environment, deadline_s: float) -> None:
    """Close it within the deadline; a failure is logged, for its episode is done."""
    try:
        await bounded(environment.close(), min(deadline_s, environment.step_deadline_s))
    except Exception as error:
        logger.warning("closing %s failed: %r", type(environment).__name__, error)
