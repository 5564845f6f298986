"""The desk of a service, on a store alone: what one job is hurts no other, and what is deleted is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest
from rich.console import Console

from flows import desk as desks
from flows.deployed_tenants import _ended
from flows.desk import Desk
from flows.job_reports import JobReports
from flows.tenant_service import Tenants, load_service
from flows.tenants import _check_places
from infra.proxy.wire import ServiceStatus, TenantStatus
from infra.store.jobs import JobBook
from infra.store.objects import ObjectStore
from rl.config.tenants import ServiceConfig
from rl.errors import ConfigError
from rl.jobs import State

QUICK = {"name": "job", "domains": ["frozen_lake"]}


class Proxy:
    """What the desk asks of one: all that run are served."""

    def __init__(self, *served: str) -> None:
        self.served = served

    def tenants(self) -> ServiceStatus:
        return ServiceStatus({name: TenantStatus(0, 0, False, 0, None) for name in self.served}, {"busy_s": 1.0})


@pytest.fixture
def service(own_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path))
    bucket = f"desk-{tmp_path.name.replace('_', '-')}"[:60].rstrip("-")
    found = load_service("lake", [f"store.bucket={bucket}", "tracking.enabled=false"])
    ObjectStore.connect(found.store).ensure_bucket()
    return found


@pytest.fixture
def desk_of() -> Callable[[ServiceConfig], Desk]:
    return lambda service: Desk(service, ObjectStore.connect(service.store), Console(quiet=True))


def test_a_running_job_that_fits_the_service_no_more_ends_alone(
    service: ServiceConfig, desk_of: Callable[[ServiceConfig], Desk]
) -> None:
    tenants, book = Tenants(service), JobBook(ObjectStore.connect(service.store), service.name)
    for tenant, rank in (("ann", 4), ("bob", 32)):
        tenants.submit({"tenant": tenant, "lora": {"rank": rank}, **QUICK})
    desk = desk_of(service)
    desk.look(frozenset({0}), Proxy())  # type: ignore[arg-type]
    assert {entry.job.tenant for entry in book.sync().running} == {"ann", "bob"}
    again = desk_of(service.model_copy(update={"largest_rank": 8}))
    again.look(frozenset({0}), Proxy("ann.job", "bob.job"))  # type: ignore[arg-type]
    states = {entry.job.tenant: (entry.state, entry.failure) for entry in book.sync().entries.values()}
    assert states["ann"] == (State.RUNNING, None)
    assert states["bob"][0] is State.FAILED and "largest_rank" in (states["bob"][1] or "")


def test_the_end_waits_for_no_report_and_no_deletion_that_hangs(
    service: ServiceConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(desks, "END_S", 0.5)
    service = service.model_copy(update={"tracking": service.tracking.model_copy(update={"enabled": True})})
    begun, hangs = threading.Semaphore(0), threading.Event()

    def hang(*_: object) -> None:
        begun.release()
        hangs.wait(60)

    monkeypatch.setattr(JobReports, "_make", hang)
    monkeypatch.setattr(Desk, "_delete", hang)
    tenants, desk = Tenants(service), Desk(service, ObjectStore.connect(service.store), Console())
    for tenant in ("ann", "bob", "cyd"):
        tenants.submit({"tenant": tenant, **QUICK})
        tenants.order(f"{tenant}/job", "cancel")
    tenants.order("cyd/job", "delete")
    try:
        desk.look(frozenset(), Proxy())  # type: ignore[arg-type]
        assert all(begun.acquire(timeout=20) for _ in range(2))
        began = monotonic()
        desk.close()
        assert monotonic() - began < 5
        assert all(thread.daemon for thread in threading.enumerate() if thread.name in ("reports", "erase"))
    finally:
        hangs.set()
    said = capsys.readouterr().out
    assert "a report is not done" in said and "a deletion is not done" in said
    assert tenants.job("cyd/job").state is State.DELETING, "the next start goes on with it"


def test_what_is_written_while_a_job_is_deleted_goes_too(
    service: ServiceConfig, desk_of: Callable[[ServiceConfig], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "QUIET_S", 0.0)
    store, tenants = ObjectStore.connect(service.store), Tenants(service)
    tenants.submit({"tenant": "ann", **QUICK})
    desk = desk_of(service)
    desk.look(frozenset({0}), Proxy())  # type: ignore[arg-type]
    for name in ("usage.json", "groups/early", "log/0000000001.json"):
        store.put(f"ann/job/{name}", b"x")
    tenants.order("ann/job", "cancel")
    tenants.order("ann/job", "delete")
    late = [f"ann/job/groups/late-{n}" for n in range(3)]
    while tenants.job("ann/job").state is State.DELETING:
        desk.look(frozenset({0}), Proxy())  # type: ignore[arg-type]
        for future in desk._erasing.values():
            future.result(30)
        if late:
            store.put(late.pop(), b"x")
    assert tenants.job("ann/job").state is State.DELETED and not late
    assert list(store.keys("ann/job/")) == ["ann/job/log/0000000001.json"]
    ended = _ended(tenants, tenants.job("ann/job"))
    assert getattr(ended, "name", None) == "Cancelled", "whoever follows it comes to an end"


def test_fewer_places_than_jobs_that_run_are_refused_by_their_names(
    service: ServiceConfig, desk_of: Callable[[ServiceConfig], Desk]
) -> None:
    store, tenants = ObjectStore.connect(service.store), Tenants(service)
    for tenant in ("ann", "bob"):
        tenants.submit({"tenant": tenant, **QUICK})
    desk_of(service).look(frozenset({0}), Proxy())  # type: ignore[arg-type]
    _check_places(service, store)
    with pytest.raises(ConfigError, match=r"running \(1\) is below the 2 jobs that run: ann/job, bob/job; raise it"):
        _check_places(service.model_copy(update={"running": 1}), store)
