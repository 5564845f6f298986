"""`rollmill simulate` on what a run left in a store."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deployed_plans import simulate
from flows.deployments import description
from flows.forms import SimulateForm
from tests.command_line import Rollmill
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


@pytest.mark.server
@pytest.mark.slow
def test_the_deployed_flow_shows_the_plans_it_tried(rollmill: Rollmill, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    address = {PREFECT_API_URL: rollmill.env["PREFECT_API_URL"]}
    with temporary_settings(address), get_client(sync_client=True) as client:
        found = simulate(SimulateForm(plan=str(path), directory=str(tmp_path / "out")))
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["plan-plan"]))
        (shown,) = client.request("POST", "/artifacts/filter", json={"artifacts": wanted.model_dump()}).json()
        flow_run = client.read_flow_run(shown["flow_run_id"])
    assert flow_run.name == "simulate plan" and flow_run.state_name == "Completed"
    assert len(found) == 3 and all(plan["plan"] in shown["data"] for plan in found)
    assert shown["data"].count("data:image/png;base64,") == 2
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["plans"] == found


def test_the_form_says_what_its_fields_mean_and_the_deployment_takes_it() -> None:
    fields = SimulateForm.model_json_schema()["properties"]
    assert all(len(field["description"]) > 10 for field in fields.values()), fields
    (deployed,) = (d for d in yaml.safe_load(description().read_text())["deployments"] if d["name"] == "simulate")
    module, _, name = deployed["entrypoint"].rpartition(".")
    assert getattr(import_module(module), name) is simulate
