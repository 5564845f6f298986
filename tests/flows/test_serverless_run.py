"""A whole run whose rewards are functions: every one comes through `lambda.invoke`, and being throttled costs time and
nothing else."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.command_line import Rollmill
from tests.flows.test_runs import audit, interrupted, kill_those_that_say

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

REWARD = '''
from rl.serverless import serverless

@serverless("walked", memory_mb=300)
def walked(view):
    """More than 0 for every trajectory that was scored."""
    print("scored", view.problem.split, view.problem.ordinal)
    return {"came": 1.0, "arrived": view.environment_reward}
'''


@pytest.fixture
def with_package(rollmill: Rollmill, tmp_path: Path) -> Rollmill:
    """The command line in an environment that has the user's package of rewards."""
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text(REWARD)
    return dataclasses.replace(rollmill, env=rollmill.env | {"PYTHONPATH": str(tmp_path)})


def test_a_run_is_scored_by_functions_and_throttling_is_never_a_reward_of_0(
    with_package: Rollmill, tmp_path: Path
) -> None:
    code, output = with_package.train(
        "functions",
        "training.steps=2",
        "domains.0.reward=my_rewards:walked",
        "serverless={type: local, concurrency: 1}",
        "training.dynamic_sampling=false",
    )
    assert code == 0, output
    assert not [reason for reason in with_package.log("functions").ledger.dropped_groups if "reward" in reason]

    (log,) = with_package.home.rglob("functions/logs/walked.log")
    told = log.read_text()
    assert told.count("scored train") + told.count("scored heldout") == told.count("REPORT RequestId")

    rows = tmp_path / "rows.parquet"
    code, output = with_package("samples", "export", "frozen_lake", "--set", "name=functions", "--to", str(rows))
    assert code == 0, output
    table = pq.read_table(rows).to_pylist()
    assert 32 <= len(table) <= told.count("scored train")
    for row in table:
        parts = {part["name"]: part["value"] for part in row["rewards"]}
        assert parts == {"came": 1.0, "arrived": row["environment_reward"]} and row["reward"] >= 1.0
    scores = [(span["start"], span["end"]) for row in table for span in row["spans"] if span["stage"] == "score"]
    overlaps = sum(a[0] < b[1] and b[0] < a[1] for a, b in combinations(scores, 2))
    assert overlaps > 0, "with one function at a time, who was scored at once with another was throttled"


def test_a_run_outlives_its_reward_endpoint(with_package: Rollmill) -> None:
    name, steps = "endpoint-dies", 4
    sets = ("domains.0.reward=my_rewards:walked", "serverless={type: local}", "training.dynamic_sampling=false")
    arguments = with_package.train_arguments(name, f"training.steps={steps}", *sets)
    interrupted(with_package, name, arguments, kill_those_that_say("infra.serverless.local"))
    taken = audit(with_package, name, steps)
    assert all(step.metrics["reward"] >= 1.0 for step in taken[1:]), "a lost reward was counted as 0"
