"""Prompts computed by one vLLM server and answered by another, behind one fleet."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from infra.engines.protocol import BASE, Sampling
from infra.engines.vllm import VLLMEngine
from infra.engines.vllm_server import VLLMServer
from infra.proxy.fleet import Fleet, Origin
from infra.proxy.members import Facts
from infra.services.processes import free_port
from rl.placement import HardwareClass, Placement
from rl.routing import Router, Split
from tests.engines.tiny_models import load, prompt, save_model, teacher_forced

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PREFILL, DECODE = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[HardwareClass, VLLMServer]]]:
    home = tmp_path_factory.mktemp("split")
    model, taken = save_model(home / "model"), set[int]()
    with ExitStack() as stack:
        started = {
            where: stack.enter_context(
                VLLMServer(
                    model,
                    home=home / where.value,
                    port=free_port(taken),
                    key=secrets.token_urlsafe(16),
                    max_num_seqs=8,
                    kv_role="kv_both",
                    side_port=free_port(taken),
                )
            )
            for where in (PREFILL, DECODE)
        }
        for server in started.values():
            server.wait_ready()
        yield model, started


async def test_a_split_turn_is_that_of_one_engine_and_outlives_its_peer(servers):
    model, started = servers
    router = Router(Placement({}, DECODE), prefill_heavy=32.0, split=Split(PREFILL, DECODE, 40))
    fleet = Fleet(router, control_s=60.0, max_waiting=100, lease_s=3600.0)  # they do not report
    await fleet.update_weights(0, model)
    try:
        for where, server in started.items():
            engine = VLLMEngine(server.url, server.key, model_dir=model, staging=server.log.parent.parent / "staging")
            await engine.start()
            facts = Facts(where.value, "1", where, 8, (await engine.stats())["kv_capacity"])
            assert facts.capacity > 1000
            fleet.members.add(facts, engine)
        async with asyncio.timeout(60):
            while len(fleet.members.serving) < 2:
                await asyncio.sleep(0.05)

        async def turn(name: str, may_split: bool, new: int = 24):
            sampling = Sampling(0.7, new, (), 11)
            return await fleet.generate(prompt(96), sampling, BASE, name, Origin(name, "d", may_split))

        async def prefilled() -> dict[str, int]:
            return {e["name"]: e["tokens_prefilled"] for e in (await fleet.stats())["engines"] if "requests" in e}

        before = await prefilled()
        split = await turn("split", True)
        after = await prefilled()
        assert after[PREFILL.value] - before[PREFILL.value] >= 90, "the prompt was computed there"
        whole = await turn("whole", False)
        assert split.token_ids == whole.token_ids and split.version_spans == [(0, 0)]
        np.testing.assert_allclose(split.logprobs, whole.logprobs, atol=1e-4)
        expected = teacher_forced(load(model), prompt(96), split.token_ids, 0.7)
        np.testing.assert_allclose(split.logprobs, expected, atol=1e-4)

        def told(name: str) -> bool:
            return any((s := m.engine.so_far(name)) and s.token_ids for m in fleet.members.serving)

        flying = [asyncio.ensure_future(turn(f"long{n}", True, 400)) for n in range(3)]
        async with asyncio.timeout(120):
            while not all(told(f"long{n}") for n in range(3)):
                await asyncio.sleep(0.01)
        leader = started[DECODE].pid
        for process in [*psutil.Process(leader).children(recursive=True), psutil.Process(leader)]:
            os.kill(process.pid, signal.SIGKILL)
        results = await asyncio.gather(*flying)
        assert [m.facts.hardware for m in fleet.members.serving] == [PREFILL]
        for result in results:
            assert len(result.token_ids) == 400
            expected = teacher_forced(load(model), prompt(96), result.token_ids, 0.7)
            np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)
        assert len((await turn("after", True)).token_ids) == 24
    finally:
        await fleet.close()
