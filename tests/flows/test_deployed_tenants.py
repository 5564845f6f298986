"""The deployments of a service for tenants on a real Prefect server: the service, and jobs handed in by the form."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling, Suspended

from flows.forms import JobForm, TenantsForm
from flows.tenant_service import Tenants
from infra.store.objects import ObjectStore
from tests.command_line import Rollmill
from tests.flows.test_deployments import _is_work as is_work
from tests.flows.test_deployments import client, served, start, wait
from tests.flows.test_runs import descendants, wait_until

__all__ = ["client", "served"]  # fixtures

SERVICE: dict[str, Any] = {
    "service": "lake",
    "overrides": {
        "name": "shop-in-the-ui",
        "engine.max_batch": 32,
        "pools": {"type": "local", "cpu": 64, "lambda": 8},
    },
}


def job_form(name: str, **more: Any) -> dict[str, Any]:
    training = {"groups_per_step": 2, "group_size": 4, "learning_rate": 1e-3, "micro_batch_size": 64}
    training |= {"steps": more.pop("steps", 300)}
    limits = {"max_new_tokens": 8, "max_tokens": 384}
    job = {"tenant": "ann", "name": name, "domains": ["frozen_lake"], "training": training, "rollout": limits}
    return {"form": SERVICE | {"job": job | more}}


def test_the_form_of_a_job_says_what_its_fields_mean() -> None:
    form = JobForm.model_json_schema()
    for fields in (form["properties"], form["$defs"]["Job"]["properties"]):
        assert all("description" in field for field in fields.values()), fields


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_job_of_a_service_is_handed_in_paused_resumed_and_cancelled_by_its_form(
    rollmill: Rollmill, served: subprocess.Popen[str], client: SyncPrefectClient
) -> None:
    serving = start(client, "tenants/tenants", {"service": SERVICE})
    given = TenantsForm.model_validate(SERVICE).config()
    store = ObjectStore.connect(given.store)
    wait_until(lambda: store.exists(f"{given.prefix}service.json"), "the service")
    tenants = Tenants(given)

    with pytest.raises(PrefectHTTPStatusError, match="lora"):
        start(client, "job/job", job_form("wrong", lora={"rank": 0}))
    refused = start(client, "job/job", job_form("elsewhere", domains=["nowhere"]))
    ended = wait(client, refused, "end", lambda r: r.state is not None and r.state.is_final())
    assert ended.state is not None and ended.state_type is StateType.FAILED
    assert "'nowhere' is not offered by service 'shop-in-the-ui'" in str(ended.state.message)

    walk = start(client, "job/job", job_form("walk"))
    wait(client, walk, "first version", lambda r: tenants.head("ann/walk") >= 1)
    assert client.read_flow_run(walk).name == "job ann/walk"
    client.set_flow_run_state(walk, Suspended())
    wait_until(lambda: tenants.job("ann/walk").state == "paused", "the pause")
    assert client.read_flow_run(walk).state_name == "Suspended"
    reached = tenants.head("ann/walk")
    client.resume_flow_run(walk)
    wait(client, walk, "progress", lambda r: tenants.head("ann/walk") > reached + 1)
    client.set_flow_run_state(walk, Cancelling())
    wait(client, walk, "Cancelled", lambda r: r.state_type is StateType.CANCELLED)
    assert tenants.job("ann/walk").state == "cancelled"
    assert tenants.head("ann/walk") < 300

    short = start(client, "job/job", job_form("stroll", steps=1))
    done = wait(client, short, "end", lambda r: r.state is not None and r.state.is_final())
    assert done.state_type is StateType.COMPLETED, done.state
    assert tenants.job("ann/stroll").state == "done"

    ended_with_it = [p for p in descendants(served) if is_work(p)]
    client.set_flow_run_state(serving, Cancelling())
    wait(client, serving, "Cancelled", lambda r: r.state_type is StateType.CANCELLED)
    assert not psutil.wait_procs(ended_with_it, timeout=90)[1], "the service goes on"
