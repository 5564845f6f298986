"""The deployments of a service for many tenants: the service itself, and the form for a job.

Invariants
- What they add is the form, and that Prefect's UI says of a job what its job book says: cancelling the flow run cancels
  the job, pausing it pauses the job.
- A flow run that dies leaves the job as it is; started again with the same form, it follows the same job.
"""

from __future__ import annotations

from time import sleep

from prefect import flow
from prefect.client.schemas.objects import State as RunState
from prefect.states import Failed
from pydantic import Field, JsonValue

from flows.configure import read_section
from flows.deployed import console, retried_if_of_use
from flows.flow_runs import Orders, PauseOrdered, StopOrdered, obedient
from flows.prepare import reach
from flows.tenant_service import Tenants
from flows.tenants import find_service
from flows.tenants import serve as serve_flow
from rl.config.base import Section
from rl.config.tenants import Job, ServiceConfig
from rl.errors import ConfigError
from rl.jobs import OVER, Entry, State

PERIOD_S = 2.0


class ServiceForm(Section):
    """Which service."""

    configuration: str = "lake"
    """A preset of a service, or a YAML file on the machine that runs the flow."""
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields that differ from the configuration, by dotted path."""

    def service(self) -> ServiceConfig:
        """Raises ConfigError."""
        return read_section(ServiceConfig, self.configuration, self.overrides, "services")


class JobForm(ServiceForm):
    """A job for a service that runs."""

    job: Job
    """What is to be trained."""


@flow(name="tenants", flow_run_name="tenants {service.configuration}")
def serve(service: ServiceForm) -> RunState | None:
    """Serve the jobs of many tenants, until it is cancelled; started again, it goes on with them."""
    settled = service.service()
    return retried_if_of_use(lambda: serve_flow.fn(settled.name, settled, console=console()))


@flow(name="job", flow_run_name="job {form.job.tenant}/{form.job.name}")
def job(form: JobForm) -> RunState | dict[str, float | int | str | None]:
    """Hand a job in and follow it to its end. Cancelling or pausing the flow run does so with the job."""
    return retried_if_of_use(lambda: _follow(form))


@obedient
def _follow(form: JobForm) -> RunState | dict[str, float | int | str | None]:
    given = form.service()
    tenants, orders = Tenants(find_service(reach(given.host), given.name)), Orders.here()
    entry = _submitted(tenants, form.job)
    try:
        while entry.state not in OVER:
            orders.check()
            sleep(PERIOD_S)
            entry = tenants.job(form.job.id)
    except StopOrdered:
        tenants.order(form.job.id, "cancel")
        raise
    except PauseOrdered:
        tenants.order(form.job.id, "pause")
        raise
    if entry.state is State.FAILED:
        return Failed(message=f"job {entry.job.id} failed: {entry.failure}")
    row = next(row for row in tenants.figures() if row.job == form.job.id)
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _submitted(tenants: Tenants, job: Job) -> Entry:
    """The job: handed in now, or the same one as it stands; a paused one goes on."""
    found = next((entry for entry in tenants.jobs() if entry.job.id == job.id), None)
    if found is None:
        return tenants.submit(job)
    if found.job != job:
        raise ConfigError(f"job {job.id} exists with other values; choose another name")
    return tenants.order(job.id, "resume") if found.state is State.PAUSED else found
