"""Leases, by a clock that the tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from infra.engines.errors import EngineClosed
from infra.engines.protocol import Engine
from infra.proxy.members import HEALTH_S, LOOK_S, Facts, Member, Members
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from tests.proxy.stub_engine import StubEngine

LEASE_S = 15.0


class Clock:
    """That of the event loop, set ahead: by `freeze` as when the machine stands still, by `tick` as time goes by."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real, self._ahead = loop.time, 0.0
        loop.time = lambda: real() + self._ahead  # type: ignore[method-assign]

    async def freeze(self, seconds: float) -> None:
        self._ahead += seconds
        for _ in range(20):  # what is due runs before anything is heard
            await asyncio.sleep(0)

    async def tick(self, seconds: float, every: Callable[[], object] = lambda: None) -> None:
        for _ in range(int(seconds / (LOOK_S / 2))):
            await self.freeze(LOOK_S / 2)
            every()


@pytest.fixture
async def members() -> AsyncIterator[Members]:
    async def nothing(member: Member) -> None:
        pass

    router = Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0)
    made = Members(router, asyncio.Lock(), nothing, nothing, lambda: None, LEASE_S)
    yield made
    await made.close()


def facts(name: str) -> Facts:
    return Facts(name, "1", HardwareClass.BANDWIDTH_GPU, 4, 5000)


def connect() -> Engine:
    return StubEngine()  # type: ignore[return-value]


@pytest.mark.parametrize("external", [False, True], ids=["reporting", "with one that is asked"])
@pytest.mark.parametrize("stall_s", [LEASE_S + 1, 2 * LEASE_S, 3600.0])
async def test_a_stall_of_this_process_costs_no_engine_and_one_that_stays_silent_is_lost(members, stall_s, external):
    clock = Clock()
    if external:

        async def away() -> Engine:
            raise EngineClosed("away")

        members.expect(facts("theirs"), away)
    for name in ("a", "b"):
        members.report(facts(name), connect)
    await clock.tick(2.0, lambda: [members.report(facts(n), connect) for n in ("a", "b")])
    for _ in range(3):
        await clock.freeze(stall_s)
        assert [m.state for m in members.serving] == ["serving"] * 2, members.all
        await clock.tick(LOOK_S, lambda: [members.report(facts(n), connect) for n in ("a", "b")])
    await clock.tick(LEASE_S + HEALTH_S + 2 * LOOK_S, lambda: members.report(facts("a"), connect))
    assert [m.facts.name for m in members.serving] == ["a"]
    assert "nothing was heard of it" in members.all["b"].cause
