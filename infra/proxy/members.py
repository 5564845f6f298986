"""The engines behind a proxy, each with its state.

    joining --brought to what is served--> serving --died, silent, failed an update--> lost
        \\----------- failed -----------> lost              a new incarnation of the same name --> joining

Invariants
- An engine gets work once it serves what is served, and none any more once it is lost. One that is lost is told so when
  it reports again, so that it ends and is started anew.
- A name stands for one engine at a time, its newest incarnation.
- An engine that has not reported for `lease_s` is lost; one that somebody else runs is asked for its health instead,
  and joins anew when it is well again. Until then it is told why it does not. What this process slept through (a
  machine that was frozen) counts for nobody: their reports may wait to be heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from infra.engines.protocol import Engine
from rl.placement import HardwareClass
from rl.routing import Router

LOOK_S = 1.0
HEALTH_S = 5.0
"""Of one answer about an engine's health, so that there are no more than LOOK_S + HEALTH_S between two looks."""

logger = logging.getLogger(__name__)

State = Literal["joining", "serving", "lost"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine is. Two incarnations of a name are two processes."""

    name: str
    incarnation: str
    hardware: HardwareClass
    slots: int
    """Sequences decoded together."""
    capacity: int
    """Tokens whose keys and values have room."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine."""

    facts: Facts
    engine: Engine
    seen: float
    """When it last reported, by the event loop's clock."""
    state: State = "joining"
    cause: str = ""
    """Why it is lost."""
    lacks: set[str] = field(default_factory=set)
    """Tenants whose policy it could not be brought to."""

    def summary(self) -> dict[str, Any]:
        told = {"hardware": self.facts.hardware.value, "state": self.state, "cause": self.cause}
        return {"name": self.facts.name, **told, "lacks": sorted(self.lacks)}


class Members:
    """Lives on one event loop. `ready` has an engine read what is served, `bring` has it serve that; both see to their
    deadlines. `swap` is held while what is served changes. `changed` is called after engines joined or left."""

    def __init__(
        self,
        router: Router,
        swap: asyncio.Lock,
        ready: Callable[[Member], Awaitable[None]],
        bring: Callable[[Member], Awaitable[None]],
        changed: Callable[[], None],
        lease_s: float,
    ):
        self.all: dict[str, Member] = {}
        self.lost = 0
        """Engines lost since the start."""
        self._router, self._swap, self._ready, self._bring, self._changed = router, swap, ready, bring, changed
        self._lease_s = lease_s
        self._expected: dict[str, tuple[Facts, Callable[[], Awaitable[Engine]]]] = {}
        self._away: dict[str, str] = {}
        """Why those expected are not here, as far as that is known."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.all.values() if member.state == "serving"]

    def away(self) -> list[dict[str, Any]]:
        """Summaries of the engines that are expected and were never here."""
        facts = [facts for name, (facts, _) in self._expected.items() if name not in self.all]
        return [
            {"name": f.name, "hardware": f.hardware.value, "state": "away", "cause": self._away.get(f.name, "")}
            for f in facts
        ]

    def report(self, facts: Facts, connect: Callable[[], Engine]) -> State:
        """An engine says that it is there; how it stands. `connect` is called for one that is new."""
        member = self.all.get(facts.name)
        if member is None or member.facts.incarnation != facts.incarnation:
            if member is not None:
                self.lose(member, "another incarnation came")
            return self.add(facts, connect()).state
        member.seen = asyncio.get_running_loop().time()
        return member.state

    def add(self, facts: Facts, engine: Engine) -> Member:
        """Let an engine join."""
        member = self.all[facts.name] = Member(facts, engine, asyncio.get_running_loop().time())
        self._start(self._join(member))
        self._begin_watch()
        return member

    def expect(self, facts: Facts, connect: Callable[[], Awaitable[Engine]]) -> None:
        """Let an engine that somebody else runs join whenever it can be reached."""
        self._expected[facts.name] = (facts, connect)
        self._begin_watch()

    def _begin_watch(self) -> None:
        if self._watcher is None:
            self._watcher = self._start(self._watch())

    async def _join(self, member: Member) -> None:
        facts = member.facts
        try:
            await self._ready(member)  # before the lock: a trainer's update must not wait for a slow disk
            async with self._swap:
                await self._bring(member)
                if member.state == "joining":
                    member.state = "serving"
                    self._router.join(facts.name, facts.hardware, facts.slots, facts.capacity, self._router.revision)
        except Exception as error:
            self.lose(member, f"joining: {type(error).__name__}: {error}")
        self._changed()

    def lose(self, member: Member, cause: str) -> None:
        """Take an engine out; what it runs ends with EngineClosed. Idempotent."""
        if member.state == "lost":
            return
        logger.warning("engine %s is lost: %s", member.facts.name, cause)
        if member.state == "serving":
            self._router.leave(member.facts.name)
        member.state, member.cause = "lost", cause
        self.lost += 1
        self._start(self._let_go(member))

    async def _let_go(self, member: Member) -> None:
        with suppress(Exception):  # whatever it is, it is out of use
            await member.engine.close()
        self._changed()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while True:
            await asyncio.gather(*(self._ask(*expected) for expected in self._expected.values()))
            now = loop.time()
            overslept, looked = max(0.0, now - looked - LOOK_S - HEALTH_S), now
            for member in self.all.values():
                member.seen = min(now, member.seen + overslept)
            for member in self.serving:
                if now - member.seen > self._lease_s:
                    self.lose(member, f"nothing was heard of it for {self._lease_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _ask(self, facts: Facts, connect: Callable[[], Awaitable[Engine]]) -> None:
        """See to an engine that does not report."""
        member = self.all.get(facts.name)
        try:
            async with asyncio.timeout(HEALTH_S):
                if member is None or member.state == "lost":
                    self.add(facts, await connect())
                elif await member.engine.health():
                    member.seen = asyncio.get_running_loop().time()
            self._away.pop(facts.name, None)
        except Exception as error:  # it is not well: for a member, the lease runs
            cause = str(error) or f"no answer within {HEALTH_S:g} s"
            if self._away.get(facts.name) != cause:
                logger.warning("engine %s is not here: %s", facts.name, cause)
                self._away[facts.name] = cause

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let go of all; the engines themselves are left as they are."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(member.engine.close() for member in self.all.values()), return_exceptions=True)
