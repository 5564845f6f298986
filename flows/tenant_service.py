"""A service as those who use it see it, from a notebook or the command line; it may run anywhere.

    service = Tenants(load_service("my-service.yaml"))
    service.submit({"tenant": "ann", "name": "lake", "domains": ["lake"], "training": {"steps": 50}})
    service.wait("ann/lake")
    service.table()

Invariants: everything goes through the job book and the logs in the store, so that nothing needs an address of the
running service; a job that it can not do is refused here, by one line, before it is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import yaml

from flows.configure import cross_check, override, read_section
from flows.report import Report, write_report
from infra.store.errors import NotFound
from infra.store.jobs import JobBook
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from infra.tracking.text import text_table
from rl.config.load import validate_as
from rl.config.run import RunConfig
from rl.config.tenants import Job, ServiceConfig
from rl.errors import DeadlineExceeded, LogCorrupt, LogTooNew
from rl.jobs import OVER, Entry, Order, State
from rl.records import Step
from rl.tenancy import JobFigures, figures, with_shares

POLL_S = 0.5
OF_A_JOB = OVER | {State.DELETED}


def load_service(source: str, overrides: Iterable[str] = ()) -> ServiceConfig:
    """The service of a preset or a file; `overrides` are `dotted.field=value` with YAML values."""
    return read_section(ServiceConfig, source, dict(map(override, overrides)), "services")


def load_job(source: str, overrides: Iterable[str] = ()) -> Job:
    """The job of a file."""
    return read_section(Job, source, dict(map(override, overrides)), None)


class Tenants:
    """Of one service."""

    def __init__(self, service: ServiceConfig):
        self.service = service
        self._store = ObjectStore.connect(service.store)
        self._book = JobBook(self._store, service.name)

    def submit(self, job: Job | Mapping[str, Any]) -> Entry:
        """Raises ConfigError for a job that the service can not do, JobRefused for one whose name was used."""
        wanted = job if isinstance(job, Job) else validate_as(Job, job, "job")
        cross_check(wanted.run(self.service))
        self._book.submit(wanted)
        return self._book.jobs.entry(wanted.id)

    def order(self, id: str, order: Order) -> Entry:
        """Pause, resume, cancel or delete a job. Raises JobRefused."""
        self._book.order(id, order)
        return self._book.jobs.entry(id)

    def jobs(self) -> list[Entry]:
        """All that were ever submitted, in that order; deleted ones are left out."""
        return [entry for entry in self._book.sync().entries.values() if entry.state is not State.DELETED]

    def job(self, id: str) -> Entry:
        """Raises JobRefused where there is none."""
        return self._book.sync().entry(id)

    def head(self, id: str) -> int:
        """The newest version of a job; 0 also where there is none yet."""
        return LogReader(self._store, f"{id}/").sync().head or 0

    def config(self, id: str) -> RunConfig:
        """The job as a run, for whatever works on runs."""
        return self.job(id).job.run(self.service)

    def report(self, id: str, directory: Path) -> Report:
        """What a job learned so far, as files. Raises ConfigError for one without a version."""
        return write_report(self.config(id), self._store, directory, "job")

    def wait(self, id: str, deadline_s: float = 86400, until: Collection[State] = OF_A_JOB) -> Entry:
        """Until the job is over. Raises DeadlineExceeded."""
        end = monotonic() + deadline_s
        while (entry := self.job(id)).state not in until:
            if monotonic() > end:
                raise DeadlineExceeded(f"job {id} is {entry.state} after {deadline_s:g} s")
            sleep(POLL_S)
        return entry

    def figures(self) -> list[JobFigures]:
        """What each job got and gave. Reads every log."""
        return with_shares([self._figures(entry) for entry in self.jobs()])

    def _figures(self, entry: Entry) -> JobFigures:
        prefix = f"{entry.job.id}/"
        log = CommitLog(self._store, prefix, "observer")
        tokens = 0
        with suppress(NotFound):
            tokens = int(json.loads(self._store.get(f"{prefix}usage.json"))["tokens"])
        try:
            steps = [record for record in log.history() if isinstance(record, Step)]
        except (LogCorrupt, LogTooNew) as error:  # of this job alone: the others have their figures
            return replace(figures(entry, [], tokens), unread=str(error))
        return figures(entry, steps, tokens)

    def utilisation(self) -> dict[str, float]:
        """Of engines and trainers since the service was started: the share of the time that they were busy, of all of a
        kind together; what was not told yet is left out."""
        prefix = self.service.prefix
        kinds = {"engines": [f"{prefix}engines.json"]}
        kinds["trainers"] = [f"{prefix}trainers/{n}.json" for n in range(self.service.trainers)]
        found = {}
        for kind, keys in kinds.items():
            told = [json.loads(self._store.get(key)) for key in keys if self._store.exists(key)]
            wall = sum((one.get("now", time()) - one["since"]) * one.get("engines", 1) for one in told)
            if wall > 0:
                found[kind] = sum(one["busy_s"] for one in told) / wall
        return found

    def table(self, rows: Sequence[JobFigures] | None = None) -> str:
        """The figures as text."""
        rows = self.figures() if rows is None else rows
        unread = [f"{row.job}: its log can not be read: {row.unread}" for row in rows if row.unread]
        return "\n".join([text_table(COLUMNS, [_cells(row) for row in rows]), *unread])


COLUMNS = [
    "job", "state", "version", "reward", "first step s", "step s", "queue s", "trainer s", "tokens", "gap", "cost share"
]  # fmt: skip


def _cells(row: JobFigures) -> list[str]:
    return [
        row.job,
        row.state,
        f"{row.version}/{row.steps}",
        _number(row.reward),
        _number(row.time_to_first_step),
        _number(row.step_latency),
        _number(row.queue_wait),
        _number(row.trainer_s),
        str(row.tokens),
        _number(row.logprob_gap),
        _number(row.cost_share),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def as_json(rows: Sequence[JobFigures]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def as_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(json.loads(config.model_dump_json(by_alias=True)), sort_keys=False)


def write_config(config: RunConfig, path: Path) -> None:
    """As a file that the commands for runs take."""
    path.write_text(as_yaml(config))
