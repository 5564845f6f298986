"""Prompts computed apart: work that nobody waits for ends, and what fails is computed where the answer is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.engines.errors import EngineClosed
from infra.engines.host import make_host
from infra.engines.protocol import BASE, Prefilled, Sampling
from infra.engines.remote import RemoteEngine
from infra.proxy.fleet import Fleet
from infra.proxy.listen import Server, bind, listen
from infra.proxy.members import Facts
from rl.errors import DeadlineExceeded, GenerationFailure
from rl.placement import HardwareClass, Placement
from rl.routing import Router, Split
from tests.proxy.stub_engine import StubEngine
from tests.proxy.test_tenants import until

PREFILL, DECODE = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU
KEY = "the key of these tests"
ONE = Sampling(1.0, 1, ())


class PrefillEngine(StubEngine):
    """`computing` is what it computes; nothing of that ends by itself once it is `slow`."""

    def __init__(self, slow: bool = False) -> None:
        super().__init__()
        self.computing: set[str] = set()
        self.slow = slow

    async def prefill(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Prefilled:
        await self._begin("prefill")
        self.computing.add(request_id)
        try:
            if self.slow:
                await asyncio.Event().wait()
            self._end("prefill")
            return Prefilled(self.serves[tenant], {})
        finally:
            self.computing.discard(request_id)


async def split(prefill: Any, decode: StubEngine) -> Fleet:
    router = Router(Placement({}, DECODE), prefill_heavy=32.0, split=Split(PREFILL, DECODE, 4))
    fleet = Fleet(router, control_s=20.0, max_waiting=9)
    await fleet.update_weights(0, Path())
    for where, engine in ((PREFILL, prefill), (DECODE, decode)):
        fleet.members.add(Facts(where.value, "1", where, 4, 5000), engine)  # type: ignore[arg-type]
    await until(lambda: len(fleet.members.serving) == 2)
    return fleet


@pytest.mark.parametrize("control_s", [20.0, 1.0], ids=["the turn was cancelled", "it took too long"])
async def test_a_prompt_that_nobody_waits_for_is_not_computed_on(control_s):
    async def fetch(tenant: str, version: int, directory: str) -> Path:
        return Path(directory)

    far = PrefillEngine(slow=True)
    listener = bind("127.0.0.1", 0)
    listen(listener)
    server = Server(make_host(far, KEY, fetch))  # type: ignore[arg-type]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    remote = RemoteEngine(url, KEY, Fleet.capabilities, control_s)
    fleet = await split(remote, StubEngine())
    try:
        turn = asyncio.ensure_future(fleet.generate([1] * 9, ONE, BASE, "r"))
        await until(lambda: "prefill" in far.calls)
        if control_s > 10:
            turn.cancel()
            await asyncio.wait([turn])
        else:
            assert (await turn).token_ids == [1]
        await until(lambda: not far.computing)
    finally:
        await fleet.close()
        server.should_exit = True
        await task


@pytest.mark.parametrize("failure", [DeadlineExceeded("late"), GenerationFailure("an update came between")])
async def test_a_prompt_that_could_not_be_computed_apart_is_computed_where_the_answer_is(failure):
    far, near = PrefillEngine(), StubEngine()
    far.fails = {"prefill": [failure]}
    fleet = await split(far, near)
    assert (await fleet.generate([1] * 9, ONE, BASE, "r")).version_spans == [(0, 0)]
    assert far.calls.count("prefill") == near.calls.count("generate") == 1 and len(fleet.members.serving) == 2
    assert fleet.router.running(PREFILL.value) == fleet.router.running(DECODE.value) == 0
    far.fails = {"prefill": [EngineClosed("gone")]}
    assert (await fleet.generate([1] * 9, ONE, BASE, "r2")).version_spans == [(0, 0)]
    assert [m.facts.hardware for m in fleet.members.serving] == [DECODE]
    await fleet.close()
