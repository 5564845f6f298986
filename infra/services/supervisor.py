"""`up`, `down` and `status` of the embedded services under one data directory.

Invariants
- All calls on one data directory are serialised by a file lock; the kernel frees it with its holder.
- `up` is idempotent: what runs and answers is left alone; what is dead, hung or half dead is ended and
  started again. Those to be started are started together and waited for together.
- After `down` returns no process of the services is left (checked, not assumed); the data stays.
- A port held by a stranger is `PortInUse`, before anything is started.
- Every wait has a deadline and ends in a named error with the end of the log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from infra.services import processes, seaweed, state
from infra.services.endpoints import Endpoints
from infra.services.errors import (
    DiskFull,
    PortChanged,
    PortInUse,
    ServiceDidNotStart,
    ServicesBusy,
    StateUnreadable,
)
from infra.services.servers import SERVICES
from infra.services.service import Service, url
from infra.services.state import Record

LOCK_TIMEOUT_S = 300.0
ALL = tuple(SERVICES)


@dataclass(frozen=True)
class Ports:
    """Ports asked for. None: the one used last here, else the default (8333, 4200, 5000). 0: any free one."""

    s3: int | None = None
    prefect: int | None = None
    mlflow: int | None = None


AUTO = Ports(0, 0, 0)
"""All ports free ones: for tests, and for several data directories side by side."""


@dataclass(frozen=True)
class ServiceStatus:
    """How a service does. `state`: `running`, `unhealthy` (alive, does not answer), `dead` or `stopped`."""

    name: str
    title: str
    state: str
    detail: str
    port: int
    url: str
    pid: int | None
    uptime_s: float | None
    rss_bytes: int
    log: Path


def default_data_dir() -> Path:
    """`$ROLLMILL_HOME`, else `.rollmill` in the current directory."""
    return Path(os.environ.get("ROLLMILL_HOME") or ".rollmill").absolute()


def up(
    data_dir: Path | str | None = None, ports: Ports | None = None, which: Sequence[str] = ALL
) -> Endpoints:
    """Make the services in `which` (of "s3", "prefect", "mlflow") run and answer; return where.

    Takes about 1 s for S3 alone, about 10 s for all three the first time and 6 s later. Raises PortInUse,
    PortChanged, ServiceDidNotStart, BinaryMissing, StateUnreadable, ServicesBusy, DiskFull.
    """
    home = _resolve(data_dir)
    asked = ports or Ports()
    services = [SERVICES[name] for name in which]
    with locked(home):
        records = state.load(home)
        missing = []
        for service in services:
            record = records.get(service.name)
            if record is not None and _healthy(home, service, record):
                wanted = getattr(asked, service.name)
                if wanted and wanted != record.port:
                    raise PortChanged(service.name, record.port, wanted, service.flag)
            else:
                missing.append(service)
        for service in missing:  # the remains of a crash may hold the port: they go before it is looked at
            _end(home, service, records)
        taken: set[int] = {r.port for r in records.values()}
        for service in missing:
            records[service.name] = _choose_ports(service, getattr(asked, service.name), records, taken)
        for service in missing:
            _start(home, service, records)
        if missing:
            _wait_ready(home, missing, records)
        return _endpoints(home, {name: records[name] for name in which})


def down(data_dir: Path | str | None = None, which: Sequence[str] = ALL) -> list[str]:
    """End the services and everything they started; the names of those that ran. Raises ServiceDidNotStop.

    Works without a readable state file: processes are then found by the mark in their environment.
    """
    home = _resolve(data_dir)
    if not home.exists():
        return []
    with locked(home):
        try:
            records = state.load(home)
        except StateUnreadable:
            records = {}
            state.state_path(home).unlink()
        return [name for name in which if _end(home, SERVICES[name], records)]


def status(data_dir: Path | str | None = None) -> list[ServiceStatus]:
    """How each service does now, by one health request each (5 s at most). Takes no lock."""
    home = _resolve(data_dir)
    records = state.load(home)
    return [_status(home, service, records.get(service.name)) for service in SERVICES.values()]


def endpoints(data_dir: Path | str | None = None) -> Endpoints:
    """The endpoints of the services that are alive, from the state file, without asking them anything."""
    home = _resolve(data_dir)
    living = {n: r for n, r in state.load(home).items() if r.identity is not None and r.identity.process()}
    return _endpoints(home, living)


# --- parts ------------------------------------------------------------------------------------------------


def _resolve(data_dir: Path | str | None) -> Path:
    return Path(data_dir).absolute() if data_dir is not None else default_data_dir()


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)  # holds credentials and databases
    path = home / "services.lock"
    try:
        with filelock.FileLock(path, timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise ServicesBusy(path, LOCK_TIMEOUT_S) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFull(home) from error


def _healthy(home: Path, service: Service, record: Record) -> bool:
    """Alive and answering; a living one gets a second try, since a busy machine may delay one answer."""
    if record.identity is None:
        return False
    for _ in range(2):
        if record.identity.process() is None:
            return False
        if service.probe(home, record.port, record.inner) is None:
            return True
        time.sleep(0.5)
    return False


def _choose_ports(service: Service, asked: int | None, records: dict[str, Record], taken: set[int]) -> Record:
    last = records.get(service.name)
    if asked == 0:
        again = last is not None and processes.port_free(last.port)
        port = last.port if last is not None and again else processes.free_port(taken)
    else:
        port = asked or (last.port if last else service.default_port)
        if not processes.port_free(port):
            raise PortInUse(service.title, port, processes.port_holder(port), service.flag)
    inner = dict(last.inner) if last else {}
    if set(inner) != set(service.inner_ports) or not all(map(processes.port_free, inner.values())):
        inner = {key: processes.free_port(taken) for key in service.inner_ports}
    return Record(port=port, inner=inner)


def _start(home: Path, service: Service, records: dict[str, Record]) -> None:
    record = records[service.name]
    launch = service.launch(home, record.port, record.inner)
    log = state.log_path(home, service.name)
    record.identity = processes.spawn(launch, data_dir=home, name=service.name, log=log)
    record.started_at = time.time()
    state.save(home, records)


def _wait_ready(home: Path, services: list[Service], records: dict[str, Record]) -> None:
    """Until all are ready. One that fails is ended and raised; the others go on running."""
    waiting = {service.name: "not asked yet" for service in services}
    began = time.monotonic()
    while waiting:
        for name in list(waiting):
            service, record = SERVICES[name], records[name]
            dead = record.identity is None or record.identity.process() is None
            reason = "it exited" if dead else service.probe(home, record.port, record.inner)
            if reason is None:
                del waiting[name]
                continue
            waiting[name] = reason
            waited = time.monotonic() - began
            if dead or waited > service.deadline_s:
                _end(home, service, records)
                reason = reason if dead else f"not ready after {waited:.0f} s ({reason})"
                log = state.log_path(home, name)
                # Taken between our look and its start:
                if dead and "address already in use" in tail(log).lower():
                    holder = processes.port_holder(record.port)
                    raise PortInUse(service.title, record.port, holder, service.flag)
                raise ServiceDidNotStart(service.title, reason, log, tail(log))
        time.sleep(0.1)


def _end(home: Path, service: Service, records: dict[str, Record]) -> bool:
    record = records.get(service.name)
    leader = record.identity if record else None
    ended = processes.end(home, service.name, leader, grace_s=service.grace_s)
    if record is not None and record.identity is not None:
        record.identity = record.started_at = None
        try:
            state.save(home, records)
        except OSError as error:  # what is ended need not be recorded: a process that is gone is never signalled
            if error.errno != errno.ENOSPC:
                raise
    return ended


def _status(home: Path, service: Service, record: Record | None) -> ServiceStatus:
    port = record.port if record else service.default_port
    leader = record.identity if record else None
    process = leader.process() if leader else None
    if leader is None:
        label, detail = "stopped", ""
    elif process is None:
        label, detail = "dead", "its process is gone; `rollmill up` starts it again"
    else:
        reason = service.probe(home, port, record.inner if record else {})
        label, detail = ("running", "") if reason is None else ("unhealthy", reason)
    started = record.started_at if record else None
    return ServiceStatus(
        name=service.name,
        title=service.title,
        state=label,
        detail=detail,
        port=port,
        url=url(port),
        pid=process.pid if process else None,
        uptime_s=time.time() - started if process and started else None,
        rss_bytes=processes.rss_bytes(processes.family(home, service.name, leader)) if leader else 0,
        log=state.log_path(home, service.name),
    )


def _endpoints(home: Path, records: dict[str, Record]) -> Endpoints:
    port = {name: record.port for name, record in records.items()}
    return Endpoints(
        data_dir=home,
        log_dir=home / "logs",
        s3=seaweed.endpoint(home, port["s3"]) if "s3" in port else None,
        prefect_api_url=url(port["prefect"], "/api") if "prefect" in port else None,
        prefect_ui_url=url(port["prefect"]) if "prefect" in port else None,
        mlflow_uri=url(port["mlflow"]) if "mlflow" in port else None,
    )


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log file (of its last 16 KB), or a note that there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error.strerror})"
