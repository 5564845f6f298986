"""The deployments of a service for many tenants: the service itself, and the form for a job.

Invariants
- What they add is the form, and that Prefect's UI says of a job what its job book says: cancelling the flow run cancels
  the job, pausing it pauses the job, and resuming it resumes the job.
- A job whose flow run dies goes on; started again with the same form, the flow follows the same job.
"""

from __future__ import annotations

from contextlib import suppress
from time import sleep

from prefect import flow
from prefect.client.schemas.objects import State as RunState
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from flows.artifacts import Artifacts
from flows.deployed import RETRIES, RETRY_DELAY_S, console, retried_if_of_use
from flows.flow_runs import Orders, PauseOrdered, StopOrdered, obedient
from flows.forms import JobForm, TenantsForm
from flows.hold import RunHeld
from flows.prepare import reach
from flows.tenant_service import Tenants
from flows.tenants import find_service
from flows.tenants import serve as serve_flow
from rl.config.tenants import Job
from rl.errors import ConfigError, RollmillError
from rl.jobs import OVER, Entry, JobRefused, Order, State

PERIOD_S = 2.0

AGAIN = frozenset({State.PAUSED, State.FAILED})
ENDED = OVER | {State.DELETING, State.DELETED}

Figures = dict[str, float | int | str | None]


class JobFailed(RollmillError):
    """The job that a flow run followed failed, for the reason that the job book has."""


@flow(name="tenants", flow_run_name="tenants {service.service}", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S)
def serve(service: TenantsForm) -> RunState | None:
    """Serve the jobs of many tenants, until it is cancelled; started again, it goes on with the jobs that there are."""
    return retried_if_of_use(lambda: _serve(service))


def _serve(form: TenantsForm) -> RunState | None:
    service = form.config()
    try:
        return serve_flow.fn(service.name, service, until_idle=form.until_idle, console=console())
    except RunHeld as error:
        return Cancelled(message=str(error))


@flow(
    name="job",
    flow_run_name="job {form.job.tenant}/{form.job.name}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_S,
)
def job(form: JobForm) -> RunState | Figures:
    """Hand a job in and follow it to its end. Cancelling or pausing the flow run does so with the job."""
    return retried_if_of_use(lambda: _follow(form))


@obedient
def _follow(form: JobForm) -> RunState | Figures:
    given = form.config()
    tenants, orders = Tenants(find_service(reach(given.host), given.name)), Orders.here()
    entry, said = _submitted(tenants, form.job), console()
    shown, told = Artifacts(tenants.config(entry.job.id)), None
    try:
        while entry.state not in ENDED:
            orders.check()
            if entry.state is not told:
                told = entry.state
                said.print(f"job {entry.job.id} is {told}", highlight=False)
            _show(tenants, entry, shown)
            sleep(PERIOD_S)
            entry = tenants.job(form.job.id)
        _show(tenants, entry, shown, last=True)
    except (StopOrdered, TerminationSignal):
        if orders.cancelled():
            _order(tenants, entry, "cancel")
        raise
    except PauseOrdered:
        _order(tenants, entry, "pause")
        raise
    return _ended(tenants, entry)


def _show(tenants: Tenants, entry: Entry, shown: Artifacts, last: bool = False) -> None:
    head, steps = tenants.head(entry.job.id), entry.job.training.steps
    shown.progress(head / steps, [("job", entry.state), ("version", f"{head} of {steps}")], last=last)


def _ended(tenants: Tenants, entry: Entry) -> RunState | Figures:
    """What Prefect is to say of a job that is over. Raises JobFailed."""
    id = entry.job.id
    if entry.state is State.FAILED:
        raise JobFailed(f"job {id} failed: {entry.failure}; mend it, and retry this flow run, or hand it in again")
    if entry.state is not State.DONE:
        return Cancelled(message=f"job {id} is {entry.state}")
    row = next(row for row in tenants.figures() if row.job == id)
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _submitted(tenants: Tenants, job: Job) -> Entry:
    """The job: handed in now, or the same one as it stands; one that was paused, or failed, goes on.

    Raises ConfigError, JobRefused."""
    found = next((entry for entry in tenants.jobs() if entry.job.id == job.id), None)
    if found is None:
        return tenants.submit(job)
    if found.job != job:
        raise ConfigError(f"job {job.id} exists with other values; choose another name")
    return tenants.order(job.id, "resume") if found.state in AGAIN else found


def _order(tenants: Tenants, entry: Entry, order: Order) -> None:
    """Unless it ended this moment, or somebody was first."""
    with suppress(JobRefused):
        tenants.order(entry.job.id, order)
