"""A tenant that leaves takes everything with it, whatever is under way for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.engines.hf import HFEngine
from infra.proxy.auth import Keys
from infra.proxy.control import Proxy
from infra.proxy.fleet import Fleet
from infra.proxy.members import Facts
from infra.proxy.tenants import Tenants
from infra.proxy.versions import VersionSource
from infra.store.jobs import JobBook
from infra.store.weights import WeightStore
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from tests.engines.tiny_models import save_adapter
from tests.proxy.conftest import Trainer
from tests.proxy.memory_store import MemoryStore
from tests.proxy.stub_engine import StubEngine
from tests.proxy.test_tenants import SERVICE, job, until


@dataclass
class Gate:
    """In front of a call, which goes on when its caller is gone, as that of another process does."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def before(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def late(*args: Any) -> Any:
            self.reached.set()
            await self.open.wait()
            return await call(*args)

        return lambda *args: asyncio.shield(asyncio.ensure_future(late(*args)))


@pytest.fixture(params=["embedded", "fleet"])
async def engines(request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[tuple[Any, Any]]:
    """What the tenants share, and the engine in it or behind it."""
    if request.param == "embedded":
        alone = HFEngine(models[0], device="cpu", max_batch=4)
        yield alone, alone
        await alone.close()
        return
    engine = StubEngine()
    fleet = Fleet(Router(Placement({}, HardwareClass.BANDWIDTH_GPU), 32.0), control_s=20.0, max_waiting=9)
    fleet.members.add(Facts("a", "1", HardwareClass.BANDWIDTH_GPU, 4, 5000), engine)  # type: ignore[arg-type]
    await until(lambda: fleet.members.serving)
    yield fleet, engine
    await fleet.close()


def held(engine: Any) -> set[str]:
    """Tenants of whom an engine has anything."""
    if isinstance(engine, StubEngine):
        return engine.read | engine.serves.keys()
    return {tenant for tenant, _ in engine._ready} | engine.versions().keys() | set(engine._loop.bank.tenants)


WAYS: dict[str, Callable[[Proxy, int], Awaitable[Any]]] = {
    "load": lambda proxy, fence: proxy.load_head(),
    "update": lambda proxy, fence: proxy.update(fence, 0, 0),
    "prefetch": lambda proxy, fence: proxy.prefetch(fence, 0),
}


@pytest.mark.parametrize(
    ("way", "where"),
    [
        (w, c)
        for w in WAYS
        for c in ("directory", "prefetch", "publish_adapter")
        if (w, c) != ("prefetch", "publish_adapter")
    ],
)
async def test_what_is_under_way_for_a_tenant_does_not_outlive_it(engines, models, tmp_path, monkeypatch, way, where):
    shared, engine = engines
    store = MemoryStore()
    book = JobBook(store, "shop")  # type: ignore[arg-type]
    tenants = Tenants(
        SERVICE, shared, Keys.random(), store, tmp_path / "cache", WeightStore(store).pull, lambda: None,  # type: ignore
    )  # fmt: skip
    book.submit(job("ann"))
    book.start("ann/job", 0)
    trainer, gate = Trainer(store, job("ann").run(SERVICE)), Gate()
    if way != "load":  # nothing is there to be loaded by the tenants themselves
        await tenants.look()
        await until(lambda: tenants._tenants["ann.job"].loading.done())
    trainer.publish(save_adapter(tmp_path / "ann" / "model", models[0], 1))
    if where == "directory":
        whole = VersionSource.directory
        monkeypatch.setattr(VersionSource, where, lambda self, *args: gate.before(whole)(self, *args))
    else:
        monkeypatch.setattr(engine, where, gate.before(getattr(engine, where)))
    if way == "load":
        await tenants.look()
        work = tenants._tenants["ann.job"].loading
    else:
        work = asyncio.ensure_future(WAYS[way](tenants._tenants["ann.job"].proxy, trainer.fence))
    await asyncio.wait_for(gate.reached.wait(), 20)
    book.order("ann/job", "pause")
    await asyncio.wait_for(tenants.look(), 20)  # which nothing of ann's holds up
    assert not tenants._tenants
    [leaving] = tenants._leaving.values()
    book.order("ann/job", "resume")
    book.start("ann/job", 0)
    await tenants.look()
    assert not tenants._tenants, "it comes again once it has left"
    refusal = tenants._refusal("/control/suspend", tenants._known["ann.job"])
    assert refusal.status == 503, "its trainer asks again"
    gate.open.set()
    await asyncio.wait_for(asyncio.wait([work, leaving]), 20)
    assert not held(engine) and not shared.versions()
    assert not list((tmp_path / "cache").glob("ann.job-*"))
    monkeypatch.undo()
    await tenants.look()
    await until(lambda: shared.versions() == {"ann.job": 0})
    await tenants.close()
