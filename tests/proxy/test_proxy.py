"""The proxy over real HTTP."""

from __future__ import annotations

import asyncio
from asyncio import to_thread

import aiohttp
import httpx
import numpy as np
import orjson
import pytest

from infra.engines.protocol import BASE, Sampling
from infra.proxy.client import (
    JSON,
    ControlClient,
    ControlRefused,
    GenerationTimeout,
    ProxyClient,
    ProxyUnavailable,
    RequestRefused,
    TrajectoryCancelled,
)
from infra.store.errors import StoreUnavailable
from rl.errors import DeadlineExceeded, Fenced, StaleTrajectory
from tests.engines.tiny_models import load, prompt, save_adapter, teacher_forced
from tests.proxy.conftest import Trainer, make_config

LONG = Sampling(1.0, 600, ())


async def test_a_turn_is_that_of_the_model_in_the_log(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[1])
    run = await start()
    result = await run.turn()
    assert (result.finish_reason, len(result.token_ids), result.version_spans) == ("length", 6, [(0, 0)])
    expected = teacher_forced(load(models[1]), prompt(8), result.token_ids, 1.0)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    again = await run.turn(sampling=Sampling(0.7, 30, (result.token_ids[2],), 3))
    assert again.finish_reason in ("stop", "length")


async def test_update_changes_what_is_served_and_only_versions_of_the_log_are(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    before = await run.turn()
    control = run.control(trainer.fence)
    with pytest.raises(ControlRefused, match=r"unknown_version: version 1 is not in the commit log, or deleted"):
        await to_thread(control.update, 1, 0)
    trainer.publish(models[1])
    await to_thread(control.prefetch, 1)
    status = await to_thread(control.status)
    assert (status.serving, status.prefetched, status.head, status.fence) == (0, 1, 1, trainer.fence)
    await to_thread(control.suspend)
    await to_thread(control.update, 1, oldest_viable=0)
    await to_thread(control.resume)
    after = await run.turn()
    assert after.version_spans == [(0, 1)] and after.token_ids != before.token_ids
    expected = teacher_forced(load(models[1]), prompt(8), after.token_ids, 1.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-4)
    status = await to_thread(control.status)
    assert (status.serving, status.prefetched, status.suspended, status.engine["swaps"]) == (1, None, False, 2)


async def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_go_on(start, store, models, tmp_path):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    assert (await run.turn()).version_spans == [(0, 0)]
    (tmp_path / "state" / "model").mkdir(parents=True)
    (tmp_path / "state" / "model" / "notes.txt").write_text("no weights")
    trainer.publish(tmp_path / "state" / "model")
    with pytest.raises(ControlRefused, match=r"WeightMismatch: .*no \*\.safetensors"):
        await to_thread(run.control(trainer.fence).update, 1, 1)
    assert (await run.turn()).version_spans == [(0, 0)]


async def test_suspend_holds_old_and_new_requests_and_resume_lets_both_go_on(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    control = run.control(trainer.fence)
    flying = run.turn("a", sampling=LONG)
    await run.until(lambda: run.proxy._flights and run.proxy.engine._loop.slots.running)
    await to_thread(control.suspend)
    late = run.turn("b")
    await run.until(lambda: len(run.proxy._flights) == 2)
    tokens = (await to_thread(control.status)).engine["tokens_generated"]
    status = await to_thread(control.status)
    assert status.suspended and status.engine["tokens_generated"] == tokens and not flying.done() and not late.done()
    await to_thread(control.suspend)
    await to_thread(control.resume)
    assert len((await flying).token_ids) == 600 and len((await late).token_ids) == 6


async def test_what_is_too_old_is_refused_and_ended_but_not_in_evaluation(start, store, models):
    trainer = Trainer(store, make_config())
    for model in models:
        trainer.publish(model)
    run = await start()
    assert (await run.turn("ok", start_version=1)).version_spans == [(0, 2)]
    with pytest.raises(StaleTrajectory, match="started under version 0; 1 is the oldest"):
        await run.turn("old")
    assert (await run.turn("old", evaluation=True)).version_spans == [(0, 2)]
    control = run.control(trainer.fence)
    flying = {v: run.turn(f"f{v}", sampling=LONG, start_version=v) for v in (1, 2)}
    evaluated = run.turn("e", sampling=LONG, evaluation=True)
    await run.until(lambda: len(run.proxy.engine._loop.slots.running) == 3)
    await to_thread(control.suspend)
    waiting = run.turn("w", start_version=1)
    await run.until(lambda: len(run.proxy._flights) == 4)
    trainer.publish(models[0])
    await to_thread(control.update, 3, oldest_viable=2)
    for ended in (flying[1], waiting):
        with pytest.raises(StaleTrajectory):
            await ended
    await to_thread(control.resume)
    for kept in (flying[2], evaluated):
        assert [v for _, v in (await kept).version_spans] == [2, 3]
    assert run.proxy.engine._loop.slots.running == []


async def test_cancel_ends_the_generation_and_refuses_the_next_turn_but_not_a_new_episode(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn("other")
    flying = run.turn("a/b c", sampling=LONG)
    await run.until(lambda: run.proxy._flights and run.proxy.engine._loop.slots.running)
    await run.client.abort("a/b c")
    with pytest.raises(TrajectoryCancelled):
        await flying
    await run.until(lambda: not run.proxy.engine._loop.slots.running)
    with pytest.raises(TrajectoryCancelled):
        await run.turn("a/b c", [*prompt(8), 1, 2])
    assert len((await run.turn("a/b c")).token_ids) == 6
    await run.client.abort("never seen")
    assert len((await run.turn("never seen")).token_ids) == 6
    await to_thread(ControlClient(run.url, 5).abort, "other")
    with pytest.raises(TrajectoryCancelled):
        await run.turn("other", [*prompt(8), 1])


async def test_an_older_fence_changes_nothing(start, store, models):
    config = make_config()
    old = Trainer(store, config, "old")
    old.publish(models[0])
    run = await start()
    await run.turn()
    new = Trainer(store, config, "new")
    zombie, control = run.control(old.fence), run.control(new.fence)
    with pytest.raises(Fenced):  # the log alone tells: the new trainer has not called yet
        await to_thread(zombie.suspend)
    await to_thread(control.suspend)
    for call in (zombie.suspend, zombie.resume, lambda: zombie.update(0, 0), lambda: zombie.prefetch(0)):
        with pytest.raises(Fenced, match=f"fence {old.fence} is older than {new.fence}"):
            await to_thread(call)
    assert (await to_thread(control.status)).suspended
    await to_thread(control.resume)
    with pytest.raises(Fenced, match="needs a fence"):
        ControlClient(run.url, 1).suspend()


async def test_a_fence_that_the_log_does_not_name_is_refused_and_forgotten(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    invented = trainer.fence + 1000
    liar, control = run.control(invented), run.control(trainer.fence)
    for call in (liar.suspend, lambda: liar.update(0, 0), lambda: liar.prefetch(0)):
        with pytest.raises(ControlRefused, match=f"unknown_fence: fence {invented} is not in the commit log"):
            await to_thread(call)
    await to_thread(liar.resume)  # never needs the log, and never stores
    assert (await to_thread(control.status)).fence == trainer.fence
    await to_thread(control.suspend)
    await to_thread(control.resume)
    successor = Trainer(store, make_config(), "successor")  # the log is asked again each time
    await to_thread(run.control(successor.fence).suspend)
    with pytest.raises(Fenced):
        await to_thread(control.resume)
    await to_thread(run.control(successor.fence).resume)


@pytest.mark.parametrize("path", ["generate", "trajectories/t/abort", "control/suspend", "control/resume"])
async def test_a_web_page_can_not_send_a_call(start, store, models, path):
    """What a form or a `no-cors` fetch can send without asking."""
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    body = orjson.dumps({"fence": trainer.fence})
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session:
        for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            headers = {} if kind is None else {"Content-Type": kind}
            async with session.post(f"{run.url}/{path}", data=body, headers=headers) as reply:
                answer = await reply.json()
                assert (reply.status, answer["error"]) == (415, "unsupported_media_type")
                assert "application/json" in answer["detail"]
        async with session.options(f"{run.url}/{path}") as reply:
            assert "Access-Control-Allow-Origin" not in reply.headers
    assert not (await to_thread(run.control(0).status)).suspended


async def test_the_watchdog_ends_a_suspension_whose_trainer_died(start, store, models):
    config = make_config(deadlines={"control": 0.3})
    trainer = Trainer(store, config)
    trainer.publish(models[0])
    run = await start(config)
    await run.turn()
    await to_thread(run.control(trainer.fence).suspend)
    assert len((await run.turn()).token_ids) == 6
    assert not (await to_thread(run.control(0).status)).suspended
    async with aiohttp.ClientSession() as session, session.get(run.url + "/metrics") as reply:
        text = await reply.text()
    assert "rollmill_proxy_watchdog_resumes_total 1.0" in text


async def test_a_store_that_is_down_can_not_prolong_a_suspension(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    control = run.control(trainer.fence)
    await to_thread(control.suspend)
    store.broken = StoreUnavailable("the store is down")
    with pytest.raises(ProxyUnavailable, match="the store is down"):
        await to_thread(control.update, 0, 0)
    await to_thread(control.resume)
    assert len((await run.turn()).token_ids) == 6


async def test_a_client_that_goes_away_frees_its_place(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    flying = [run.turn(f"f{i}", sampling=LONG) for i in range(4)]
    await run.until(lambda: len(run.proxy.engine._loop.slots.running) == 4)
    for call in flying:
        call.cancel()
    await run.until(lambda: not run.proxy.engine._loop.slots.running and not run.proxy._flights)
    assert (await to_thread(run.control(0).status)).engine["tokens_generated"] < 4 * 600


async def test_a_request_that_is_sent_again_replaces_the_first(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    first = run.turn("a", sampling=LONG)
    await run.until(lambda: run.proxy._flights and run.proxy.engine._loop.slots.running)
    second = await run.turn("a")
    assert len(second.token_ids) == 6
    with pytest.raises(TrajectoryCancelled, match="sent again"):
        await first


async def test_bad_requests_name_their_field(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    good = {
        "trajectory": "t",
        "request": "r",
        "tenant": "",
        "token_ids": [1],
        "temperature": 1.0,
        "max_new_tokens": 2,
        "start_version": 0,
    }
    async with aiohttp.ClientSession() as session:
        for change, field in [
            ({"token_ids": []}, "token_ids"),
            ({"token_ids": [1, "2"]}, "token_ids.1"),
            ({"temperature": 0}, "temperature"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"surprise": 1}, "surprise"),
        ]:
            async with session.post(run.url + "/generate", json=good | change) as reply:
                answer = await reply.json()
                assert (reply.status, answer["error"], answer["field"]) == (422, "bad_request", field)
        async with session.post(run.url + "/generate", data=b"{", headers=JSON) as reply:
            assert reply.status == 422 and "not JSON" in (await reply.json())["detail"]
    with pytest.raises(RequestRefused, match="unknown_policy"):
        await run.turn(tenant="somebody")
    with pytest.raises(RequestRefused, match="prompt_too_long"):
        await run.turn(tokens=[1] * 640)
    with pytest.raises(RequestRefused, match="vocabulary"):
        await run.turn(tokens=[10**9])


async def test_metrics_and_health(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()
    with pytest.raises(RequestRefused):
        await run.turn(tenant="somebody")
    async with aiohttp.ClientSession() as session:
        async with session.get(run.url + "/metrics") as reply:
            text = await reply.text()
        async with session.get(run.url + "/healthz") as reply:
            assert (reply.status, await reply.json()) == (200, {"healthy": True})
    assert 'rollmill_proxy_latency_seconds_count{domain="",tenant=""} 1.0' in text
    for line in [
        'rollmill_proxy_requests_total{domain="",tenant=""} 1.0',
        'rollmill_proxy_tokens_total{domain="",tenant=""} 6.0',
        'rollmill_proxy_refusals_total{domain="",reason="unknown_policy",tenant="somebody"} 1.0',
        "rollmill_proxy_serving_version 0.0",
        "rollmill_proxy_swap_seconds_count 1.0",
        'rollmill_proxy_in_flight{domain="",tenant=""} 0.0',
    ]:
        assert line in text.splitlines()


async def test_the_first_version_may_come_after_the_proxy(start, store, models):
    config = make_config()
    run = await start(config)
    with pytest.raises(ProxyUnavailable, match="no version is loaded yet"):
        await run.turn(deadline_s=0.6)
    waiting = run.turn()
    Trainer(store, config).publish(models[0])
    assert (await waiting).version_spans == [(0, 0)]


async def test_a_proxy_that_starts_again_serves_the_head_and_clients_come_back(start, store, models):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    first = await start()
    await first.turn()
    first.stop.set()
    await first.task
    with pytest.raises(ProxyUnavailable, match=r"was not available for 0\.3 s"):
        await first.turn(deadline_s=0.3)
    with pytest.raises(ProxyUnavailable, match="can not be reached"):
        await to_thread(first.control(trainer.fence).suspend)
    trainer.publish(models[1])
    second = await start()
    assert (await second.turn()).version_spans == [(0, 1)]


async def test_a_dead_engine_ends_the_proxy_by_name(start, store, models, monkeypatch):
    trainer = Trainer(store, make_config())
    trainer.publish(models[0])
    run = await start()
    await run.turn()

    def explode(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(run.proxy.engine._loop, "_decode", explode)
    with pytest.raises(ProxyUnavailable, match=r"boom|Connect|Disconnected"):
        await run.turn(deadline_s=1.0)
    with pytest.raises(Exception, match="ZeroDivisionError: boom"):
        await run.task


async def test_deadlines_of_the_clients(unused_tcp_port_factory=None):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = ProxyClient(url)
    async with server:
        with pytest.raises(GenerationTimeout, match=r"within 0\.2 s"):
            await client.generate(
                trajectory="t", request="r", tenant=BASE, token_ids=[1], sampling=LONG, start_version=0, deadline_s=0.2
            )
        with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
            await to_thread(ControlClient(url, 0.2).status)
        await client.close()


async def test_a_run_that_trains_an_adapter(start, store, models, tmp_path):
    config = make_config(model={"source": {"type": "pretrained", "path": "x"}, "lora": {"rank": 4}})
    trainer = Trainer(store, config)
    adapters = [save_adapter(tmp_path / f"s{seed}" / "model", models[0], seed) for seed in range(2)]
    trainer.publish(adapters[0])
    run = await start(config)
    first = await run.turn(tenant="default.test")
    trainer.publish(adapters[1])
    await to_thread(run.control(trainer.fence).update, 1, 0)
    second = await run.turn(tenant="default.test")
    assert (first.version_spans, second.version_spans) == ([(0, 0)], [(0, 1)])
    for adapter, result in zip(adapters, (first, second), strict=True):
        expected = teacher_forced(load(models[0], adapter), prompt(8), result.token_ids, 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    with pytest.raises(RequestRefused, match="unknown_policy"):
        await run.turn(tenant=BASE)


def test_reading_ahead_has_the_time_to_read(monkeypatch):
    client, given = ControlClient("http://127.0.0.1:9", 1.0, fence=1, load_s=5.0), {}

    def request(method: str, path: str, content: bytes, timeout: float) -> httpx.Response:
        given[path] = timeout
        return httpx.Response(200, content=b"{}")

    monkeypatch.setattr(client._http, "request", request)
    client.prefetch(1)
    client.update(1, oldest_viable=0)
    assert given == {"/control/prefetch": 5.0, "/control/update": 1.0}
