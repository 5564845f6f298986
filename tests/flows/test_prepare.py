"""What a resumed run may change."""

from __future__ import annotations

import json

import pytest

from flows.prepare import RunExists, _join
from rl.config.load import dumps, validate
from rl.errors import ConfigError

TREE = {
    "name": "run",
    "model": {"warmstart": {}},
    "domains": [{"name": "lake", "environment": "frozen_lake"}, {"name": "math", "environment": "calculator"}],
}


def test_where_a_run_runs_may_change_and_what_it_is_may_not() -> None:
    began = json.loads(dumps(validate(TREE, "run.yaml")))
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
    del began["domains"][0]["runs_on"], began["engine"]["routing"], began["training"]["max_flat_groups"]
    _join(validate(TREE, "run.yaml"), began, resume=True)
