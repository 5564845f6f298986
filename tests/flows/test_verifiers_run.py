"""A whole run on an environment of the library verifiers, which plays and scores as it does for anybody."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from infra.store.buffer import SampleBuffer
from rl.records import Step
from tests.command_line import Rollmill
from tests.envs.adapters.libraries import python_of
from tests.envs.adapters.test_verifiers import LESSON
from tests.flows.test_runs import audit, interrupted, kill_those_that_say
from tests.proxy.agents.qwen import save_qwen

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

TASKSETS = Path(__file__).parents[1] / "envs" / "adapters" / "tasksets"


def lesson(rollmill: Rollmill, tmp_path: Path, name: str, steps: int) -> tuple[Rollmill, str]:
    """The command line, and the file of a run on the library's environment."""
    model = save_qwen(tmp_path / "model", [LESSON], steps=70)
    env = {"taskset": {"id": "number_tasks", "task": {}}, "player": {}}
    options = {"env": env, "python": python_of("verifiers")}
    config = {
        "name": name,
        "model": {"source": {"type": "pretrained", "path": str(model)}},
        "domains": [{"name": "numbers", "environment": "verifiers", "environment_options": options, "max_turns": 4}],
        "rollout": {"max_new_tokens": 16, "max_tokens": 512},
        "training": {
            "steps": steps,
            "groups_per_step": 2,
            "group_size": 4,
            "learning_rate": 1e-4,
            "dynamic_sampling": False,
        },
        "evaluation": {"problems": 0},
        "engine": {"max_batch": 16},
        "pools": {"type": "local", "cpu": 16, "lambda": 2},
        "deadlines": {"start": 600, "control": 600},
    }
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(config))
    return dataclasses.replace(rollmill, env=rollmill.env | {"PYTHONPATH": str(TASKSETS)}), str(file)


def test_a_librarys_environment_is_trained_on_as_it_is(rollmill: Rollmill, tmp_path: Path) -> None:
    found, file = lesson(rollmill, tmp_path, "verifiers", 2)
    code, output = found("train", file)
    assert code == 0, output
    log = rollmill.log("verifiers")
    steps = [record for record in log.records(1) if isinstance(record, Step)]
    assert [step.version for step in steps] == [0, 1, 2] and all(len(step.trained) == 2 for step in steps[1:])
    assert steps[1].metrics["fresh_gap_max"] < 1e-3, "the trainer sees other tokens than the engine did"
    trained = {uid for step in steps for uid in step.trained}
    groups = [
        group
        for group in SampleBuffer(log.store, rollmill.config("verifiers").prefix).history(100)
        if str(group.uid) in trained
    ]
    for member in (member for group in groups for member in group.members):
        member.check()
        assert member.reward == member.environment_reward and member.info["task"].startswith("number ")


def test_a_run_outlives_the_host_of_its_environments(rollmill: Rollmill, tmp_path: Path) -> None:
    name, steps = "host-dies", 4
    found, file = lesson(rollmill, tmp_path, name, steps)
    interrupted(found, name, ["train", file], kill_those_that_say("envs.adapters.hosted"))
    audit(rollmill, name, steps)
