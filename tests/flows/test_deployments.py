"""The deployments on a real Prefect server, run by the worker of `rollmill serve`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Suspended

from flows.deployments import deploy, description
from flows.evaluations import load_all
from flows.forms import CollectForm, TenantsForm, TrainForm
from tests.command_line import TINY, Rollmill
from tests.flows.test_runs import audit, descendants, head, wait_until

RUN: dict[str, Any] = {
    k: yaml.safe_load(v) for k, v in (pair.split("=", 1) for pair in (*TINY, "evaluation.problems=0"))
}


@pytest.fixture(scope="module")
def client(rollmill: Rollmill) -> Iterator[SyncPrefectClient]:
    address = {PREFECT_API_URL: rollmill.env["PREFECT_API_URL"]}  # Prefect read its settings when it was imported
    with temporary_settings(address), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def served(rollmill: Rollmill) -> Iterator[subprocess.Popen[str]]:
    """`rollmill serve`, ended well."""
    process = rollmill.start("serve")
    assert process.stdout is not None
    lines = []
    while "flow runs at once" not in (line := process.stdout.readline()):
        lines.append(line)
        assert line, f"`rollmill serve` ended: {''.join(lines)}"
    draining = threading.Thread(target=process.stdout.read, daemon=True)  # a full pipe would stop the worker
    draining.start()
    try:
        yield process
    finally:
        children = descendants(process)
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(90)
        finally:
            process.kill()
    assert not psutil.wait_procs(children, timeout=30)[1], "something outlived `rollmill serve`"


def start(client: SyncPrefectClient, deployment: str, form: dict[str, Any]) -> UUID:
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, parameters=form).id


def wait(client: SyncPrefectClient, flow_run: UUID, what: str, until: Callable[[FlowRun], object]) -> FlowRun:
    end = time.monotonic() + 600
    while not until(found := client.read_flow_run(flow_run)):
        assert time.monotonic() < end, f"no {what} within 600 s: {found.state}"
        time.sleep(0.3)
    return found


def train_form(name: str, **more: Any) -> dict[str, Any]:
    steps = {"training.steps": more.pop("steps", 3)}
    return {"run": {"configuration": "frozen_lake", "name": name, "overrides": RUN | steps, **more}}


def test_every_deployment_shows_a_form_whose_fields_say_what_they_mean() -> None:
    tree = yaml.safe_load(description().read_text())
    names = {"train", "nightly", "evaluate", "weekly", "tenants", "warmstart", "gc", "job", "simulate"}
    found = [d["name"] for d in tree["deployments"]]
    assert names <= set(found) and len(set(found)) == len(found), "each once"
    for form in (TrainForm, TenantsForm, CollectForm):
        fields = form.model_json_schema()["properties"]
        assert all(len(field["description"]) > 10 for field in fields.values()), fields


def test_a_form_is_checked_like_a_command_line() -> None:
    config = TrainForm(configuration="frozen_lake", name="mine", overrides={"training.learning_rate": 1e-05}).config()
    assert (config.name, config.training.learning_rate) == ("mine", 1e-05)


@pytest.mark.server
@pytest.mark.slow
def test_applying_the_file_again_leaves_schedules_as_somebody_made_them(
    rollmill: Rollmill, client: SyncPrefectClient
) -> None:
    assert {"train/train", "train/nightly", "evaluate/weekly", "warmstart/warmstart", "gc/gc"} <= set(deploy())
    nightly = client.read_deployment_by_name("train/nightly")
    (schedule,) = nightly.schedules
    assert not schedule.active, "nothing runs by itself before somebody wants it"
    assert nightly.work_pool_name == "rollmill" and nightly.parameters["run"]["more_steps"] == 10
    fields = nightly.parameter_openapi_schema["definitions"]["TrainForm"]["properties"]
    assert "newest commit" in fields["resume"]["description"]
    client.update_deployment_schedule(nightly.id, schedule.id, active=True)
    deploy()
    (schedule,) = client.read_deployment_by_name("train/nightly").schedules
    assert schedule.active
    client.update_deployment_schedule(nightly.id, schedule.id, active=False)


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_run_from_a_deployment_is_suspended_resumed_cancelled_and_gone_on_with(
    rollmill: Rollmill, served: subprocess.Popen[str], client: SyncPrefectClient
) -> None:
    name = "from-the-ui"
    flow_run = start(client, "train/train", train_form(name, steps=40))
    wait(client, flow_run, "version 1", lambda r: head(rollmill, name) >= 1)
    assert client.read_flow_run(flow_run).name == f"train {name}"

    client.set_flow_run_state(flow_run, Suspended())
    ended = [p for p in descendants(served) if _is_work(p)]
    assert ended
    assert not psutil.wait_procs(ended, timeout=90)[1], "the work goes on"
    assert client.read_flow_run(flow_run).state_name == "Suspended"
    reached = head(rollmill, name)
    assert 1 <= reached < 40

    client.resume_flow_run(flow_run)
    wait(client, flow_run, "progress", lambda r: head(rollmill, name) > reached)
    assert wait(client, flow_run, "Running", lambda r: True).state_type is StateType.RUNNING

    ended = [p for p in descendants(served) if _is_work(p)]
    client.set_flow_run_state(flow_run, Cancelling())
    wait(client, flow_run, "Cancelled", lambda r: r.state_type is StateType.CANCELLED)
    assert not psutil.wait_procs(ended, timeout=90)[1], "the work goes on"
    reached = head(rollmill, name)

    tag = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:default.{name}"]))
    for one in client.read_flow_runs(flow_run_filter=tag):
        assert one.state is not None and one.state.is_final(), f"{one.name} is {one.state_name}"

    again = start(client, "train/train", train_form(name, more_steps=2))
    done = wait(client, again, "end", lambda r: r.state is not None and r.state.is_final())
    assert done.state_type is StateType.COMPLETED, done.state
    audit(rollmill, name, reached + 2)


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_run_is_prepared_trained_evaluated_and_collected_by_deployments_alone(
    rollmill: Rollmill, served: subprocess.Popen[str], client: SyncPrefectClient
) -> None:
    """Each form as Prefect's UI sends it: every field at its default, but for what one fills in."""
    name = "all-by-form"
    retention = {"newest": 1, "grace": 0, "collect_every": 1000}
    overrides = RUN | {"evaluation.problems": 8, "training.steps": 3, "training.checkpoint_every": 1, "seed": 11}
    run = {"configuration": "frozen_lake", "name": name, "overrides": overrides | {"retention": retention}}

    def completed(deployment: str, field: str, **values: Any) -> FlowRun:
        form = form_of(client, deployment)[field] | values
        flow_run = start(client, deployment, {field: form})
        done = wait(client, flow_run, "end", lambda r: r.state is not None and r.state.is_final())
        assert done.state_type is StateType.COMPLETED, f"{deployment}: {done.state}"
        return done

    models = rollmill.home / "models"
    before = set(models.glob("warm-*"))
    assert completed("warmstart/warmstart", "run", **run).name == f"warmstart {name}"
    (taught,) = set(models.glob("warm-*")) - before
    written = (taught / "config.json").stat().st_mtime_ns
    failed = start(client, "evaluate/evaluate", {"run": run})
    done = wait(client, failed, "end", lambda r: r.state is not None and r.state.is_final())
    assert done.state_type is StateType.FAILED and done.run_count == 1, "no run yet, and no use in trying again"

    completed("train/train", "run", **run)
    assert (taught / "config.json").stat().st_mtime_ns == written, "taught once"
    log, config = rollmill.log(name), rollmill.config(name)
    completed("evaluate/evaluate", "run", **run)
    (evaluation,) = [e for e in load_all(config, log.store) if e.version == 3]
    assert evaluation.problems == 8 and 0 <= evaluation.reward <= 1

    def states() -> set[str]:
        return {key.split("/")[3] for key in log.store.keys(f"{config.prefix}state/")}

    there = states()
    assert len(there) == 4
    log.store.put("newer/run/config.json", b'{"format": 99}')  # keeps no other run from being collected
    try:
        everything = start(client, "gc/gc", {"what": form_of(client, "gc/gc")["what"] | {"dry_run": True}})
        done = wait(client, everything, "end", lambda r: r.state is not None and r.state.is_final())
        assert done.state_type is StateType.FAILED and "newer/run" in str(done.state), done.state
        assert done.name == "gc every run" and states() == there, "only said"
        completed("gc/gc", "what", name=name)
        assert len(states()) < len(there)
    finally:
        log.store.delete(["newer/run/config.json"])
    audit(rollmill, name, 3)
    completed("train/train", "run", **run, more_steps=1)
    audit(rollmill, name, 4)


def form_of(client: SyncPrefectClient, deployment: str) -> dict[str, Any]:
    """The parameters that Prefect's form has before anything is filled in."""
    schema = client.read_deployment_by_name(deployment).parameter_openapi_schema

    def filled(node: dict[str, Any]) -> Any:
        if "$ref" in node:
            return filled(schema["definitions"][node["$ref"].rpartition("/")[2]])
        if "default" in node:
            return node["default"]
        return {field: filled(inner) for field, inner in node.get("properties", {}).items()}

    return filled(schema)


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_run_ends_by_command_and_after_kill_9_nothing_stays_running(
    rollmill: Rollmill, client: SyncPrefectClient
) -> None:
    name = "by-command"
    arguments = rollmill.train_arguments(name, "training.steps=60", "evaluation.problems=0")
    process = rollmill.start(*arguments)
    wait_until(lambda: head(rollmill, name) >= 1, "version 1")
    code, output = rollmill("train", *arguments[1:], "--resume")
    assert code == 2 and "is being trained by the flow run 'train by-command'" in output, output
    code, output = rollmill("runs", "stop", name)
    assert code == 0 and "Cancelled" in output, output
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume" in said, said

    process = rollmill.start(*arguments, "--resume")
    reached = head(rollmill, name)
    wait_until(lambda: head(rollmill, name) > reached, "progress")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _, output = rollmill("runs", "ls")
    assert f"default/{name}" in output
    tag = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:default.{name}"]))

    def left() -> list[str]:
        rollmill("runs", "ls")  # whatever looks next, sees it
        return [r.name for r in client.read_flow_runs(flow_run_filter=tag) if r.state is None or not r.state.is_final()]

    wait_until(lambda: not left(), "the end of every flow run", 90)
    code, output = rollmill.train(
        name, f"training.steps={head(rollmill, name) + 1}", "evaluation.problems=0", resume=True
    )
    assert code == 0, output


def _is_work(process: psutil.Process) -> bool:
    """Whether it is one of the processes of a run: a Dask worker, a part, the trainer."""
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(mark in line for mark in ("flows.rollout", "flows.learn", "infra.training", "prefect.engine"))


WORKER = """
import subprocess, sys
from flows.deployments import _end_children
from infra.services.processes import MARK
sleep = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"]
service, run = (subprocess.Popen(sleep, env=env, stdout=subprocess.PIPE) for env in ({MARK: "s3@/somewhere"}, None))
service.stdout.readline(), run.stdout.readline()  # for a moment after a start the kernel shows no environment yet
_end_children()
print("ended" if run.poll() is not None else "runs", "runs" if service.poll() is None else "ended")
service.kill()
"""


def test_a_worker_ends_its_flow_runs_before_its_services() -> None:
    """Which they need to end well; `rollmill serve` ends those last."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ended", "runs"], done.stderr
