"""Many tenants behind one address: each key reaches its own, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import Route

from infra.chat import ChatCodec
from infra.engines.hf import HFEngine
from infra.engines.protocol import Generation, Sampling
from infra.models.tiny import write_tiny
from infra.proxy import native
from infra.proxy.auth import Keys
from infra.proxy.client import JSON, ControlClient, ControlRefused, ProxyClient, ProxyUnavailable, RequestRefused
from infra.proxy.listen import bind, listen
from infra.proxy.serve import _listen
from infra.proxy.session_wire import SessionBody
from infra.proxy.tenants import AGAIN_S, Tenants
from infra.store.errors import StoreDenied, StoreUnavailable
from infra.store.jobs import JobBook
from infra.store.weights import WeightStore
from rl.config.load import validate_as
from rl.config.model import TinySection
from rl.config.tenants import Job, ServiceConfig
from rl.errors import Fenced, LogCorrupt
from tests.engines.tiny_models import prompt, save_adapter
from tests.proxy.conftest import Trainer
from tests.proxy.memory_store import MemoryStore

SERVICE = validate_as(
    ServiceConfig,
    {
        "name": "shop",
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "domains": [{"name": "lake", "environment": "frozen_lake"}],
        "engine": {"device": "cpu", "max_batch": 4},
    },
    "service",
)
LONG = Sampling(1.0, 600, ())


def job(tenant: str) -> Job:
    return validate_as(Job, {"tenant": tenant, "name": "job", "domains": ["lake"]}, "job")


@dataclass
class Somebody:
    """A tenant with its keys and its trainer."""

    name: str
    keys: Keys
    trainer: Trainer
    rollout: ProxyClient
    url: str

    def control(self) -> ControlClient:
        return ControlClient(self.url, 20.0, self.trainer.fence, self.keys.control)

    def turn(self, **changes: Any) -> asyncio.Future[Generation]:
        call = {
            "trajectory": "t",
            "request": "t-0",
            "tenant": self.name,
            "token_ids": prompt(8),
            "sampling": Sampling(1.0, 6, (), 3),
            "start_version": 0,
            "deadline_s": 20.0,
        }
        return asyncio.ensure_future(self.rollout.generate(**(call | changes)))

    def session(self) -> SessionBody:
        return SessionBody(
            trajectory="t", tenant=self.name, start_version=0, temperature=1.0, max_new_tokens=8, max_tokens=200,
            max_turns=3, deadline_s=60,
        )  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Shop:
    tenants: Tenants
    book: JobBook
    keys: Keys
    url: str
    ann: Somebody
    bob: Somebody

    @property
    def engine(self) -> HFEngine:
        assert isinstance(self.tenants.engine, HFEngine)
        return self.tenants.engine


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_tiny(TinySection(hidden_size=64, layers=2), 0, directory)
    return directory


@pytest.fixture
async def shop(base: Path, tmp_path: Path) -> AsyncIterator[Shop]:
    """Two jobs run, each with its version 0 in its log."""
    store, keys = MemoryStore(), Keys.random()
    book = JobBook(store, "shop")  # type: ignore[arg-type]
    engine = HFEngine(base, device="cpu", max_batch=4)
    tenants = Tenants(
        SERVICE, engine, keys, store, tmp_path / "cache", WeightStore(store).pull,  # type: ignore[arg-type]
        lambda: ChatCodec.from_directory(base),
    )  # fmt: skip
    listener = bind("127.0.0.1", 0)
    url, stop = f"http://127.0.0.1:{listener.getsockname()[1]}", threading.Event()
    people = []
    for seed, name in enumerate(("ann", "bob")):
        book.submit(job(name))
        book.start(f"{name}/job", 0)
        trainer = Trainer(store, job(name).run(SERVICE))
        trainer.publish(save_adapter(tmp_path / name / "model", base, seed))
        mine = keys.of_tenant(f"{name}.job")
        people.append(Somebody(f"{name}.job", mine, trainer, ProxyClient(url, mine.rollout), url))

    async def look() -> None:
        pass

    await tenants.look()
    await until(lambda: all(t.proxy.serving == 0 for t in tenants._tenants.values()))
    listen(listener)
    task = asyncio.create_task(_listen(tenants, engine, listener, stop, look))
    try:
        yield Shop(tenants, book, keys, url, *people)
    finally:
        stop.set()
        await task
        await asyncio.gather(*(somebody.rollout.close() for somebody in people))
        await tenants.close()


async def test_each_tenant_has_its_own_policy_on_one_engine(shop):
    ann, bob = await asyncio.gather(shop.ann.turn(), shop.bob.turn())
    assert ann.version_spans == bob.version_spans == [(0, 0)]
    assert ann.logprobs != bob.logprobs and shop.engine.versions() == {"ann.job": 0, "bob.job": 0}


def _headers(key: str | None) -> dict[str, str]:
    return JSON | ({} if key is None else {"Authorization": f"Bearer {key}"})


@pytest.mark.slow
async def test_no_route_but_healthz_does_anything_for_a_key_that_it_is_not_for(shop):
    """Every route that there is, with the key of everybody that it is not meant for, about what bob has."""
    opened = await shop.bob.rollout.open_session(shop.bob.session(), 20.0)
    mine = await shop.ann.rollout.open_session(shop.ann.session(), 20.0)
    app = shop.tenants._tenants["bob.job"].app
    routes = {(route.path, method) for route in app.routes for method in route.methods if isinstance(route, Route)}
    routes |= {(r.path, m) for r in shop.tenants._operator.routes for m in r.methods} | {(native.GENERATE, "POST")}
    names = {"session": opened.session, "trajectory": "t", "model": "job", "name": "an-engine"}
    body = {"tenant": "bob.job", "fence": shop.bob.trainer.fence, "version": 0, "oldest_viable": 0, "model": "job"}
    body |= {"trajectory": "t", "request": "r", "token_ids": [1], "temperature": 1.0, "max_new_tokens": 1}
    body |= {"start_version": 0, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    strangers = {
        "nobody": None,
        "a guess": "0" * 64,
        "ann's control": shop.ann.keys.control,
        "ann's rollout": shop.ann.keys.rollout,
        "ann's agent": mine.token,
        "the service's control": shop.keys.control,
        "the service's rollout": shop.keys.rollout,
    }
    own = {"/status", "/metrics", "/healthz", "/control/engines/{name}"}
    """What a stranger may see: that of its own."""
    tried = 0
    async with aiohttp.ClientSession() as http:
        for path, method in sorted(routes):
            for who, key in strangers.items():
                if path in own:
                    continue
                url = shop.url + path.replace(":path", "").format(**names)
                async with http.request(method, url, json=body, headers=_headers(key)) as reply:
                    said = await reply.text()
                refused = reply.status in (400, 401, 403, 404, 405, 422) or (method == "HEAD" and reply.status >= 400)
                harmless = path == "/trajectories/{trajectory:path}/abort" and said == '{"aborted":0}'
                listed = path.startswith("/v1/models") and who == "ann's agent"  # of its own
                assert refused or harmless or listed, (path, method, who, reply.status, said)
                tried += 1
    assert tried > 80, "the walk goes over all routes"
    record = await shop.bob.rollout.close_session(opened, 20.0)
    assert record.ended is None and not record.turns, "nobody spoke in bob's session, or ended it"
    status = await to_thread(shop.bob.control().status)
    assert (status.serving, status.suspended) == (0, False)


async def test_what_is_told_of_a_tenant_is_its_own(shop):
    await shop.bob.turn()
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{shop.url}/metrics", headers=_headers(shop.ann.keys.rollout)) as reply:
            assert reply.status == 200 and "bob" not in await reply.text()
        async with http.get(f"{shop.url}/metrics", headers=_headers(shop.keys.rollout)) as reply:
            text = await reply.text()
    assert 'rollmill_proxy_requests_total{domain="",tenant="bob.job"} 1.0' in text
    assert 'rollmill_proxy_serving_version{tenant="ann.job"} 0.0' in text
    overview = await to_thread(ControlClient(shop.url, 20.0, key=shop.keys.rollout).tenants)
    assert {name: t.serving for name, t in overview.tenants.items()} == {"ann.job": 0, "bob.job": 0}
    assert overview.engine["swaps"] == 2


async def test_a_key_names_its_tenant_whatever_the_body_says(shop):
    with pytest.raises(RequestRefused, match=r"forbidden: tenant: the key is that of 'ann\.job', not of 'bob\.job'"):
        await shop.ann.turn(tenant="bob.job")
    with pytest.raises(RequestRefused, match="forbidden"):
        await shop.ann.rollout.open_session(shop.bob.session(), 20.0)


async def test_one_tenant_is_suspended_and_updated_while_the_others_go_on(shop, base, tmp_path):
    control = shop.ann.control()
    await to_thread(control.suspend)
    held = shop.ann.turn()
    before = [await shop.bob.turn() for _ in range(3)]
    assert not held.done()
    shop.ann.trainer.publish(save_adapter(tmp_path / "next" / "model", base, seed=9))
    await to_thread(control.update, 1, oldest_viable=0)
    await to_thread(control.resume)
    assert (await held).version_spans == [(0, 1)]
    after = await shop.bob.turn()
    assert after.token_ids == before[0].token_ids and after.version_spans == [(0, 0)]
    assert shop.engine.versions() == {"ann.job": 1, "bob.job": 0}


async def test_a_fence_of_one_tenant_is_nothing_to_another(shop):
    newer = Trainer(shop.bob.trainer.store, shop.bob.trainer.config, "second")
    with pytest.raises(ControlRefused, match="unknown_fence"):
        await to_thread(ControlClient(shop.url, 20.0, newer.fence + 5, shop.ann.keys.control).suspend)
    await to_thread(ControlClient(shop.url, 20.0, newer.fence, shop.bob.keys.control).suspend)
    with pytest.raises(Fenced):
        await to_thread(shop.bob.control().suspend)
    await to_thread(shop.ann.control().suspend)


async def test_trajectories_of_one_name_are_two_tenants_own(shop):
    flying = [somebody.turn(sampling=LONG) for somebody in (shop.ann, shop.bob)]
    await until(lambda: len(shop.engine._loop.slots.running) == 2)
    await shop.ann.rollout.abort("t")
    with pytest.raises(Exception, match="cancelled"):
        await flying[0]
    assert len((await flying[1]).token_ids) == 600


async def test_a_job_that_is_paused_is_served_no_more_and_again_when_it_goes_on(shop):
    flying = shop.ann.turn(sampling=LONG, deadline_s=1.0)
    await until(lambda: len(shop.engine._loop.slots.running) == 1)
    shop.book.order("ann/job", "pause")
    await shop.tenants.look()
    with pytest.raises(ProxyUnavailable, match="job ann/job is paused, and not served"):
        await flying
    with pytest.raises(ControlRefused, match="not_running: job ann/job is paused"):
        await to_thread(shop.ann.control().suspend)
    await until(lambda: shop.engine.versions() == {"bob.job": 0} and not shop.tenants._leaving)
    shop.book.order("ann/job", "resume")
    shop.book.start("ann/job", 0)
    assert (await shop.ann.turn()).version_spans == [(0, 0)], "its key alone has the book read anew"
    assert len(list(shop.tenants._cache.glob("ann.job-*"))) == 1, "what it had on the disk is gone"


async def test_a_job_whose_adapter_does_not_fit_hurts_itself_alone(shop, tmp_path):
    wrong = tmp_path / "wrong" / "model"
    wrong.mkdir(parents=True)
    (wrong / "notes.txt").write_text("no adapter")
    shop.ann.trainer.publish(wrong)
    with pytest.raises(ControlRefused, match="WeightMismatch"):
        await to_thread(shop.ann.control().update, 1, 0)
    assert (await shop.ann.turn()).version_spans == [(0, 0)] and (await shop.bob.turn()).version_spans == [(0, 0)]
    shop.book.submit(job("cyd"))
    shop.book.start("cyd/job", 0)
    Trainer(shop.bob.trainer.store, job("cyd").run(SERVICE)).publish(wrong)
    await shop.tenants.look()
    await until(lambda: shop.tenants._tenants["cyd.job"].trouble is not None)
    status = await shop.tenants.status()
    assert "WeightMismatch" in status.tenants["cyd.job"].trouble and (await shop.bob.turn()).token_ids


def test_keys_of_tenants_are_unlike_and_come_from_the_service_alone():
    keys = Keys.random()
    ann, bob = keys.of_tenant("ann.job"), keys.of_tenant("bob.job")
    all_ = {keys.control, keys.rollout, ann.control, ann.rollout, bob.control, bob.rollout}
    assert len(all_) == 6 and keys.of_tenant("ann.job") == ann
    assert ann.of_tenant("bob.job") != bob
    assert replace(keys, control="other").of_tenant("ann.job").rollout == ann.rollout


async def test_strangers_keys_cost_few_looks_however_many_come_at_once(shop, monkeypatch):
    looks = []
    sync = shop.tenants._book.sync
    monkeypatch.setattr(shop.tenants._book, "sync", lambda: (looks.append(1), sync())[1])
    began = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() > began + AGAIN_S)  # when another look is due

    async def knock(http: aiohttp.ClientSession, key: str) -> int:
        async with http.get(f"{shop.url}/status", headers=_headers(key)) as reply:
            return reply.status

    async with aiohttp.ClientSession() as http:
        found = await asyncio.gather(*(knock(http, f"{n:064d}") for n in range(60)))
    assert set(found) == {401}
    assert 0 < len(looks) <= 3 + (asyncio.get_running_loop().time() - began) / AGAIN_S


async def test_a_key_of_a_job_that_has_just_started_is_never_that_of_a_stranger(shop, base, tmp_path):
    """Right after a look that did not see it, while strangers knock."""
    for name in ("cyd", "dan", "eve"):
        keys = shop.keys.of_tenant(f"{name}.job")
        Trainer(shop.bob.trainer.store, job(name).run(SERVICE))
        stranger = asyncio.ensure_future(to_thread(ControlClient(shop.url, 20.0, key="0" * 64).tenants))
        if name != "dan":
            shop.book.submit(job(name))
        await shop.tenants.look()
        if name == "dan":
            shop.book.submit(job(name))
        shop.book.start(f"{name}/job", 0)
        assert (await to_thread(ControlClient(shop.url, 20.0, key=keys.control).status)).serving is None
        with pytest.raises(ControlRefused, match="the key is that of no job here"):
            await stranger


@pytest.mark.parametrize("trouble", [StoreUnavailable("secret"), StoreDenied("secret"), LogCorrupt("secret")])
async def test_while_the_book_can_not_be_read_no_key_is_called_unknown_and_no_job_over(shop, monkeypatch, trouble):
    """Also not to those that share a look which somebody else began; who is served goes on."""
    shop.book.submit(job("cyd"))
    shop.book.order("ann/job", "pause")
    await shop.tenants.look()
    shop.book.order("ann/job", "resume")
    for id in ("ann/job", "cyd/job"):
        shop.book.start(id, 0)
    Trainer(shop.bob.trainer.store, job("cyd").run(SERVICE))
    sync = shop.tenants._book.sync

    def fail() -> None:
        raise trouble

    monkeypatch.setattr(shop.tenants._book, "sync", fail)
    keys = {"ann": shop.ann.keys.control, "cyd": shop.keys.of_tenant("cyd.job").control, "nobody": "0" * 64}
    clients = {who: ControlClient(shop.url, 20.0, 0, key) for who, key in keys.items()}
    calls = [to_thread(call) for client in clients.values() for call in (client.status, client.suspend)]
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, ProxyUnavailable) and "ask again" in str(found) and "secret" not in str(found)
    url, headers = f"{shop.url}/v1/chat/completions", _headers(keys["nobody"])
    async with aiohttp.ClientSession() as http, http.post(url, json={}, headers=headers) as reply:
        assert reply.status == 503 and reply.headers["Retry-After"]
        assert (await reply.json())["error"]["code"] == "unavailable"
    assert (await shop.bob.turn()).version_spans == [(0, 0)]
    monkeypatch.setattr(shop.tenants._book, "sync", sync)
    for who in ("ann", "cyd"):
        assert await to_thread(clients[who].status)
    with pytest.raises(ControlRefused, match="unauthorized"):
        await to_thread(clients["nobody"].status)
