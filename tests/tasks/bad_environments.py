"""Environments that misbehave, each in one way; used by tests of the manager and of whole runs."""

import asyncio
import time
from collections import Counter
from typing import ClassVar

from envs.protocol import Environment, Step, SyncEnvironment
from rl.trajectory import Message, Problem

CLOSED: Counter = Counter()


class Good(Environment):
    """Ends after one step; `flaky_starts` resets fail first, counted over all instances of a problem."""

    starts: ClassVar[Counter] = Counter()

    def __init__(self, flaky_starts: int = 0):
        self._flaky = flaky_starts
        self._seed = -1

    async def reset(self, problem: Problem) -> list[Message]:
        self._seed = problem.seed
        Good.starts[problem.seed] += 1
        if Good.starts[problem.seed] <= self._flaky:
            raise OSError("no room for another container")
        return [Message("user", "go")]

    async def step(self, action: str) -> Step:
        return Step(Message("user", "done"), reward=1.0, terminated=True)

    async def close(self) -> None:
        CLOSED[self._seed] += 1


class RaisesInReset(Good):
    async def reset(self, problem: Problem) -> list[Message]:
        self._seed = problem.seed
        raise RuntimeError("broken image")


class RaisesInStep(Good):
    async def step(self, action: str) -> Step:
        raise ZeroDivisionError("a bug of the environment")


class HangsInStep(Good):
    async def step(self, action: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class HangsInReset(Good):
    async def reset(self, problem: Problem) -> list[Message]:
        self._seed = problem.seed
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class BlocksInStep(SyncEnvironment):
    """Synchronous: its blocking call holds a thread, never the event loop."""

    def reset_sync(self, problem: Problem) -> list[Message]:
        return [Message("user", "go")]

    def step_sync(self, action: str) -> Step:
        time.sleep(1.0)
        return Step(Message("user", "late"), terminated=True)


class RaisesInClose(Good):
    async def close(self) -> None:
        CLOSED[self._seed] += 1
        raise OSError("could not remove the container")


class Unlucky(Good):
    """Every third problem's environment breaks in its step."""

    async def step(self, action: str) -> Step:
        if self._seed % 3 == 0:
            raise ConnectionError("the host went away")
        return await super().step(action)
