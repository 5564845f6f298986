"""The process of a vLLM server: its key, its death, its next life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import numpy as np
import psutil
import pytest

from infra.compute.lifeline import spawn
from infra.engines.errors import EngineClosed, EngineDidNotStart
from infra.engines.protocol import BASE, Sampling
from infra.engines.vllm import VLLMEngine
from infra.services import processes
from tests.compute.test_lifeline import wait_until
from tests.engines.tiny_models import load, prompt, save_adapter, teacher_forced
from tests.engines.waiting import generated, until_generated

OWNER = """
import sys, time
from pathlib import Path
from infra.compute.lifeline import spawn
print(spawn(["infra.engines.vllm_child", sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1])).pid)
sys.stdout.flush()
time.sleep(60)
"""


def test_what_runs_as_a_child_is_gone_after_kill_9_of_its_starter(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "child.log")], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    leader = psutil.Process(int(owner.stdout.readline()))
    wait_until(leader.children)
    [server] = leader.children()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not server.is_running() and not processes.alive(leader))


def test_a_server_gets_its_threads_and_nothing_that_is_meant_for_our_own_clients(tmp_path):
    ask = "import os; print({k: os.environ.get(k) for k in ('OMP_NUM_THREADS', 'AWS_SECRET_ACCESS_KEY')})"
    given = {"OMP_NUM_THREADS": "3", "AWS_SECRET_ACCESS_KEY": "ours"}
    log = tmp_path / "child.log"
    child = spawn(["infra.engines.vllm_child", sys.executable, "-c", ask], log, given)
    assert child.wait(30) == 0 and log.read_text().strip() == "{'OMP_NUM_THREADS': '3', 'AWS_SECRET_ACCESS_KEY': None}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_key_a_server_answers_nothing_but_its_health(vllm_server):
    routes = ["/pause", "/resume", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter", "/v1/completions"]
    with httpx.Client(base_url=vllm_server.url, trust_env=False) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {vllm_server.key}"}):
            assert {client.post(route, headers=headers).status_code for route in routes} == {401}
            assert {client.get(route, headers=headers).status_code for route in ("/metrics", "/server_info")} == {401}
        assert client.get("/health").status_code == 200
    assert vllm_server.key not in " ".join(psutil.Process(vllm_server.pid).cmdline())
    assert vllm_server.key not in vllm_server.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_server_that_changed_hands_or_forgot_is_known_by_its_answer(vllm_server, base, tmp_path):
    def connect() -> VLLMEngine:
        return VLLMEngine(
            vllm_server.url,
            vllm_server.key,
            model_dir=base,
            staging=base.parent / "staging",
            max_adapters=1,
            max_rank=8,
            base_version=0,
        )

    first, second, third = connect(), connect(), connect()
    await first.start()
    await second.start()
    with pytest.raises(EngineClosed, match="another engine took it over") as info:
        await first.generate(prompt(5), Sampling(1.0, 4, ()), BASE, "a")
    assert info.value.partial is not None and info.value.partial.token_ids == [] and not await first.health()
    await third.start()
    await third.publish_adapter("ada", 1, save_adapter(tmp_path / "ada", base, seed=0))
    await third.generate(prompt(5), Sampling(1.0, 4, ()), "ada", "b")
    name, _, release = third._served.pin("ada")
    release()
    headers = {"Authorization": f"Bearer {vllm_server.key}"}
    async with httpx.AsyncClient(base_url=vllm_server.url, headers=headers, trust_env=False) as client:
        (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
    with pytest.raises(EngineClosed, match="it was restarted"):
        await third.generate(prompt(5), Sampling(1.0, 4, ()), "ada", "c")
    for engine in (first, second, third):
        await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_server_that_is_killed_leaves_what_its_requests_had_and_no_process(vllm_server, base):
    """The last test of this folder that needs the server, for the next one has to start it again."""
    engine = VLLMEngine(vllm_server.url, vllm_server.key, model_dir=base, staging=base.parent / "staging")
    await engine.start()
    await engine.update_weights(7, base)
    since = await generated(engine)
    flying = [asyncio.ensure_future(engine.generate(prompt(9), Sampling(0.7, 600, ()), BASE, "a")) for _ in range(3)]
    await until_generated(engine, 90, since)
    members = processes.family(vllm_server.log.parent, "vllm", None)
    assert len(members) >= 3 and {os.getpgid(process.pid) for process in members} == {vllm_server.pid}
    os.killpg(vllm_server.pid, signal.SIGKILL)
    for error in await asyncio.gather(*flying, return_exceptions=True):
        assert isinstance(error, EngineClosed) and error.partial is not None
        had = error.partial
        assert had.finish_reason == "abort" and 0 < len(had.token_ids) < 600 and had.version_spans == [(0, 7)]
        np.testing.assert_allclose(had.logprobs, teacher_forced(load(base), prompt(9), had.token_ids, 0.7), atol=1e-4)
    assert not await engine.health()
    with pytest.raises(EngineClosed, match="is gone"):
        await engine.pause()
    await engine.close()
    wait_until(lambda: not vllm_server.alive and not processes.family(vllm_server.log.parent, "vllm", None))
    with pytest.raises(EngineDidNotStart, match="ended before it answered"):
        vllm_server.wait_ready()
