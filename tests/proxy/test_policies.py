"""How an engine that joins comes to what is served, for many tenants of whom some are in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from infra.engines.errors import BadRequest, EngineClosed, NoAdapterSlot, WeightMismatch
from infra.engines.hf import PREFETCHED, HFEngine
from infra.engines.protocol import Generation, Sampling
from infra.proxy.fleet import Fleet
from infra.proxy.members import Facts, Member
from rl.errors import DeadlineExceeded, GenerationFailure
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from tests.engines.tiny_models import save_adapter
from tests.proxy.stub_engine import StubEngine
from tests.proxy.test_tenants import until

CONTROL_S = 20.0
TENANTS = [f"t{n}" for n in range(6)]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """It serves all tenants, and has no engine yet."""
    made = Fleet(Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0), control_s=CONTROL_S, max_waiting=9)
    for tenant in TENANTS:
        await made.publish_adapter(tenant, 1, tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def pass_time() -> AsyncIterator[Callable[[float], None]]:
    """Sets the clock of the event loop ahead."""
    loop, ahead = asyncio.get_running_loop(), [0.0]
    real = loop.time
    loop.time = lambda: real() + ahead[0]  # type: ignore[method-assign]

    def go(seconds: float) -> None:
        ahead[0] += seconds

    yield go


def add(fleet: Fleet, engine: StubEngine, name: str = "a") -> Member:
    facts = Facts(name, "1", HardwareClass.BANDWIDTH_GPU, 4, 5000)
    return fleet.members.add(facts, engine)  # type: ignore[arg-type]


async def join(fleet: Fleet, engine: StubEngine, name: str = "a") -> Member:
    member = add(fleet, engine, name)
    await until(lambda: member.state != "joining")
    return member


async def turn(fleet: Fleet, tenant: str, request: str = "r") -> Generation:
    return await asyncio.wait_for(fleet.generate([1], Sampling(1.0, 1, ()), tenant, request), 20)


FAILURES = [
    WeightMismatch("no adapter"),
    GenerationFailure("404 in the store"),
    NoAdapterSlot("full"),
    BadRequest("no"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("call", ["prefetch", "publish"])
async def test_a_tenant_in_trouble_keeps_no_engine_out_and_nobody_elses_turn(fleet, tmp_path, call, failure):
    engine = StubEngine()
    engine.fails = {f"publish {TENANTS[0]}": [failure] * 2, f"{call} {TENANTS[0]}": [failure] * 2}
    member = await join(fleet, engine)
    assert (member.state, member.cause, member.lacks) == ("serving", "", {TENANTS[0]})
    for tenant in TENANTS[1:]:
        assert (await turn(fleet, tenant)).version_spans == [(0, 1)]
    with pytest.raises(GenerationFailure, match=f"engine a can not serve '{TENANTS[0]}'"):
        await turn(fleet, TENANTS[0])
    engine.fails.clear()
    both = await asyncio.gather(turn(fleet, TENANTS[0]), turn(fleet, TENANTS[0], "r2"))
    assert [one.version_spans for one in both] == [[(0, 1)]] * 2, "it is there when it can be had"
    assert not member.lacks and member.state == "serving"


async def test_an_update_or_a_withdrawal_ends_what_an_engine_lacks(fleet, tmp_path):
    engine = StubEngine()
    engine.fails = {f"publish {tenant}": [WeightMismatch("no adapter")] for tenant in TENANTS[:2]}
    member = await join(fleet, engine)
    assert member.summary()["lacks"] == TENANTS[:2]
    await fleet.publish_adapter(TENANTS[0], 2, tmp_path)
    await fleet.withdraw_adapter(TENANTS[1])
    assert not member.lacks and (await turn(fleet, TENANTS[0])).version_spans == [(0, 2)]


@pytest.mark.parametrize("failure", [EngineClosed("gone"), DeadlineExceeded("late"), TimeoutError()])
@pytest.mark.parametrize("call", ["prefetch", "publish", "resume"])
async def test_an_engine_that_is_gone_or_late_does_not_join(fleet, call, failure):
    engine = StubEngine()
    engine.fails = {call: [failure]}
    member = await join(fleet, engine)
    assert member.state == "lost" and type(failure).__name__ in member.cause


async def test_an_engine_that_can_serve_nobody_does_not_join(fleet):
    engine = StubEngine()
    engine.fails = {"publish": [WeightMismatch("of another model")] * len(TENANTS)}
    member = await join(fleet, engine)
    assert member.state == "lost" and "of another model" in member.cause


async def test_many_tenants_have_each_the_time_of_one(fleet, pass_time):
    engine = StubEngine()
    engine.takes = lambda: pass_time(0.6 * CONTROL_S)
    member = add(fleet, engine)
    while member.state == "joining":  # without a deadline, for its clock is set ahead
        await asyncio.sleep(0)
    assert member.state == "serving" and engine.serves == dict.fromkeys(TENANTS, 1), member.cause


@pytest.mark.parametrize(("load_s", "state"), [(20.0, "serving"), (0.05, "lost")])
async def test_reading_has_a_deadline_of_its_own_that_is_named(tmp_path, load_s, state):
    """When an engine joins, and when a version is read ahead."""
    slow = asyncio.Event()

    class Slow(StubEngine):
        async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
            if slow.is_set():
                await asyncio.sleep(0.4)

    router = Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0)
    fleet = Fleet(router, control_s=0.2, load_s=load_s, max_waiting=9)
    try:
        there = await join(fleet, Slow(), "there")
        slow.set()
        await fleet.prefetch("t", 1, tmp_path)
        await fleet.publish_adapter("t", 1, tmp_path)
        joined = await join(fleet, Slow(), "joined")
        for member in (there, joined):
            assert (member.state, "0.05 s (deadlines.load); raise that" in member.cause) == (state, state == "lost")
    finally:
        await fleet.close()


async def test_an_engine_that_serves_too_slowly_is_lost_by_the_name_of_that_deadline(tmp_path):
    class Slow(StubEngine):
        async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
            await asyncio.sleep(20)

    fleet = Fleet(Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0), control_s=0.1, max_waiting=9)
    try:
        member = await join(fleet, Slow())
        await fleet.publish_adapter("t", 1, tmp_path)
        assert member.state == "lost" and "0.1 s (deadlines.control); raise that" in member.cause
    finally:
        await fleet.close()


async def test_a_joining_engine_holds_nothing_of_a_tenant_that_left_meanwhile(fleet):
    engine = StubEngine()
    async with fleet._swap:  # as by an update, for which both wait
        leaving = asyncio.create_task(fleet.withdraw_adapter(TENANTS[0]))
        await asyncio.sleep(0)
        member = add(fleet, engine)
        await until(lambda: engine.read == set(TENANTS))
    await leaving
    await until(lambda: member.state == "serving")
    assert engine.read == set(TENANTS[1:]) and engine.serves == dict.fromkeys(TENANTS[1:], 1)


async def test_an_engine_withdraws_what_another_proxy_had_it_serve_or_read(fleet):
    engine = StubEngine()
    engine.serves, engine.read = {"": 1, TENANTS[0]: 1, "gone": 3}, {"only read"}
    member = await join(fleet, engine)
    assert member.state == "serving" and engine.serves == {"": 1} | dict.fromkeys(TENANTS, 1)
    assert engine.read == set(TENANTS)


async def test_an_engine_keeps_what_it_read_of_every_tenant(models, tmp_path):
    engine = HFEngine(models[0], device="cpu", max_batch=4)
    adapter = save_adapter(tmp_path / "adapter", models[0], seed=5)
    try:
        for version in range(PREFETCHED + 1):
            for tenant in TENANTS:
                await engine.prefetch(tenant, version, adapter)
        assert engine._ready.keys() == {(t, v) for t in TENANTS for v in range(1, PREFETCHED + 1)}
        for tenant in TENANTS:  # what was read is all that it needs
            await engine.publish_adapter(tenant, PREFETCHED, tmp_path / "nothing is here")
        assert engine.versions() == dict.fromkeys(TENANTS, PREFETCHED)
    finally:
        await engine.close()
