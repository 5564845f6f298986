"""Whole runs with engines in processes of their own, on several hardware classes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.models.tiny import write_tiny
from infra.services.processes import free_port
from rl.config.model import TinySection
from tests.command_line import Rollmill
from tests.flows.test_runs import audit, descendants, find, head, interrupted, that_say, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full]

POOLS = "pools={type: local, cpu: 64, lambda: 8, compute_gpu: 2, bandwidth_gpu: 2}"


def test_a_run_on_two_classes_outlives_an_engine_and_can_be_profiled(rollmill: Rollmill):
    name = "fleet"
    sets = (POOLS, "engine.instances={compute_gpu: 1, bandwidth_gpu: 1}", "training.steps=4", "restarts.engine=1")
    process = rollmill.start(*rollmill.train_arguments(name, *sets))
    try:
        wait_until(lambda: head(rollmill, name) >= 1, "version 1")
        hosts = that_say(process, "infra.engines.process")
        assert len(hosts) == 2 and find(process, "infra.proxy.main") is not None
        for started in descendants(process):
            words = " ".join(started.cmdline())
            assert "ROLLMILL" not in words and "Bearer" not in words, "keys are in no argument list"
        os.kill(hosts[0].pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    audit(rollmill, name, 4)

    code, output = rollmill("profile", "frozen_lake", "--set", f"name={name}", "--json")
    assert code == 0, output
    (lake,) = json.loads(output[output.index("{") :])["domains"]
    assert lake["domain"] == "frozen_lake" and lake["trajectories"] > 0 and lake["sampled"] > 0
    assert lake["runs_on"] == "bandwidth_gpu"


@pytest.mark.timeout(900)
def test_an_engine_past_its_restarts_is_given_up_and_the_run_goes_on_with_the_other(rollmill: Rollmill):
    name = "fleet-of-one"
    sets = (POOLS, "engine.instances={compute_gpu: 1, bandwidth_gpu: 1}", "training.steps=4", "restarts.engine=0")
    left: list[psutil.Process] = []

    def strike(process: subprocess.Popen[str]) -> None:
        first, second = that_say(process, "infra.engines.process")
        first.kill()
        left.append(second)

    output = interrupted(rollmill, name, rollmill.train_arguments(name, *sets), strike)
    assert "is given up" in output and "the run goes on with 1 others" in output, output
    assert len(left) == 1 and not left[0].is_running()
    audit(rollmill, name, 4)


@pytest.mark.timeout(1600)
def test_a_run_on_vllm_with_prompts_and_answers_on_two_servers(rollmill: Rollmill):
    name = "vllm"
    engine = (
        "engine={type: vllm, instances: {compute_gpu: 1, bandwidth_gpu: 1}, max_batch: 16, "
        "disaggregation: {min_prompt: 16}}"
    )
    code, output = rollmill(*arguments(name, POOLS, engine, "training.steps=2"), timeout=1500)
    assert code == 0, output
    audit(rollmill, name, 2)


@pytest.mark.timeout(1600)
def test_a_run_of_adapters_on_a_server_that_somebody_else_runs(rollmill: Rollmill, tmp_path: Path):
    """Each version is another adapter there, and the run waits until the server is up."""
    write_tiny(TinySection(hidden_size=64, layers=2), 0, tmp_path / "model")
    model = f"model={{source: {{type: pretrained, path: {tmp_path / 'model'}}}, lora: {{rank: 8}}}}"
    name, port = "elsewhere", free_port(set())
    theirs = replace(rollmill, env=rollmill.env | {"ROLLMILL_VLLM_KEY": secrets.token_urlsafe(32)})
    engine = (
        "engine={type: vllm, instances: {bandwidth_gpu: 0}, max_batch: 16, max_adapters: 1, "
        f"external: [{{url: 'http://127.0.0.1:{port}'}}]}}"
    )
    sets = (engine, model, "training.dynamic_sampling=false", "training.steps=3", "evaluation.problems=4")
    chosen = arguments(name, *sets)
    server = theirs.start("engine", "serve", *chosen[1:], "--port", str(port))
    try:
        code, output = theirs(*chosen, timeout=1500)
        assert code == 0, output
        audit(rollmill, name, 3)
        log = (rollmill.home / "engines" / str(port) / "vllm.log").read_text()
        for version in range(3):
            assert f"Loaded new LoRA adapter: name 'default_elsewhere-v{version}-" in log
        assert server.poll() is None, "it is not the run's to end"
        started = descendants(server)
        assert any("vllm" in " ".join(process.cmdline()) for process in started)
        server.terminate()
        told, _ = server.communicate(timeout=60)
        assert f"serving at http://127.0.0.1:{port}" in told
        psutil.wait_procs(started, timeout=60)
        assert not [process for process in started if process.is_running()]
    finally:
        server.kill()


def arguments(name: str, *sets: str) -> list[str]:
    """Of a run whose sets say all of the engine."""
    found = Rollmill.train_arguments(name, *sets)
    at = found.index("engine.max_batch=32")
    return found[: at - 1] + found[at + 1 :]
