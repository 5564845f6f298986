"""What each job of a service learned: made when it is over, beside the others.

    over -> report of its log (`flows.report`) -> MLflow and Prefect (`flows.publication`), and its prefix in the store

    {tenant}/{job}/report/reward.png, timeline.png, timeline.html, report.json      for the tenant's own keys

Invariants: one at a time, on a thread of its own, so that it holds nobody up, nor the end of the service;
`report.json` is written last, and what has it is not made again when the service is started again; a report that can
not be made costs itself.
"""

from __future__ import annotations

import contextvars
from concurrent.futures import Future
from functools import partial

from rich.console import Console

from flows.beside import Beside
from flows.home import Home
from flows.publication import publish
from flows.report import write_report
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError
from rl.jobs import OVER, Entry

DONE = "report/report.json"


class JobReports:
    """Of one service that runs, in the flow run of this thread."""

    def __init__(self, service: ServiceConfig, store: ObjectStore, console: Console):
        self._service, self._store, self._console = service, store, console
        self._maker = Beside("reports")
        self._making: list[tuple[str, Future[None]]] = []

    @property
    def idle(self) -> bool:
        """Whether all are made."""
        return not self._left()

    def making(self, id: str) -> bool:
        """Whether something of this job's is still to be written."""
        return id in self._left()

    def changed(self, entry: Entry, known: bool) -> None:
        """A job came to this state; `known`: from another one, as seen from here. Returns at once."""
        if entry.state in OVER and self._service.tracking.enabled:
            context = contextvars.copy_context()  # which flow run this is
            made = self._maker.submit(partial(context.run, self._make, entry, known))
            self._making.append((entry.job.id, made))

    def close(self, within_s: float) -> None:
        """What was not begun, or is not done by then, is made when the service is started again."""
        if not self._maker.close(within_s):
            self._console.print("a report is not done; it is made at the next start", highlight=False)

    def _left(self) -> set[str]:
        """The jobs whose reports are not made yet."""
        self._making = [(id, made) for id, made in self._making if not made.done()]
        return {id for id, _ in self._making}

    def _make(self, entry: Entry, anew: bool) -> None:
        id = entry.job.id
        try:
            config = entry.job.run(self._service)
            there = not anew and self._store.exists(config.prefix + DONE)
            if there or not LogReader(self._store, config.prefix).sync().head:
                return
            report = write_report(config, self._store, Home.default().run(config), "job")
            for path in report.files:
                self._store.put(f"{config.prefix}report/{path.name}", path.read_bytes())
            publish(config, self._store, report)
        except (RollmillError, OSError) as error:
            self._console.print(f"{id}: no report: {error}", highlight=False)
