"""The tenants flow: a service in which jobs of many tenants come and go.

    claim -> pools -> base (made once) -> engines and proxy -> trainers, rollout process -> desk, until stopped

Invariants
- Everybody follows the job book: the desk gives places to those that wait, the proxy serves those that run, rollout
  and trainers work for them. Each can be killed at any moment and is started again, within its budget, from the store.
- Whatever ends the flow, nothing that it started outlives it; started again, it goes on with the jobs that there are.
- The base of a service is made once, and never changes.
"""

from __future__ import annotations

import json
from time import sleep

from prefect import flow
from rich.console import Console

from flows.desk import Desk
from flows.flow_runs import obedient
from flows.hold import held
from flows.prepare import has_base, push_base, reach
from flows.session import PERIOD_S, Session, open_session
from flows.supervise import PartFailed
from flows.tenant_trainers import Trainers
from flows.warmstart import initial_model
from infra.store.errors import NotFound
from infra.store.jobs import JobBook
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore, probe_atomicity
from rl.config.load import dumps, loads_as
from rl.config.run import service_prefix
from rl.config.tenants import ServiceConfig
from rl.errors import ConfigError


@flow(name="tenants", flow_run_name="tenants {name}", validate_parameters=False, persist_result=False)
@obedient
def serve(name: str, service: ServiceConfig, until_idle: bool = False, console: Console | None = None) -> None:
    """Serve the jobs of a service until stopped; with `until_idle`, until none waits, runs or is being deleted, once
    there was one."""
    with held(service.host):
        _run(service, until_idle, console or Console(quiet=True))


def _run(service: ServiceConfig, until_idle: bool, console: Console) -> None:
    store = claim_service(service)
    _check_places(service, store)
    with open_session(service.host, CommitLog(store, service.prefix, "observer"), console, service) as session:
        if not has_base(service.host, store):
            console.print("preparing the base", highlight=False)
            push_base(service.host, store, initial_model(session))
        session.start_engine()
        session.wait_until_up()
        trainers = Trainers(session, service)
        rollout = session.start("tenant_rollout", service.restarts.rollout)
        desk, up = Desk(service, store, console), False
        try:
            while not (until_idle and desk.idle):
                if not up and (up := trainers.up):
                    console.print(f"service {service.name} is up: {service.trainers} trainers", highlight=False)
                rollout.check(console)
                if rollout.done:
                    raise PartFailed(f"rollout ended by itself; see {rollout.log}")
                _check(session, trainers)
                desk.look(trainers.alive, session.proxy)
                sleep(PERIOD_S)
        finally:
            desk.close()


def _check(session: Session, trainers: Trainers) -> None:
    session.check_engine()
    trainers.check()


def claim_service(service: ServiceConfig) -> ObjectStore:
    """The store, in which the service is described. Raises StoreUnavailable, StoreNotAtomic, and ConfigError for
    another base than the one that the service began with."""
    store = reach(service.host, create=True)
    probe_atomicity(store.client, store.bucket, service.prefix)
    try:
        began = find_service(store, service.name)
    except ConfigError:
        began = service
    if (began.model, began.seed) != (service.model, service.seed):
        raise ConfigError(
            f"service {service.name!r} began with another base: model and seed have to stay ({_short(began)}); put "
            f"them back, or choose another name"
        )
    store.put(_key(service.name), dumps(service).encode())
    return store


def _check_places(service: ServiceConfig, store: ObjectStore) -> None:
    """Raises ConfigError for fewer places than jobs that run: an engine may not have room for all their adapters."""
    running = [entry.job.id for entry in JobBook(store, service.name).sync().running]
    if len(running) > service.running:
        raise ConfigError(
            f"running ({service.running}) is below the {len(running)} jobs that run: {', '.join(running)}; raise it, "
            f"or `rollmill tenants pause` some of them first"
        )


def find_service(store: ObjectStore, name: str) -> ServiceConfig:
    """A service as it was last started. Raises ConfigError when there is none of this name."""
    try:
        return loads_as(ServiceConfig, store.get(_key(name)).decode())
    except NotFound as error:
        raise ConfigError(
            f"there is no service {name!r} in bucket {store.bucket!r}; start it with `rollmill tenants serve`"
        ) from error


def _key(name: str) -> str:
    return f"{service_prefix(name)}service.json"


def _short(service: ServiceConfig) -> str:
    return json.dumps({"model": service.model.model_dump(mode="json"), "seed": service.seed})
