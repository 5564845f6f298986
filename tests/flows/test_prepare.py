"""What a resumed run may change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flows.prepare import RunExists, _join
from rl.config import upgrades
from rl.config.load import dumps, validate
from rl.errors import ConfigError, ConfigTooNew

TREE = {
    "name": "run",
    "model": {"warmstart": {}},
    "domains": [{"name": "lake", "environment": "frozen_lake"}, {"name": "math", "environment": "calculator"}],
}


def test_where_a_run_runs_may_change_and_what_it_is_may_not() -> None:
    began = dumps(validate(TREE, "run.yaml"))
    moved = TREE | {"domains": [TREE["domains"][0] | {"runs_on": "compute_gpu"}, TREE["domains"][1]]}
    moved |= {"engine": {"type": "vllm", "instances": {"bandwidth_gpu": 1}}}
    _join(validate(moved, "run.yaml"), began, resume=True)
    heavier = TREE | {"domains": [TREE["domains"][0], TREE["domains"][1] | {"weight": 2}]}
    with pytest.raises(ConfigError, match=r"other values of domains\.1\.weight;"):
        _join(validate(heavier, "run.yaml"), began, resume=True)
    with pytest.raises(ConfigError, match=r"other values of domains;"):
        _join(validate(TREE | {"domains": TREE["domains"][:1]}, "run.yaml"), began, resume=True)
    with pytest.raises(RunExists):
        _join(validate(TREE, "run.yaml"), began, resume=False)


def test_a_run_that_began_before_a_field_was_there_can_be_resumed() -> None:
    began = json.loads(dumps(validate(TREE, "run.yaml")))
    del began["format"], began["domains"][0]["runs_on"], began["engine"]["routing"]
    del began["training"]["max_flat_groups"]
    _join(validate(TREE, "run.yaml"), json.dumps(began), resume=True)


def test_a_run_that_began_before_a_field_was_moved_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stale_attempts` stands for what was `staleness.attempts` in the release before, and `seeds` before that."""

    def renamed(tree: dict[str, Any]) -> dict[str, Any]:
        return {("seed" if name == "seeds" else name): value for name, value in tree.items()}

    def moved(tree: dict[str, Any]) -> dict[str, Any]:
        staleness = dict(tree["staleness"])
        rollout = tree["rollout"] | {"stale_attempts": staleness.pop("attempts")}
        return tree | {"staleness": staleness, "rollout": rollout}

    began = json.loads(dumps(validate(TREE | {"rollout": {"stale_attempts": 5}}, "run.yaml")))
    began["staleness"]["attempts"] = began["rollout"].pop("stale_attempts")
    second = began | {"format": 2}
    began["seeds"] = began.pop("seed")
    monkeypatch.setattr(upgrades, "FORMAT", 3)
    monkeypatch.setattr(upgrades, "UPGRADES", {1: renamed, 2: moved})
    same = validate(TREE | {"rollout": {"stale_attempts": 5}}, "run.yaml")
    for stored in (began, second, json.loads(dumps(same))):
        _join(same, json.dumps(stored), resume=True)
    other = validate(TREE | {"rollout": {"stale_attempts": 6}, "seed": 4}, "run.yaml")
    with pytest.raises(ConfigError, match=r"other values of rollout\.stale_attempts, seed;"):
        _join(other, json.dumps(began), resume=True)


def test_a_run_of_a_newer_rollmill_is_refused_by_name() -> None:
    config = validate(TREE, "run.yaml")
    began = json.loads(dumps(config))
    with pytest.raises(ConfigTooNew, match=r"the run's configuration is of format 2, this Rollmill reads up to 1"):
        _join(config, json.dumps(began | {"format": 2}), resume=True)
    began["training"]["new"] = 1
    with pytest.raises(ConfigTooNew, match=r"does not know: training\.new; a newer one wrote it"):
        _join(config, json.dumps(began), resume=True)
