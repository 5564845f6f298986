"""Latency and failures added on purpose to any environment, labelled so that nobody takes them for real ones.

Invariants
- A failure made here is an `InjectedFailure`, counted and stored under a name of its own; a latency made here is a
  span `injected` of its trajectory.
- Equal seeds and calls give equal disturbances; the environment within is left as it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from time import time
from typing import Any

from envs.protocol import Environment, Step
from rl.config.injection import InjectionSection, Latency
from rl.errors import InjectedFailure
from rl.trajectory import Message, Problem, Span


class Injected(Environment):
    """An environment with the disturbances of a section; `seed` decides which."""

    def __init__(self, within: Environment, section: InjectionSection, seed: int):
        self.within = within
        self.reset_deadline_s, self.step_deadline_s = within.reset_deadline_s, within.step_deadline_s
        self.spans: list[Span] = []
        """The latencies so far."""
        self.delaying = False
        """Whether a latency is on, so that a deadline that ends it is told as injected."""
        self._section = section
        self._rng = random.Random(seed)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        return self.within.tools

    async def reset(self, problem: Problem) -> list[Message]:
        await self._disturb("reset", self._section.reset_latency, self._section.reset_failure)
        return await self.within.reset(problem)

    async def step(self, action: str) -> Step:
        await self.disturb()
        return await self.within.step(action)

    async def disturb(self) -> None:
        """What a step meets; an agent, who takes none, meets it once, before it begins."""
        await self._disturb("step", self._section.step_latency, self._section.step_failure)

    async def close(self) -> None:
        await self.within.close()

    def fingerprint(self) -> object:
        return self.within.fingerprint()

    def expert_action(self) -> str:
        return self.within.expert_action()

    def random_action(self, rng: random.Random) -> str:
        return self.within.random_action(rng)

    async def _disturb(self, what: str, latency: Latency, failure: float) -> None:
        seconds, fails = latency.draw(self._rng) * self._section.time_scale, self._rng.random() < failure
        if seconds > 0:
            start, self.delaying = time(), True
            await asyncio.sleep(seconds)
            self.delaying = False
            self.spans.append(Span("injected", start, time()))
        if fails:
            raise InjectedFailure(f"{what} failed on purpose (injection.{what}_failure {failure:g})")
