"""Several engines behind one interface, each behind its own HTTP host with an engine that computes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infra.engines.errors import BadRequest, EngineClosed, PromptTooLong, UnknownPolicy, WeightMismatch
from infra.engines.hf import HFEngine
from infra.engines.host import make_host
from infra.engines.protocol import BASE, Generation, Sampling
from infra.engines.remote import RemoteEngine
from infra.engines.vllm_http import ServerCalls
from infra.engines.vllm_wire import Segment, read_event
from infra.proxy.fleet import Fleet, Origin, Overloaded
from infra.proxy.fleet_metrics import FleetCollector
from infra.proxy.listen import Server, bind, listen
from infra.proxy.members import Facts, Member
from rl.errors import DeadlineExceeded
from rl.placement import HardwareClass, Placement
from rl.routing import Router
from tests.engines.tiny_models import load, prompt, save_adapter, teacher_forced

GPU, BANDWIDTH = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU
KEY = "the key of these tests"
SHORT, LONG = Sampling(1.0, 6, (), 3), Sampling(1.0, 160, (), 3)
VERY_LONG = Sampling(1.0, 600, (), 3)
"""For engines that nobody slows down, on a machine that may."""
ROOT = Path(__file__).parents[2]


@dataclass
class Host:
    """An engine in this process, served over HTTP."""

    engine: HFEngine
    server: Server
    url: str
    task: asyncio.Task[None]

    def remote(self, key: str = KEY) -> RemoteEngine:
        return RemoteEngine(self.url, key, self.engine.capabilities, control_s=10.0)

    async def cut(self) -> None:
        """Break every connection at once, as a process that dies does."""
        self.server.force_exit = self.server.should_exit = True
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait([self.task])


@dataclass
class Scene:
    """A fleet, and the hosts in front of which it stands."""

    fleet: Fleet
    models: list[Path]
    hosts: dict[str, Host]
    serial: int = 0

    def member(self, name: str) -> Member:
        return self.fleet.members.all[name]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.002)

    async def join(self, name: str, hardware: HardwareClass = BANDWIDTH, slots: int = 4) -> Member:
        self.report(name, hardware, slots)
        await self.until(lambda: self.member(name).state != "joining")
        return self.member(name)

    def report(self, name: str, hardware: HardwareClass = BANDWIDTH, slots: int = 4) -> str:
        host = self.hosts[name]
        return self.fleet.members.report(Facts(name, host.url, hardware, slots, 5000), host.remote)

    def start(self, trajectory: str = "t", sampling: Sampling = SHORT, length: int = 8) -> asyncio.Task[Generation]:
        self.serial += 1
        call = self.fleet.generate(prompt(length), sampling, BASE, f"{trajectory}#{self.serial}", Origin(trajectory))
        return asyncio.ensure_future(call)

    def check(self, result: Generation, versions: dict[int, Path], length: int = 8) -> None:
        """Every token has the log-prob that the version which is said to have made it gives it."""
        starts = [*result.version_spans, (len(result.token_ids), -1)]
        assert starts[0][0] == 0 and len(result.logprobs) == len(result.token_ids)
        for (start, version), (end, _) in pairwise(starts):
            before, said = prompt(length) + result.token_ids[:start], result.token_ids[start:end]
            expected = teacher_forced(load(versions[version]), before, said, 1.0)
            np.testing.assert_allclose(result.logprobs[start:end], expected, atol=2e-4)


@pytest.fixture
async def host(models: list[Path]) -> AsyncIterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(model: Path = models[0], **options: Any) -> Host:
        async def fetch(tenant: str, version: int, directory: str) -> Path:
            return Path(directory)

        engine = HFEngine(model, **({"device": "cpu", "max_batch": 4} | options))
        listener = bind("127.0.0.1", 0)
        listen(listener)
        server = Server(make_host(engine, KEY, fetch))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        hosts.append(Host(engine, server, url, asyncio.create_task(server.serve(sockets=[listener]))))
        return hosts[-1]

    yield make
    for made in hosts:
        await made.engine.close()
        made.server.should_exit = True
    await asyncio.gather(*(made.task for made in hosts))


@pytest.fixture
async def scene(models: list[Path], host: Callable[..., Host]) -> AsyncIterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(*names: str, lease_s: float = 60.0, max_waiting: int = 100) -> Scene:
        router = Router(Placement({}, BANDWIDTH), prefill_heavy=32.0)
        fleet = Fleet(router, control_s=10.0, max_waiting=max_waiting, lease_s=lease_s)
        scenes.append(Scene(fleet, models, {name: host() for name in names}))
        return scenes[-1]

    yield make
    for made in scenes:
        await made.fleet.close()


async def test_an_engine_behind_its_host_is_the_engine(host, models, tmp_path):
    here = host(base_version=0)
    direct = HFEngine(models[0], device="cpu", max_batch=4, base_version=0)
    remote = here.remote()
    try:
        expected = await direct.generate(prompt(9), LONG, BASE, "r")
        found = await remote.generate(prompt(9), LONG, BASE, "r")
        assert (found.token_ids, found.finish_reason, found.version_spans) == (expected.token_ids, "length", [(0, 0)])
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
        adapter = save_adapter(tmp_path / "adapter", models[0], seed=5)
        await remote.prefetch("somebody", 3, adapter)
        await remote.publish_adapter("somebody", 3, adapter)
        adapted = await remote.generate(prompt(9), SHORT, "somebody", "r2")
        assert adapted.version_spans == [(0, 3)] and remote.versions() == {"somebody": 3}
        flying = asyncio.ensure_future(remote.generate(prompt(9), LONG, BASE, "r3"))
        while not ((so_far := here.engine.so_far("r3")) and so_far.token_ids):
            await asyncio.sleep(0.001)
        await remote.abort(["r3"])
        partial = await flying
        assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < 160
        flying = asyncio.ensure_future(remote.generate(prompt(9), LONG, BASE, "r4"))
        while not here.engine.so_far("r4"):
            await asyncio.sleep(0.001)
        flying.cancel()
        while here.engine.so_far("r4"):
            await asyncio.sleep(0.001)
    finally:
        await direct.close()
        await remote.close()


async def test_an_engine_behind_its_host_has_more_time_to_read_than_to_obey(host, models, tmp_path, monkeypatch):
    here = host()
    adapter = save_adapter(tmp_path / "adapter", models[0], seed=5)
    prefetch = here.engine.prefetch

    async def slowly(tenant: str, version: int, directory: Path) -> None:
        await asyncio.sleep(0.6)
        await prefetch(tenant, version, directory)

    monkeypatch.setattr(here.engine, "prefetch", slowly)
    for control_s, load_s in ((0.3, 20.0), (20.0, 0.3)):
        remote = RemoteEngine(here.url, KEY, here.engine.capabilities, control_s, load_s)
        try:
            if load_s < 1:
                with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.3 s \(deadlines\.load\)"):
                    await remote.prefetch("somebody", 4, adapter)
            else:
                await remote.prefetch("somebody", 3, adapter)
                assert set(await remote.held()) == {"somebody"}
        finally:
            await remote.close()


async def test_errors_keep_their_name_and_nothing_is_answered_without_the_key(host, tmp_path):
    here = host(base_version=0)
    remote, stranger = here.remote(), here.remote("another key")
    try:
        with pytest.raises(UnknownPolicy, match="'nobody' has no version loaded"):
            await remote.generate(prompt(9), SHORT, "nobody", "r")
        with pytest.raises(PromptTooLong):
            await remote.generate([1] * 640, SHORT, BASE, "r")
        with pytest.raises(WeightMismatch):
            await remote.update_weights(1, tmp_path)
        for call in (stranger.generate(prompt(9), SHORT, BASE, "r"), stranger.pause(), stranger.stats()):
            with pytest.raises(Exception, match="the key is missing or wrong"):
                await call
        assert await remote.health() and not (await remote.stats())["paused"]
    finally:
        await remote.close()
        await stranger.close()
    with pytest.raises(EngineClosed, match="no longer in use"):
        await remote.generate(prompt(9), SHORT, BASE, "r")


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_an_engine_that_is_closed_in_the_middle_of_its_lines_says_so(kind):
    told = orjson.dumps({"token_ids": [1], "logprobs": [-1.0], "spans": [[0, 0]], "choices": []})
    line = {"hf": told, "vllm": b"data: " + told}[kind] + b"\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                await writer.drain()
                await asyncio.sleep(0)

    async def talk(url: str) -> tuple[Any, asyncio.Task[Any]]:
        if kind == "hf":
            remote = RemoteEngine(url, KEY, Fleet.capabilities, control_s=10.0)
            return remote, asyncio.ensure_future(remote.generate(prompt(9), SHORT, BASE, "r"))
        calls = ServerCalls(url, KEY, 10.0)
        calls.open()

        async def read() -> None:
            async for event in calls.stream("/generate", b"{}"):
                read_event(event, Segment())

        return calls, asyncio.ensure_future(read())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(30):
        for steps in range(20, 60):
            client, call = await talk(f"http://127.0.0.1:{port}")
            for _ in range(steps):
                await asyncio.sleep(0)
            await client.close()
            if kind == "vllm":  # whoever closes the connections of a server ends what waits for them, too
                call.cancel()
            [ended] = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(ended, EngineClosed) or (kind == "vllm" and isinstance(ended, asyncio.CancelledError))
    server.close()


async def test_engines_join_and_leave_while_it_runs_and_serve_what_is_served(scene, models):
    here = scene("a", "b")
    waiting = here.start()
    await here.until(lambda: here.fleet.router.waiting == 1)
    await here.fleet.update_weights(1, models[1])
    await here.join("a")
    assert (await waiting).version_spans == [(0, 1)], "it was brought to what is served before it got work"
    await here.join("b", GPU)
    first = await here.start("x")
    found = [await here.start("x", length=20) for _ in range(3)]
    assert all(r.version_spans == [(0, 1)] for r in (first, *found))
    await here.fleet.update_weights(2, models[2])
    results = await asyncio.gather(*(here.start(f"y{n}") for n in range(8)))
    assert {v for r in results for _, v in r.version_spans} == {2}
    assert all(h.engine.versions() == {BASE: 2} for h in here.hosts.values())
    stats = await here.fleet.stats()
    assert stats["ready"] == 2 and stats["requests"] == sum(e["requests"] for e in stats["engines"]) == 13
    here.check(results[0], {2: models[2]})
    here.fleet.members.lose(here.member("a"), "for this test")
    registry = CollectorRegistry()
    registry.register(FleetCollector(here.fleet))
    text = generate_latest(registry).decode()
    for line in (
        'rollmill_proxy_engines{hardware="bandwidth_gpu",state="lost"} 1.0',
        'rollmill_proxy_engines{hardware="compute_gpu",state="serving"} 1.0',
        'rollmill_proxy_engine_running{engine="b"} 0.0',
        "rollmill_proxy_waiting 0.0",
        "rollmill_proxy_engines_lost_total 1.0",
    ):
        assert line in text.splitlines()
    assert here.report("a") == "lost", "it is told, so that it is started anew"
    assert (await here.start("z")).version_spans == [(0, 2)]


async def test_an_engine_that_fails_an_update_is_out_and_what_all_refuse_changes_nothing(scene, models, tmp_path):
    here = scene("a", "b")
    await here.fleet.update_weights(0, models[0])
    for name in "ab":
        await here.join(name)
    with pytest.raises(WeightMismatch):
        await here.fleet.update_weights(1, tmp_path)
    assert here.fleet.versions() == {BASE: 0} and len(here.fleet.members.serving) == 2
    assert (await here.start()).version_spans == [(0, 0)]
    await here.hosts["a"].engine.close()
    await here.fleet.update_weights(1, models[1])
    assert [m.facts.name for m in here.fleet.members.serving] == ["b"]
    assert "update" in here.member("a").cause and here.report("a") == "lost"
    results = await asyncio.gather(*(here.start(f"t{n}") for n in range(6)))
    assert all(r.version_spans == [(0, 1)] for r in results)


async def test_what_is_cut_goes_on_elsewhere_from_what_was_told(scene, models):
    here = scene("a", "b")
    await here.fleet.update_weights(0, models[0])
    await here.join("a")
    flying = [here.start(f"t{n}", LONG) for n in range(3)]
    await here.until(lambda: here.hosts["a"].engine._loop.counters["tokens_generated"] > 150)
    await here.join("b")
    await here.hosts["a"].cut()
    results = await asyncio.gather(*flying)
    assert here.member("a").state == "lost" and (await here.fleet.stats())["continued"] == 3
    for result in results:
        assert len(result.token_ids) == 160 and result.version_spans == [(0, 0)]
        here.check(result, {0: models[0]})
    assert here.hosts["b"].engine._loop.counters["tokens_generated"] < 480, "what was told is not made again"
    assert here.fleet.router.running("b") == 0


async def test_one_that_hangs_is_lost_with_its_lease_and_its_work_goes_on(scene, models):
    here = scene("a", "b", lease_s=1.0)
    await here.fleet.update_weights(0, models[0])
    await here.join("a")
    await here.hosts["a"].engine.pause()
    flying = here.start(sampling=LONG)
    await here.until(lambda: here.fleet.router.running("a") == 1)

    async def beat() -> None:
        while True:
            here.report("b")
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    result = await flying
    beating.cancel()
    assert here.member("a").state == "lost" and "nothing was heard" in here.member("a").cause
    assert len(result.token_ids) == 160


async def test_one_that_somebody_else_runs_is_told_what_keeps_it_out_and_joins_once_it_is_well(scene, models, host):
    here = scene("theirs")
    await here.fleet.update_weights(1, models[1])
    wrong = ["it has --logprobs-mode raw_logprobs"]

    async def connect() -> RemoteEngine:
        if wrong:
            raise BadRequest(wrong[0])
        return here.hosts["theirs"].remote()

    here.fleet.members.expect(Facts("theirs", "external", BANDWIDTH, 4, 5000), connect)
    waiting = here.start()
    await here.until(lambda: here.fleet.members.away()[0]["cause"])
    stats = await here.fleet.stats()
    away = {"name": "theirs", "hardware": "bandwidth_gpu", "state": "away", "cause": wrong[0]}
    assert stats["ready"] == 0 and stats["engines"] == [away] and not waiting.done()
    wrong.clear()
    assert (await waiting).version_spans == [(0, 1)]
    assert (await here.fleet.stats())["ready"] == 1 and not here.fleet.members.away()
    await here.hosts["theirs"].cut()
    flying = here.start("t1")
    await here.until(lambda: here.member("theirs").state == "lost")
    here.hosts["theirs"] = host()
    assert (await flying).version_spans == [(0, 1)], "it is brought to what is served anew"


async def test_pause_holds_everything_and_work_waits_within_bounds(scene, models):
    here = scene("a", max_waiting=2)
    await here.fleet.update_weights(0, models[0])
    await here.join("a", slots=2)
    flying = here.start("f", LONG)
    await here.until(lambda: here.hosts["a"].engine.so_far("f#1"))
    await here.fleet.pause()
    made = here.hosts["a"].engine._loop.counters["tokens_generated"]
    waiting = [here.start("w0"), here.start("w1")]
    await here.until(lambda: here.fleet.router.waiting == 2)
    with pytest.raises(Overloaded, match="2 requests wait"):
        await here.start("w2")
    waiting[1].cancel()
    await here.until(lambda: here.fleet.router.waiting == 1)
    assert here.hosts["a"].engine._loop.counters["tokens_generated"] == made
    await here.fleet.resume()
    assert len((await flying).token_ids) == 160 and len((await waiting[0]).token_ids) == 6
    assert here.fleet.router.running("a") == 0


async def test_an_engine_that_a_dead_proxy_left_paused_goes_on_when_it_joins_another(scene, models):
    here = scene("a", "b")
    for left in here.hosts.values():
        await left.engine.pause()
    await here.fleet.update_weights(0, models[0])
    await here.join("a")
    turn = here.start()
    await here.until(turn.done)
    assert len(turn.result().token_ids) == 6
    await here.fleet.pause()
    await here.join("b")
    made = [left.engine._loop.counters["tokens_generated"] for left in here.hosts.values()]
    held = [here.start(f"t{n}") for n in range(8)]
    await here.until(lambda: here.fleet.router.waiting == 8)
    assert made == [6, 0] and not any(turn.done() for turn in held), "it waits for the fleet that it joined"
    await here.fleet.resume()
    assert all(len(result.token_ids) == 6 for result in await asyncio.gather(*held))
    assert all(left.engine._loop.counters["requests"] for left in here.hosts.values())


async def test_an_engine_that_outlives_its_proxy_keeps_nothing_of_tenants_that_the_next_one_does_not_know(
    scene, models, tmp_path
):
    first, second = scene("a"), scene()
    second.hosts = first.hosts
    adapters = {tenant: save_adapter(tmp_path / tenant, models[0], seed=n) for n, tenant in enumerate("stu")}
    for here, version, tenants in ((first, 0, "st"), (second, 1, "tu")):
        for tenant in tenants:
            await here.fleet.publish_adapter(tenant, version, adapters[tenant])
        await here.join("a")
        assert here.hosts["a"].engine.versions() == dict.fromkeys(tenants, version)
        if here is first:
            await here.fleet.prefetch("only read", 0, adapters["s"])
            assert set(await here.hosts["a"].remote().held()) == {"s", "t", "only read"}
            await here.fleet.close()
    assert set(await first.hosts["a"].engine.held()) == {"t", "u"}


@pytest.mark.slow
async def test_a_process_killed_in_mid_generation_costs_no_token_that_was_told(scene, models):
    here = scene()
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            command = [sys.executable, str(ROOT / "tests/proxy/engine_child.py"), str(models[0]), KEY]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
                )
            )
        ports = [await asyncio.to_thread(p.stdout.readline) for p in processes]  # type: ignore[union-attr]
        await here.fleet.update_weights(0, models[0])

        async def join(name: str, port: str) -> None:
            facts, url = Facts(name, port, BANDWIDTH, 4, 5000), f"http://127.0.0.1:{int(port)}"
            here.fleet.members.report(facts, lambda: RemoteEngine(url, KEY, Fleet.capabilities, 20.0))
            await here.until(lambda: here.member(name).state == "serving")

        await join("a", ports[0])
        flying = [here.start(f"t{n}", VERY_LONG) for n in range(3)]

        async def made() -> int:
            return (await here.member("a").engine.stats())["tokens_generated"]

        while await made() < 90:
            await asyncio.sleep(0.01)
        await here.fleet.update_weights(1, models[1])
        after = await made()
        while await made() < after + 90:
            await asyncio.sleep(0.01)
        os.kill(processes[0].pid, signal.SIGSTOP)  # or all could be told before the other has joined
        await join("b", ports[1])
        os.kill(processes[0].pid, signal.SIGKILL)
        results = await asyncio.gather(*flying)
        assert here.member("a").state == "lost"
        for result in results:
            assert len(result.token_ids) == VERY_LONG.max_new_tokens and [v for _, v in result.version_spans] == [0, 1]
            here.check(result, {0: models[0], 1: models[1]})
        assert (await here.member("b").engine.stats())["tokens_generated"] < 3 * VERY_LONG.max_new_tokens - 90
    finally:
        for process in processes:
            process.kill()
            process.communicate()
