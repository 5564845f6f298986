"""Whatever can die dies at once, in every mixture: the run goes on and its books are right."""

from __future__ import annotations

import math
import os
import signal
from statistics import fmean, stdev

import psutil
import pytest
from distributed import Client

from rl.records import Step
from tests.command_line import Rollmill
from tests.compute.clusters import foreign_cluster
from tests.flows.test_runs import audit, find, head, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1200)]

PROCESSES = {"rollout": "flows.rollout", "trainer": "infra.training.main", "learn": "flows.learn"}
WORKERS = {"engine": "bandwidth_gpu", "environments": "cpu", "rewards": "lambda"}
SETS = ("training.steps=8", "training.dynamic_sampling=false", "evaluation.problems=32")


def pids(process, wanted: set[str]) -> list[int]:
    """Of the parts that are called so, all of them."""
    rollout = find(process, "flows.rollout")
    assert rollout is not None
    (scheduler,) = [part for part in rollout.cmdline() if part.startswith("tcp://")]
    with Client(scheduler, set_as_default=False) as client:
        found = client.run(os.getpid)
        carries = {a: set(w["resources"]) for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
    workers = [
        pid for address, pid in found.items() if carries[address] & {WORKERS[w] for w in wanted & WORKERS.keys()}
    ]
    parts = [find(process, PROCESSES[name]) for name in wanted & PROCESSES.keys()]
    assert len(workers) == len(wanted & WORKERS.keys()) and None not in parts
    return [*workers, *(part.pid for part in parts if part is not None)]


def rewards(steps: list[Step]) -> list[float]:
    return [s.metrics["reward"] for s in steps[1:]]


def apart(one: list[float], other: list[float]) -> float:
    """In standard errors of the difference, by the spread over the steps."""
    return abs(fmean(one) - fmean(other)) / math.hypot(*(stdev(x) / math.sqrt(len(x)) for x in (one, other)))


@pytest.fixture(scope="module")
def undisturbed(rollmill: Rollmill) -> list[float]:
    code, output = rollmill.train("undisturbed-8", *SETS)
    assert code == 0, output
    return rewards(audit(rollmill, "undisturbed-8", 8))


@pytest.mark.parametrize(
    "wanted",
    [
        {"environments"},
        {"rewards"},
        {"rollout", "trainer"},
        {"engine", "environments", "rewards"},
        {"rollout", "trainer", "learn", "engine", "environments", "rewards"},
    ],
    ids=lambda wanted: "+".join(sorted(wanted)),
)
def test_the_run_ends_well(rollmill: Rollmill, undisturbed: list[float], wanted: set[str]) -> None:
    name = "kill-" + "-".join(sorted(wanted))
    process = rollmill.start(*rollmill.train_arguments(name, *SETS))
    try:
        wait_until(lambda: head(rollmill, name) >= 1, "version 1")
        for pid in pids(process, wanted):
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, output
    steps = audit(rollmill, name, 8)
    assert not [reason for reason in rollmill.log(name).ledger.dropped_groups if reason == "score_error"]
    assert apart(rewards(steps), undisturbed) < 4, "no failure became a reward"


def test_without_its_scheduler_the_run_ends_by_name_and_resumes(rollmill: Rollmill) -> None:
    """The scheduler of embedded pools lives in the run's own process; one of a cluster is somebody else's."""
    with foreign_cluster({"compute_gpu": 1, "bandwidth_gpu": 1, "cpu": 64, "lambda": 8}) as foreign:
        pools = f"pools={{type: scheduler, address: '{foreign.address}'}}"
        process = rollmill.start(*rollmill.train_arguments("no-scheduler", *SETS, pools))
        try:
            wait_until(lambda: head(rollmill, "no-scheduler") >= 1, "version 1")
            started = psutil.Process(process.pid).children(recursive=True)
            foreign.kill()
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 2 and "scheduler" in output and "Traceback" not in output, output
        wait_until(lambda: not [p for p in started if p.is_running() and p.status() != "zombie"], "the end of all", 60)
    code, output = rollmill.train("no-scheduler", *SETS, resume=True)
    assert code == 0, output
    audit(rollmill, "no-scheduler", 8)
