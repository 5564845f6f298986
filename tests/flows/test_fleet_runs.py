"""Whole runs with engines in processes of their own, on several hardware classes."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.flows.conftest import Rollmill
from tests.flows.test_runs import audit, descendants, find, head, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full]

POOLS = "pools={type: local, cpu: 64, lambda: 8, compute_gpu: 2, bandwidth_gpu: 2}"


def test_a_run_on_two_classes_outlives_an_engine_and_can_be_profiled(rollmill: Rollmill):
    name = "fleet"
    sets = (POOLS, "engine.instances={compute_gpu: 1, bandwidth_gpu: 1}", "training.steps=4", "restarts.engine=1")
    process = rollmill.start(*rollmill.train_arguments(name, *sets))
    try:
        wait_until(lambda: head(rollmill, name) >= 1, "version 1")
        hosts = [p for p in descendants(process) if "infra.engines.process" in " ".join(p.cmdline())]
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


@pytest.mark.timeout(1600)
def test_a_run_on_vllm_with_prompts_and_answers_on_two_servers(rollmill: Rollmill):
    name = "vllm"
    engine = (
        "engine={type: vllm, instances: {compute_gpu: 1, bandwidth_gpu: 1}, max_batch: 16, "
        "disaggregation: {min_prompt: 16}}"
    )
    arguments = rollmill.train_arguments(name, POOLS, engine, "training.steps=2")
    at = arguments.index("engine.max_batch=32")
    code, output = rollmill(*arguments[: at - 1], *arguments[at + 1 :], timeout=1500)
    assert code == 0, output
    audit(rollmill, name, 2)
