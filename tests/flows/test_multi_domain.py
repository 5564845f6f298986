"""A run that trains two domains at once and is evaluated on the way."""

from __future__ import annotations

import json
import signal
import time

import pytest

from flows.evaluations import load_all
from infra.store.buffer import SampleBuffer
from tests.command_line import Rollmill
from tests.flows.test_runs import audit, find, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

LAKES = (
    "domains=[{name: small, environment: frozen_lake, max_turns: 6, weight: 2, environment_options: {size: 3}},"
    "{name: slippery, environment: frozen_lake, max_turns: 8, "
    "reward: [{name: outcome}, {name: length, weight: 0.1, options: {free: 4, limit: 64}}],"
    "environment_options: {slip: 0.2}}]"
)


def test_two_domains_are_trained_by_weight_and_no_evaluation_is_left_out(rollmill: Rollmill) -> None:
    sets = (
        LAKES,
        "training.steps=6",
        "training.dynamic_sampling=false",
        "evaluation.every=1",
        "pools={type: local, bandwidth_gpu: 2, cpu: 64, lambda: 8}",
        "retention={newest: 1, grace: 0, collect_every: 1}",
    )
    process = rollmill.start(*rollmill.train_arguments("lakes", *sets))
    try:
        wait_until(lambda: find(process, "flows.evaluator"), "the evaluator")
        wait_until(lambda: rollmill.run_dir("lakes").exists() and evaluated(rollmill), "an evaluation on the way")
        evaluator = find(process, "flows.evaluator")
        assert evaluator is not None
        evaluator.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, output
    audit(rollmill, "lakes", 6)
    config, log = rollmill.config("lakes"), rollmill.log("lakes")
    found = {(e.version, e.domain) for e in load_all(config, log.store)}
    assert found == {(v, d) for v in range(7) for d in ("small", "slippery")}
    trained = [g for g in SampleBuffer(log.store, config.prefix).history(1000) if g.tombstone is None]
    domains = [config.stream.problem(g.uid.ordinal).domain for g in trained]
    assert set(domains) == {"small", "slippery"}
    by_domain = {
        d: {k for g in trained for m in g.members if m.problem.domain == d for k in m.rewards} for d in domains
    }
    assert by_domain["small"] == {"outcome"} and len(by_domain["slippery"]) == 2, by_domain
    report = json.loads((rollmill.run_dir("lakes") / "report.json").read_text())
    assert {"heldout_reward_before", "heldout_reward_after"} <= {f["name"] for f in report["figures"]}


def evaluated(rollmill: Rollmill) -> bool:
    if not list(rollmill.run_dir("lakes").glob("config-*.json")):
        time.sleep(0.1)
        return False
    config, log = rollmill.config("lakes"), rollmill.log("lakes")
    return any(e.version > 0 for e in load_all(config, log.store))
