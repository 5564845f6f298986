"""The desk of a service: gives jobs their places, tells what becomes of them and what they learned, cleans up.

Invariants
- A job runs only once its configuration is written to its own prefix, where whatever works on a run finds it; one that
  the service can not do, or whose prefix is another run's, fails by name and hurts nobody.
- Garbage is collected for every job beside its training, by the retention policy of the service.
- At its end it waits for a report or a deletion under way no longer than END_S in all; the next start makes up for it.
- Of a deleted job the log stays, so that its name is never used for another one; everything else goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic, time

from rich.console import Console

from flows.beside import Beside
from flows.job_reports import JobReports
from flows.learn import collector
from flows.prepare import claim
from infra.proxy.client import ControlClient, ProxyUnavailable
from infra.proxy.wire import ServiceStatus, TenantStatus
from infra.store.errors import StoreUnavailable
from infra.store.gc import Background
from infra.store.jobs import JobBook
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from rl.config.tenants import ServiceConfig
from rl.errors import DeadlineExceeded, RollmillError
from rl.jobs import Entry, JobRefused, State, next_starts

GARBAGE_S = 5.0
"""Between two looks for garbage."""
QUIET_S = 5.0
"""Rollout, trainer and workers may write for a moment after a job has ended; it is erased when for so long nothing
was."""
END_S = 10.0
"""For what is under way when the service ends."""
NOTE_S = 2.0
"""Between two notes of what the engines did."""


class Desk:
    """Of one service that runs."""

    def __init__(self, service: ServiceConfig, store: ObjectStore, console: Console):
        self._service, self._store, self._console = service, store, console
        self._book = JobBook(store, service.name)
        self._told: dict[str, State] = {}
        self._configs: dict[str, RunConfig] = {}
        self._garbage: dict[str, Background] = {}
        self._collected = self._noted = 0.0
        self._since: tuple[float, float] | None = None
        self._reports = JobReports(service, store, console)
        self._eraser = Beside("erase")
        self._erasing: dict[str, Future[int]] = {}
        self._quiet: dict[str, float] = {}
        """When to look again whether anything was written since the last time."""

    @property
    def idle(self) -> bool:
        """Whether there were jobs, and none has anything left to be done."""
        jobs = self._book.jobs
        return bool(jobs.entries) and not jobs.of(State.WAITING, State.RUNNING, State.DELETING) and self._reports.idle

    def look(self, trainers: frozenset[int], proxy: ControlClient) -> None:
        """Do what is to be done now. Raises StoreUnavailable, LogCorrupt."""
        jobs = self._book.sync()
        for id, trainer in next_starts(jobs, trainers, self._service.running):
            self._start(jobs.entry(id), trainer)
        for entry in jobs.of(State.DELETING):
            self._erase(entry)
        self._tell()
        if monotonic() - self._noted >= NOTE_S:
            self._noted = monotonic()
            with suppress(ProxyUnavailable, DeadlineExceeded):  # it is being started again
                self._note(proxy.tenants())

    def close(self) -> None:
        self._tell()
        end = monotonic() + END_S
        self._reports.close(END_S)
        if not self._eraser.close(max(0.0, end - monotonic())):
            self._console.print("a deletion is not done; it goes on at the next start", highlight=False)

    def _config(self, entry: Entry) -> RunConfig:
        """The job as a run. Raises ConfigError."""
        if (config := self._configs.get(entry.job.id)) is None:
            config = self._configs[entry.job.id] = entry.job.run(self._service)
        return config

    def _start(self, entry: Entry, trainer: int) -> None:
        id = entry.job.id
        try:
            claim(self._store, self._config(entry), resume=True)
        except StoreUnavailable:
            raise
        except RollmillError as error:
            self._end(id, error)
            return
        with suppress(JobRefused):  # it was paused or cancelled this moment
            self._book.start(id, trainer)

    def _end(self, id: str, error: RollmillError) -> None:
        with suppress(JobRefused):  # somebody ended it before
            self._book.end(id, str(error))

    def _tell(self) -> None:
        """Say what changed."""
        for id, entry in self._book.jobs.entries.items():
            if (before := self._told.get(id)) is not entry.state:
                self._told[id] = entry.state
                self._reports.changed(entry, before is not None)
                why = f": {entry.failure}" if entry.failure is not None else ""
                self._console.print(f"{id} {entry.state}{why}", highlight=False)

    def _note(self, status: ServiceStatus) -> None:
        """Write down what the engines did since this service was started: `engines.json`."""
        busy = float(status.engine.get("busy_s", 0.0))
        if self._since is None or busy < self._since[1]:  # an engine that was started again counts from 0
            self._since = (time(), busy)
        since, before = self._since
        told = {
            "since": since,
            "now": time(),
            "busy_s": busy - before,
            "engines": max(1, status.engine.get("ready", 1)),
        }
        self._store.put(f"{self._service.prefix}engines.json", json.dumps(told).encode())
        if monotonic() - self._collected >= GARBAGE_S:
            self._collected = monotonic()
            self._collect(status.tenants)

    def _collect(self, tenants: Mapping[str, TenantStatus]) -> None:
        for entry in self._book.jobs.running:
            try:
                config = self._config(entry)
            except RollmillError as error:  # it fits the service no more, which was started with another configuration
                self._end(entry.job.id, error)
                continue
            found = tenants.get(config.served_as)
            if found is not None and found.head is not None:
                background = self._garbage.setdefault(
                    entry.job.id, Background(partial(collector, config), config.retention.collect_every)
                )
                background.after(found.head)

    def _erase(self, entry: Entry) -> None:
        id = entry.job.id
        running = self._erasing.get(id)
        if self._reports.making(id):  # it would write what nobody deletes any more
            return
        if running is None:
            if monotonic() >= self._quiet.get(id, 0.0):
                self._erasing[id] = self._eraser.submit(partial(self._delete, f"{id}/"))
        elif running.done():
            del self._erasing[id]
            if (error := running.exception()) is None:
                if id in self._quiet and running.result() == 0:
                    del self._quiet[id]
                    self._book.erase(id)
                else:
                    self._quiet[id] = monotonic() + QUIET_S
            elif not isinstance(error, RollmillError):
                raise error
            else:
                self._console.print(f"{id} is not deleted yet: {error}", highlight=False)

    def _delete(self, prefix: str) -> int:
        """How many objects there were."""
        doomed = [key for key in self._store.keys(prefix) if not key.startswith(f"{prefix}log/")]
        self._store.delete(doomed)
        return len(doomed)
