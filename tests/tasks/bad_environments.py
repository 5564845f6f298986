"""Environments that misbehave, each in one way; used by tests of the manager and of whole runs."""

import asyncio
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

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


class SwallowsCancellation(Good):
    """Its step goes on when it is cancelled (the second time it ends, or the test's loop could not)."""

    async def step(self, action: str) -> Step:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class ImpatientOfItself(HangsInStep):
    step_deadline_s = 0.05


class ExitsInStep(Good):
    async def step(self, action: str) -> Step:
        sys.exit(3)


class CancelsItself(Good):
    async def step(self, action: str) -> Step:
        raise asyncio.CancelledError


class TimesOutItself(Good):
    async def step(self, action: str) -> Step:
        raise TimeoutError("its own service was late")


class Answers(Good):
    """Steps to whatever a test put here."""

    given: ClassVar[list[Any]] = []

    async def step(self, action: str) -> Step:
        return Answers.given[-1]


class Opens(Good):
    """Opens with whatever a test put here."""

    given: ClassVar[list[Any]] = []

    async def reset(self, problem: Problem) -> list[Message]:
        self._seed = problem.seed
        return Opens.given[-1]


class Constructed(Good):
    """Counts what is prepared, constructed and alive."""

    prepared: ClassVar[list[dict]] = []
    failing_preparations: ClassVar[list[Exception]] = []
    alive: ClassVar[set["Constructed"]] = set()
    made: ClassVar[list["Constructed"]] = []
    most: ClassVar[int] = 0

    def __init__(self, label: str = "", fails_every: int = 0):
        super().__init__()
        self.fails_every = fails_every
        Constructed.made.append(self)

    @classmethod
    def prepare(cls, options) -> None:
        if cls.failing_preparations:
            raise cls.failing_preparations.pop()
        cls.prepared.append(dict(options))

    async def reset(self, problem: Problem) -> list[Message]:
        Constructed.alive.add(self)
        Constructed.most = max(Constructed.most, len(Constructed.alive))
        await asyncio.sleep(0)
        if self.fails_every and len(Constructed.made) % self.fails_every == 0:
            raise OSError("no room for another container")
        return await super().reset(problem)

    async def close(self) -> None:
        Constructed.alive.discard(self)
        await super().close()


class SlowlyConstructed(Good):
    """Waits for `go_on` where it is `stuck`."""

    go_on: ClassVar[threading.Event] = threading.Event()
    reached: ClassVar[threading.Event] = threading.Event()
    made: ClassVar[list["SlowlyConstructed"]] = []
    closed: ClassVar[list["SlowlyConstructed"]] = []

    def __init__(self, stuck: str = "construct") -> None:
        super().__init__()
        SlowlyConstructed.made.append(self)
        if stuck == "construct":
            self._wait()

    @classmethod
    def prepare(cls, options) -> None:
        if options.get("stuck") == "prepare":
            cls._wait()

    @classmethod
    def _wait(cls) -> None:
        cls.reached.set()
        cls.go_on.wait(60)

    async def close(self) -> None:
        SlowlyConstructed.closed.append(self)
        await super().close()


class Unconstructible(Good):
    def __init__(self) -> None:
        raise OSError("no such host")


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
