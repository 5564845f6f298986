"""The environment manager: owns every live environment of a run in one worker process.

Life of an environment:  constructed (maybe ahead of need) -> reset -> parked -> claimed -> closed

Invariants
- Every call into an environment has a deadline, the smaller of its own and the configured one; past it the
  trajectory fails by name and the environment is closed.
- An environment is closed exactly once, whatever happens to its trajectory; one that is parked and never claimed
  (its task was cancelled, or ran on another worker) is closed when its lease ends, and all are when nobody renews
  the lease of the run, also those that are being constructed then.
- What the environment raises, or answers against its protocol, is a StageFailure, never a reward.
- At most `concurrency` environments of a domain are alive. Only who holds a slot of the pool waits for a place: an
  environment is not parked when places are short, and a parked one gives way, so that waiting always ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import psutil

from envs.calls import Overdue, bounded
from envs.injection import Injected
from envs.protocol import Environment, Step
from envs.registry import environment_class
from envs.validity import unlike_a_step, unlike_an_opening
from rl.config.run import RunConfig
from rl.errors import (
    EnvironmentFailure,
    EnvironmentProtocolError,
    EnvironmentStartFailure,
    EnvironmentTimeout,
    InjectedFailure,
    StageFailure,
)
from rl.stream import derive_seed
from rl.trajectory import Message, Problem, Span
from tasks.warm import WarmPool, close

logger = logging.getLogger("rollmill.environments")
T = TypeVar("T")
Follow = Callable[[threading.Event], AbstractContextManager[None]]
"""Sets the event when the run is no longer wanted; see `infra.compute.signals.follow`."""

START_TRIES = 3
BACKOFF_S = 0.2
"""First wait between two tries of a start; doubles, with jitter."""
SWEEP_S = 1.0
"""Between two looks at what is parked, and whether the run is wanted."""
MEMORY_SHARE = 0.8
"""Of the machine's memory, that the environments of one domain may take by what they say they need."""


@dataclass(slots=True, eq=False)
class Live:
    """A started environment with its opening messages."""

    environment: Environment
    problem: Problem
    opening: list[Message]
    parked_until: float
    closing: bool = False

    @property
    def injected(self) -> list[Span]:
        """The latencies that were added on purpose."""
        return self.environment.spans if isinstance(self.environment, Injected) else []


class EnvironmentManager:
    """All methods run on the worker's event loop."""

    def __init__(self, config: RunConfig):
        self._config = config
        self._deadlines = config.deadlines
        self._pools = {domain.name: WarmPool(domain, config.deadlines) for domain in config.domains}
        self._limits: dict[str, float] = {}
        self._starting: Counter[str] = Counter()
        self._live: set[Live] = set()
        self._parked: dict[str, Live] = {}
        self._freed = asyncio.Event()
        self._follow: Follow = lambda _: nullcontext()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Environments that were started and not closed."""
        return len(self._live)

    def start(self, follow: Follow, domains: Iterable[str]) -> None:
        """Warm these domains up; everything is closed when `follow` tells that the run is over. Call on the event
        loop."""
        self._follow = follow
        for domain in domains:
            if self._config.domain(domain).warm:
                self._start_sweeping()
                self._pools[domain].fill()

    async def park(self, key: str, problem: Problem) -> None:
        """Start an environment and keep it for `claim`, if there is a place for it. Starting again under one key
        replaces the former. Raises EnvironmentFailure, EnvironmentTimeout."""
        self._start_sweeping()
        await self._discard(key)
        if self._taken(problem.domain) < self._limit(problem.domain):
            self._parked[key] = await self._start(key, problem)

    async def claim(self, key: str, problem: Problem) -> Live:
        """The parked environment; started here and now when there is none. Raises as `park`."""
        self._start_sweeping()
        if key in self._parked:
            return self._parked.pop(key)
        await self._wait_for_place(problem.domain)
        return await self._start(key, problem)

    async def step(self, live: Live, action: str) -> Step:
        """One step. Raises EnvironmentFailure, EnvironmentTimeout."""
        step = await self._call(live, live.environment.step(action), "step", EnvironmentFailure)
        if mistake := unlike_a_step(step):
            raise EnvironmentProtocolError(f"{live.problem.domain}: step gave {mistake} ({_seed(live.problem)})")
        return step

    async def release(self, live: Live) -> None:
        """Close an environment; idempotent. A failure of its `close` is logged, for the trajectory is done."""
        if live.closing:
            return
        live.closing = True
        try:
            await close(live.environment, self._deadlines.environment_step)
        finally:
            self._live.discard(live)
            self._freed.set()

    async def close(self) -> None:
        """Close everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await self._close_all()

    async def _close_all(self) -> None:
        for pool in self._pools.values():
            pool.shut()  # before anything is waited for: what it gave away meanwhile, nobody would close
        self._parked.clear()
        closing = [self.release(live) for live in self._live]
        await asyncio.gather(*closing, *(pool.close() for pool in self._pools.values()))

    async def _start(self, key: str, problem: Problem) -> Live:
        """A started environment; call it when there is a place."""
        for attempt in range(START_TRIES):
            try:
                return await self._start_once(problem, derive_seed("injection", key, attempt))
            except StageFailure:
                if attempt + 1 == START_TRIES:
                    raise
            await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
            await self._wait_for_place(problem.domain)
        raise AssertionError("unreachable")

    async def _start_once(self, problem: Problem, seed: int) -> Live:
        domain = problem.domain
        self._starting[domain] += 1
        try:
            environment = await self._pools[domain].take()
        except BaseException:
            self._freed.set()
            raise
        finally:
            self._starting[domain] -= 1
        injection = self._config.domain(domain).injection
        if injection is not None:
            environment = Injected(environment, injection, seed)
        live = Live(environment, problem, [], asyncio.get_running_loop().time() + self._deadlines.trajectory)
        self._live.add(live)
        try:
            opening = await self._call(live, environment.reset(problem), "reset", EnvironmentStartFailure)
            if mistake := unlike_an_opening(opening):
                raise EnvironmentProtocolError(f"{domain}: reset gave {mistake} ({_seed(problem)})")
            if live.closing:
                raise EnvironmentStartFailure(f"{domain}: closed during reset, for the run is over")
            live.opening = opening
            return live
        except BaseException:
            await self.release(live)
            raise

    async def _call(self, live: Live, call: Awaitable[T], what: str, failure: type[StageFailure]) -> T:
        environment, domain, seed = live.environment, live.problem.domain, _seed(live.problem)
        deadline_s = min(
            (self._deadlines.reset, environment.reset_deadline_s)
            if what == "reset"
            else (self._deadlines.environment_step, environment.step_deadline_s)
        )
        try:
            return await bounded(call, deadline_s)
        except InjectedFailure:
            raise
        except Overdue as error:
            late = f"{domain}: {what} took longer than {deadline_s:g} s ({seed})"
            if isinstance(environment, Injected) and environment.delaying:
                raise InjectedFailure(f"{late}, delayed on purpose (injection.{what}_latency)") from error
            raise EnvironmentTimeout(late) from error
        except Exception as error:
            raise failure(f"{domain}: {what} raised {error!r} ({seed})") from error

    def _taken(self, domain: str) -> int:
        return self._starting[domain] + sum(live.problem.domain == domain for live in self._live)

    def _limit(self, domain: str) -> float:
        if domain not in self._limits:
            section = self._config.domain(domain)
            memory_mb = environment_class(section.environment, f"domains.{domain}.environment").needs.memory_mb
            fits = psutil.virtual_memory().total * MEMORY_SHARE // (2**20 * max(1, memory_mb))
            self._limits[domain] = max(1.0, min(section.concurrency or math.inf, fits))
        return self._limits[domain]

    async def _wait_for_place(self, domain: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.trajectory):
                while self._taken(domain) >= self._limit(domain):
                    parked = next((k for k, live in self._parked.items() if live.problem.domain == domain), None)
                    if parked is not None:
                        await self._discard(parked)
                    else:
                        self._freed.clear()
                        await self._freed.wait()
        except TimeoutError as error:
            raise EnvironmentStartFailure(
                f"{domain}: its {self._limit(domain):g} places were taken for deadlines.trajectory "
                f"({self._deadlines.trajectory:g} s); raise domains[].concurrency, or lower what its `needs` say"
            ) from error

    async def _discard(self, key: str) -> None:
        live = self._parked.pop(key, None)
        if live is not None:
            await self.release(live)

    def _start_sweeping(self) -> None:
        if self._sweeper is None or self._sweeper.done():
            for pool in self._pools.values():
                pool.open()
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        unwanted = threading.Event()
        with self._follow(unwanted):
            while not unwanted.is_set():
                await asyncio.sleep(min(SWEEP_S, self._deadlines.trajectory / 2))
                now = asyncio.get_running_loop().time()
                for key in [k for k, live in self._parked.items() if live.parked_until < now]:
                    logger.warning("environment %s was never claimed: closed", key)
                    await self._discard(key)
        logger.info("the run is no longer wanted: %d environments closed", self.live)
        await self._close_all()


def _seed(problem: Problem) -> str:
    return f"problem seed {problem.seed}"
