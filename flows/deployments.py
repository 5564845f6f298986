"""Applies `prefect.yaml` to Prefect's server, and runs what it deploys.

Invariants
- The file is the one description of the deployments; Prefect's own command applies it.
- Applying it again leaves schedules as active as somebody made them.
- What a worker started ends with it: at the latest `GRACE_S` after it was told to.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
from prefect.automations import Automation, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags, FlowFilter, FlowFilterId
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.flow_runs import GONE
from infra.services.processes import mark_of
from rl.config.load import from_yaml
from rl.errors import ConfigError, RollmillError

POOL = "rollmill"
DEPLOY_S = 300.0
GRACE_S = 45.0
SILENCE = timedelta(minutes=10)
"""Without a heartbeat; Prefect sends one every 180 s, unless told otherwise."""
WATCH = "rollmill: flow runs that died"


class DeployFailed(RollmillError):
    """Prefect refused the deployments."""


def description() -> Path:
    """`prefect.yaml` of the current directory if it has deployments of ours, else the one that is installed."""
    own = Path("prefect.yaml")
    if own.is_file():
        tree = from_yaml(own.read_text(), str(own)) or {}
        if any(str(d.get("entrypoint", "")).startswith("flows.") for d in tree.get("deployments") or ()):
            return own.absolute()
    return Path(str(files("flows") / "prefect.yaml"))


def deploy(schedules: bool | None = None) -> list[str]:
    """Make the work pool, the deployments and the watch over dead flow runs; the deployments' full names. `schedules`:
    switch them all on or off; None leaves them as they are. Raises DeployFailed, ConfigError."""
    with get_client(sync_client=True) as client:
        _make_pool(client)
        active = {} if schedules is not None else _active(client)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(description())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOY_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeployFailed(f"`prefect deploy` was not done within {DEPLOY_S:g} s") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise DeployFailed(f"{description()}: `prefect deploy` refused it: {said[-600:]}")
    with get_client(sync_client=True) as client:
        found = _deployments(client)
        for deployment in found:
            for schedule in deployment.schedules:
                before = active.get((deployment.name, schedule.slug), schedule.active)
                wanted = before if schedules is None else schedules
                if wanted != schedule.active:
                    client.update_deployment_schedule(deployment.id, schedule.id, active=wanted)
        theirs = FlowFilter(id=FlowFilterId(any_=[d.flow_id for d in found]))
        flows = {flow.id: flow.name for flow in client.read_flows(flow_filter=theirs)}
        names = [f"{flows[d.flow_id]}/{d.name}" for d in found]
    _watch_the_dead()
    return sorted(names)


def work(limit: int) -> None:
    """Run what is scheduled, up to `limit` flow runs at once, until a signal ends it."""
    worker = ProcessWorker(POOL, name=f"{socket.gethostname()}-{os.getpid()}", limit=limit)
    try:
        asyncio.run(worker.start())
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        _end_children()


def _make_pool(client: SyncPrefectClient) -> None:
    """A pool of processes, whose flow runs start in this directory: files and modules are found as they are here."""
    template = ProcessWorker.get_default_base_job_template()
    template["variables"]["properties"]["working_dir"]["default"] = str(Path.cwd())
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        what = "Flow runs of Rollmill as processes; `rollmill serve` is a worker of it."
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template, description=what))
        return
    if pool.type != "process":
        raise ConfigError(f"work pool {POOL!r} is of type {pool.type!r}, not process: start a worker of that type")
    client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


def _deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=["rollmill"]))
    return client.read_deployments(deployment_filter=ours)


def _active(client: SyncPrefectClient) -> dict[tuple[str, str | None], bool]:
    """Which schedules are on, by deployment and slug."""
    return {(d.name, s.slug): s.active for d in _deployments(client) for s in d.schedules}


def _watch_the_dead() -> None:
    """An automation of the server: a flow run that sends no heartbeat any more is Crashed, on whatever machine it was.
    (On this machine it is seen at once: `flows.flow_runs`.)"""
    ends = {"Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "Scheduled", "AwaitingRetry"}
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in ends)},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=SILENCE,
    )
    action = ChangeFlowRunState(state=StateType.CRASHED, message=GONE)
    try:
        found: Any = Automation.read(name=WATCH)  # typed as for asynchronous callers
    except ValueError:
        Automation(name=WATCH, trigger=trigger, actions=[action]).create()
    else:
        found.trigger, found.actions = trigger, [action]
        found.update()


def _end_children() -> None:
    """End the flow runs of this worker well: each leaves a run that can be resumed. Services that this process started
    stay up for them; they end last."""
    children = [child for child in psutil.Process().children(recursive=False) if mark_of(child) is None]
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    _, left = psutil.wait_procs(children, timeout=GRACE_S)
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
