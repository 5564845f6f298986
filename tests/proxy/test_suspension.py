"""A suspension ends, whatever the engine says to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from infra.engines.errors import BadRequest, EngineClosed
from infra.engines.protocol import BASE, Generation
from infra.proxy import suspension
from infra.proxy.control import Proxy
from infra.proxy.fleet import Fleet
from infra.proxy.members import Facts
from infra.proxy.versions import LogView
from infra.proxy.wire import GenerateBody
from rl.errors import DeadlineExceeded, GenerationFailure
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from tests.proxy.conftest import make_config
from tests.proxy.stub_engine import StubEngine

FENCE = 3
FAILURES = [EngineClosed("gone"), GenerationFailure("500"), BadRequest("422"), DeadlineExceeded("late"), OSError("no")]


class Log:
    """A log with a trainer and no version."""

    async def look(self) -> LogView:
        return LogView(None, FENCE, 0, {})

    def close(self) -> None:
        pass


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Proxy]]:
    monkeypatch.setattr(suspension, "AGAIN_S", 0.01)
    made: list[Proxy] = []

    def make(engine: Any, control_s: float = 60.0) -> Proxy:
        made.append(Proxy(make_config(deadlines={"control": control_s}), engine, Log()))  # type: ignore[arg-type]
        made[-1].serving = 0
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def turn(proxy: Proxy) -> Generation:
    body = {"trajectory": "t", "request": "r", "tenant": BASE, "token_ids": [1], "temperature": 1.0}
    async with asyncio.timeout(20):
        return await proxy.generate(GenerateBody(**body, max_new_tokens=1, start_version=0))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_a_suspension_that_fails_is_undone(proxy, failure):
    engine = StubEngine()
    engine.serves[BASE] = 0
    engine.fails = {"pause": [failure], "resume": [GenerationFailure("not yet")] * 3}
    here = proxy(engine)
    with pytest.raises(type(failure)):
        await here.suspend(FENCE)
    assert not here.suspended and (await turn(here)).token_ids == [1]
    await until(lambda: not engine.paused)
    await here.suspend(FENCE)
    assert here.suspended and engine.paused and engine.calls[-1] == "pause", "nothing is left that would undo it"


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_a_suspension_ends_though_the_engine_refuses_to_go_on_for_a_while(proxy, failure):
    engine = StubEngine()
    engine.serves[BASE] = 0
    engine.fails = {"resume": [failure] * 3}
    here = proxy(engine, control_s=0.05)
    await here.suspend(FENCE)
    with pytest.raises(type(failure)):
        await here.resume(FENCE)
    assert here.suspended
    assert (await turn(here)).token_ids == [1] and not here.suspended and not engine.paused


async def test_what_was_suspended_stays_so_when_it_is_suspended_again_in_vain_and_ends_in_time(proxy):
    engine = StubEngine()
    engine.serves[BASE] = 0
    here = proxy(engine, control_s=1.0)
    await here.suspend(FENCE)
    engine.fails = {"pause": [GenerationFailure("500")]}
    with pytest.raises(GenerationFailure):
        await here.suspend(FENCE)
    assert here.suspended and engine.paused
    assert (await turn(here)).token_ids == [1] and not engine.paused


async def test_a_fleet_that_all_engines_refuse_to_pause_again_is_paused_still():
    router, engine = Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0), StubEngine()
    fleet = Fleet(router, control_s=10.0, max_waiting=9)
    fleet.members.add(Facts("a", "1", HardwareClass.BANDWIDTH_GPU, 4, 5000), engine)
    await until(lambda: fleet.members.serving)
    await fleet.pause()
    engine.fails = {"pause": [GenerationFailure("500")]}
    with pytest.raises(GenerationFailure):
        await fleet.pause()
    assert (await fleet.stats())["paused"]
    await fleet.resume()
    assert not (await fleet.stats())["paused"]
    await fleet.close()
