"""`rollmill simulate` on what a run left in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flows.conftest import Desk
from tests.store.samples import group

PLAN = """
scenario:
  domains: [{name: replaced, turns: [1, 1]}]
  pools: [{hardware: H800, gpus: 2, hardware_class: compute_gpu}]
  trainer: {gpus: 2}
  groups_per_step: 2
  group_size: 2
  steps: 4
search: {alphas: [2], spares: [1], rounds: 1, move_gpus: false}
"""


@pytest.mark.slow
def test_a_plan_is_made_with_the_measured_work_of_a_run(desk: Desk, tmp_path: Path) -> None:
    desk.run.steps(3)
    desk.run.buffer.seal([group(9, version=2, rewards=(1.0, 1.0))], "g0000000009", 0)
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    said = desk.good("simulate", str(path), "--directory", str(tmp_path / "out"), "--from-run", "frozen_lake")
    assert "groups measured" in said and "best: " in said
    plans = json.loads((tmp_path / "out" / "plan.json").read_text())["plans"]
    domains = {d["name"] for plan in plans for d in plan["scenario"]["domains"]}
    assert domains == {group(9, version=2).problem.domain}
    assert {(p["scenario"]["alpha"], p["scenario"]["redundancy"]["extra_members"]) for p in plans} >= {
        (1, 0), (2, 0), (1, 1),
    }  # fmt: skip
    assert [p["cost"] for p in plans] == sorted(p["cost"] for p in plans)
    assert sum(p["given"] for p in plans) == 1


def test_a_run_without_trajectories_is_a_clear_error(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    said = desk.bad("simulate", str(path), "--directory", str(tmp_path / "out"), "--from-run", "frozen_lake")
    assert "no trajectories" in said
