"""The environment manager: owns every live environment of a run in one worker process.

Life of an environment:  start -> parked (until its interact claims it) -> claimed -> closed

Invariants
- Every call into an environment has a deadline; past it the trajectory fails by name and the environment is closed.
- An environment is closed exactly once, whatever happens to its trajectory; one that is parked and never
  claimed (its task was cancelled, or ran on another worker) is closed when its lease ends.
- What the environment raises is an EnvironmentFailure, never a reward.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from envs.protocol import Environment, Step
from envs.registry import make_environment
from rl.config.run import RunConfig
from rl.errors import EnvironmentFailure, EnvironmentTimeout, StageFailure
from rl.trajectory import Message, Problem

logger = logging.getLogger("rollmill.environments")
T = TypeVar("T")

START_TRIES = 3
BACKOFF_S = 0.2
"""First wait between two tries of a start; doubles, with jitter."""


@dataclass(slots=True)
class Live:
    """A started environment with its opening messages."""

    environment: Environment
    opening: list[Message]
    parked_until: float


class EnvironmentManager:
    """All methods run on the worker's event loop."""

    def __init__(self, config: RunConfig):
        self._config = config
        self._deadlines = config.deadlines
        self._parked: dict[str, Live] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.live = 0

    def start_sweeping(self) -> None:
        """Begin to close parked environments whose lease ended. Call on the event loop; idempotent."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def park(self, key: str, problem: Problem) -> None:
        """Start an environment and keep it for `claim`. Starting again under one key replaces the former."""
        await self._discard(key)
        self._parked[key] = await self._start(problem)

    async def claim(self, key: str, problem: Problem) -> Live:
        """The parked environment; started here and now when it is parked on another worker or was swept."""
        return self._parked.pop(key, None) or await self._start(problem)

    async def step(self, live: Live, action: str, problem: Problem) -> Step:
        """One step. Raises EnvironmentFailure or EnvironmentTimeout."""
        return await self._call(live.environment.step(action), self._deadlines.environment_step, "step", problem)

    async def release(self, live: Live) -> None:
        """Close an environment; failures of `close` are logged, for the trajectory is done."""
        try:
            async with asyncio.timeout(self._deadlines.environment_step):
                await live.environment.close()
        except Exception as error:
            logger.warning("closing %s failed: %r", type(live.environment).__name__, error)
        finally:
            self.live -= 1

    async def close(self) -> None:
        """Close everything that is parked."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for key in list(self._parked):
            await self._discard(key)

    async def _start(self, problem: Problem) -> Live:
        section = self._config.domain(problem.domain)
        for attempt in range(START_TRIES):
            try:
                environment = make_environment(section)
            except Exception as error:
                raise EnvironmentFailure(f"{problem.domain}: constructing the environment: {error!r}") from error
            self.live += 1
            lease = asyncio.get_running_loop().time() + self._deadlines.trajectory
            live = Live(environment, [], lease)
            try:
                live.opening = await self._call(environment.reset(problem), self._deadlines.reset, "reset", problem)
                return live
            except StageFailure:
                await self.release(live)
                if attempt + 1 == START_TRIES:
                    raise
                await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    async def _call(self, call: Awaitable[T], deadline_s: float, what: str, problem: Problem) -> T:
        try:
            async with asyncio.timeout(deadline_s):  # wait_for can swallow a cancellation before Python 3.12
                return await call
        except TimeoutError as error:
            raise EnvironmentTimeout(
                f"{problem.domain}: {what} took longer than {deadline_s:g} s (problem seed {problem.seed})"
            ) from error
        except Exception as error:
            raise EnvironmentFailure(
                f"{problem.domain}: {what} raised {error!r} (problem seed {problem.seed})"
            ) from error

    async def _discard(self, key: str) -> None:
        live = self._parked.pop(key, None)
        if live is not None:
            await self.release(live)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(5.0, self._deadlines.trajectory / 2))
            now = asyncio.get_running_loop().time()
            for key in [k for k, live in self._parked.items() if live.parked_until < now]:
                logger.warning("environment %s was never claimed: closed", key)
                await self._discard(key)
