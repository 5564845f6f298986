"""A run's flow runs on Prefect's server: which process each is, what the UI asks of it, what becomes of it.

Invariants
- Every flow run of a run carries the tag `run:{tenant}.{name}` and, as labels, the process that it is.
- What is asked in the UI ends the flow by an error at its next `Orders.check`, so through every `finally`: whatever
  it started ends first. Stopped, it is Cancelled; paused, it is Suspended, and resuming starts it anew, from the store.
- A flow run whose process is gone is Crashed, and so are its task runs: nothing stays Running for ever. One that was
  taken for gone and lives says so at its next look.
- Prefect shows and orders, the store is the truth: a server that does not answer stops nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from threading import Lock
from time import monotonic
from typing import ParamSpec, TypeVar, cast
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled, Crashed, Running, Suspended

from flows.told import ask, noted
from infra.services.processes import Identity
from rl.config.run import RunConfig
from rl.errors import RollmillError

LOOK_S = 2.0
"""Between two looks at what the UI asks."""
NEWEST = 50
"""Flow runs of a run that are looked at for dead ones."""
LATELY_S = 120.0
HOST, PID, BEGAN, LEASE = "rollmill.host", "rollmill.pid", "rollmill.began", "rollmill.lease"
GONE = "its process is gone; the run goes on from its newest commit when it is started again"

P = ParamSpec("P")
R = TypeVar("R")


class StopOrdered(RollmillError):
    """Somebody cancelled the flow run."""


class PauseOrdered(RollmillError):
    """Somebody paused the flow run."""


class Orders:
    """What is asked of one flow run, in the UI or by `rollmill runs stop`. Thread-safe."""

    def __init__(self, client: SyncPrefectClient | None, flow_run_id: UUID | None):
        self._client, self._id = client, flow_run_id
        self._lock = Lock()
        self._looked = monotonic()
        self._state: State | None = None

    @classmethod
    def here(cls) -> Orders:
        """Those of the flow run of this thread; outside of one nothing is ever asked."""
        context = FlowRunContext.get()
        if context is None or context.flow_run is None or not isinstance(context.client, SyncPrefectClient):
            return cls(None, None)
        return cls(context.client, context.flow_run.id)

    def check(self) -> None:
        """Look, at most every `LOOK_S` seconds. Raises StopOrdered, PauseOrdered."""
        with self._lock:
            client, this = self._client, self._id
            if client is not None and this is not None and monotonic() - self._looked >= LOOK_S:
                self._looked = monotonic()
                found = ask(lambda: client.read_flow_run(this))
                self._state = self._state if found is None else found.state
                if self._state is not None and self._state.type is StateType.CRASHED:
                    # its heartbeats were missed, over a long sleep or an outage of the server; but it lives
                    ask(lambda: client.set_flow_run_state(this, Running(message="it lives"), force=True))
                    self._state = None
            state = self._state
        if state is None:
            return
        if state.type in (StateType.CANCELLING, StateType.CANCELLED):
            raise StopOrdered("the flow run was cancelled")
        if state.type is StateType.PAUSED:
            raise PauseOrdered("the flow run was paused")

    def cancelled(self) -> bool:
        """Whether it was cancelled, by a look at once: a worker ends the process of what is cancelled by SIGTERM, which
        may come before the next `check`."""
        with self._lock:
            self._looked = -LOOK_S
        try:
            self.check()
        except StopOrdered:
            return True
        except PauseOrdered:
            pass
        return False


def obedient(body: Callable[P, R]) -> Callable[P, R]:
    """The body of a flow, which an order ends in the state that was asked for."""

    work = noted(body)

    @wraps(body)
    def obeying(*arguments: P.args, **named: P.kwargs) -> R | State:
        try:
            return work(*arguments, **named)
        except StopOrdered as order:
            return Cancelled(message=str(order))
        except PauseOrdered as order:
            return _suspend(order)

    return cast(Callable[P, R], obeying)  # such a state is raised to who called the flow


def _suspend(order: PauseOrdered) -> State:
    """Leave the flow run to be resumed in the UI: by another process, which it takes a deployment for."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None and isinstance(context.client, SyncPrefectClient)
    if context.flow_run.deployment_id is None:
        return Cancelled(message=str(order))
    state = context.client.read_flow_run(context.flow_run.id).state
    if state is None or not state.state_details.pause_reschedule:  # resuming would tell this process, which ends
        state = Suspended(message="its work was ended; resuming goes on from the newest commit")
        context.client.set_flow_run_state(context.flow_run.id, state, force=True)
    context.client.update_flow_run_labels(context.flow_run.id, {PID: ""})  # the next process is another one
    raise Pause(state=state)


def ends_with_its_run(body: Callable[P, R]) -> Callable[P, R]:
    """The body of a part's flow, which its run ends by SIGTERM: not a crash."""

    work = noted(body)

    @wraps(body)
    def ending(*arguments: P.args, **named: P.kwargs) -> R | State:
        try:
            return work(*arguments, **named)
        except TerminationSignal:
            return Cancelled(message="ended with its run")

    return cast(Callable[P, R], ending)


def run_tag(config: RunConfig) -> str:
    return f"run:{config.tenant}.{config.name}"


def sign(config: RunConfig, **more: str) -> None:
    """Note on this flow run which run and which process it is, and `more` labels. Outside of a flow run: nothing."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not isinstance(context.client, SyncPrefectClient):
        return
    this, client = context.flow_run, context.client
    here = Identity.of(psutil.Process())
    began = f"{here.began!r} {here.boot}"
    labels: dict[str, bool | int | float | str] = {HOST: socket.gethostname(), PID: str(here.pid), BEGAN: began}
    with suppress(httpx.HTTPError):
        client.update_flow_run(this.id, tags=sorted({*this.tags, "rollmill", run_tag(config)}))
        client.update_flow_run_labels(this.id, {**labels, **more})


def is_gone(flow_run: FlowRun) -> bool:
    """Whether it signed as a process of this machine that no longer lives."""
    labels = flow_run.labels
    if labels.get(HOST) != socket.gethostname() or not labels.get(PID):
        return False
    began, _, boot = str(labels[BEGAN]).partition(" ")
    return Identity(int(labels[PID]), float(began), boot).process() is None


def flow_runs(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """The newest flow runs with a tag, newest first."""
    mine = filters.FlowRunFilter(tags=filters.FlowRunFilterTags(all_=[tag]))
    return client.read_flow_runs(flow_run_filter=mine, sort=FlowRunSort.START_TIME_DESC, limit=NEWEST)


def crash_the_gone(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """Mark what is Running and has no process on this machine any more, with its task runs; those flow runs, and those
    that ended otherwise, but so lately that something of them may be left."""
    context = FlowRunContext.get()
    this = context.flow_run.id if context is not None and context.flow_run is not None else None
    lately = datetime.now(UTC) - timedelta(seconds=LATELY_S)
    signed = [r for r in flow_runs(client, tag) if r.id != this and is_gone(r)]
    gone = [r for r in signed if r.end_time is None or r.end_time > lately]
    for flow_run in gone:
        if flow_run.state is None or flow_run.state.type in _OPEN:
            client.set_flow_run_state(flow_run.id, Crashed(message=GONE), force=True)
    if gone:
        _crash_task_runs(client, gone)
    return gone


def crash_the_gone_of(config: RunConfig) -> None:
    """The same from within a flow run, for its run: of the parts that it started."""
    context = FlowRunContext.get()
    if context is not None and isinstance(client := context.client, SyncPrefectClient):
        ask(lambda: crash_the_gone(client, run_tag(config)))


_OPEN = {StateType.RUNNING, StateType.CANCELLING, StateType.PENDING}


def _crash_task_runs(client: SyncPrefectClient, ended: list[FlowRun]) -> None:
    """Those that were Running when the process of their flow run ended."""
    of_these = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[r.id for r in ended]))
    types = [t for t in StateType if t not in TERMINAL_STATES]
    running = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=types)))
    while found := client.read_task_runs(flow_run_filter=of_these, task_run_filter=running, limit=200):
        for task_run in found:
            client.set_task_run_state(task_run.id, Crashed(message="the process of its flow run is gone"), force=True)
