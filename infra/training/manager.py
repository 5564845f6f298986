"""The multi-task manager: which jobs a trainer trains, and what becomes of them.

    look: the job book -> a desk for each job that runs here; let go of the others; tell the book how desks ended

Invariants
- The job book decides; what a job has come to is written there once, by whoever it happened to.
- Jobs of one tenant share its weight: with more jobs it does not get more of the trainer.
- A job that fails for reasons that are not its own is tried again, with growing pauses, as often in a row as
  `restarts.trainer` says; a version that it commits in between starts the count anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.store.jobs import JobBook
from infra.training.blame import Blame
from infra.training.desk import Desk, Outcome, Shop
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError
from rl.jobs import Entry, JobRefused, State, shares

log = logging.getLogger(__name__)

BACKOFF_S = (1.0, 30.0)
"""First and longest pause before a job is tried again."""
CROWD = 8
"""Jobs above which each looks less often for its batch, so that all together ask the store no more."""
DEATHS = 2
"""So many deaths of the process in a row, all in turns of one job, end the job."""
STATUS_S = 5.0
"""Between two statuses."""


@dataclass
class _Trouble:
    """Of a job that failed for reasons that are not its own."""

    failures: int
    again_at: float


class Manager:
    """Of trainer number `number`. Belongs to one thread, which calls `look` about once a second, and `close`."""

    def __init__(
        self,
        service: ServiceConfig,
        number: int,
        book: JobBook,
        shop: Shop,
        blame: Blame,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._number, self._book, self._shop = service, number, book, shop
        self._blame, self._deaths, self._clock = blame, dict(blame.strikes), clock
        self._desks: dict[str, Desk] = {}
        self._leaving: list[Desk] = []
        self._left: set[str] = set()
        """Jobs that another process took, which the book calls this very trainer: a newer one, then."""
        self._trouble: dict[str, _Trouble] = {}
        self._since, self._told = time.time(), -STATUS_S

    def look(self) -> None:
        """Raises LogCorrupt or a StoreError of the book."""
        jobs = self._book.sync()
        ours = {e.job.id: e for e in jobs.of(State.RUNNING) if e.trainer == self._number}
        self._let_go(ours)
        for desk in list(self._desks.values()):
            if desk.outcome is not None and self._end(desk, desk.outcome):
                del ours[desk.id]
        self._shop.turns.entitle(shares(ours.values()))
        for id, entry in ours.items():
            if id not in self._desks and self._may_begin(entry):
                self._begin(entry)
        self._tell()

    def close(self, deadline_s: float) -> None:
        """Let go of everything."""
        for desk in self._desks.values():
            desk.stop()
        end = self._clock() + deadline_s
        for desk in [*self._desks.values(), *self._leaving]:
            if not desk.join(max(0.0, end - self._clock())):
                log.warning("job %s did not end within %.0f s", desk.id, deadline_s)

    # -- inside ------------------------------------------------------------------------------------------

    def _let_go(self, ours: dict[str, Entry]) -> None:
        for id in self._desks.keys() - ours.keys():
            desk = self._desks.pop(id)
            desk.stop()
            self._leaving.append(desk)
        self._leaving = [desk for desk in self._leaving if desk.outcome is None]
        self._left &= ours.keys()
        for id in self._trouble.keys() - ours.keys():
            del self._trouble[id]

    def _may_begin(self, entry: Entry) -> bool:
        id = entry.job.id
        if any(desk.id == id for desk in self._leaving):
            return False  # its last desk has not ended yet
        trouble = self._trouble.get(id)
        return id not in self._left and (trouble is None or self._clock() >= trouble.again_at)

    def _begin(self, entry: Entry) -> None:
        id, deaths = entry.job.id, self._deaths.pop(entry.job.id, 0)
        if deaths >= DEATHS:
            self._over(id, f"the trainer died {deaths} times in a row while it trained this job; is it out of memory?")
            self._shop.turns.errand(lambda: self._blame.end(id))
            return
        try:
            config = entry.job.run(self._service)
        except RollmillError as error:
            self._over(id, f"{type(error).__name__}: {error}")
            return
        log.info("job %s: begun", id)
        self._desks[id] = Desk(id, config, self._shop, lambda: max(1.0, len(self._desks) / CROWD))

    def _end(self, desk: Desk, outcome: Outcome) -> bool:
        """Whether its job is over."""
        id = desk.id
        del self._desks[id]
        if outcome.let_go:
            log.info("job %s: another trainer has it", id)
            self._left.add(id)
            return False
        if outcome.passing and self._again(id, desk.steps > 0):
            log.warning("job %s: will be tried again: %s", id, outcome.reason)
            return False
        self._over(id, None if outcome.error is None else outcome.reason)
        return True

    def _again(self, id: str, got_on: bool) -> bool:
        trouble = self._trouble.get(id)
        failures = 1 if trouble is None or got_on else trouble.failures + 1
        if failures > self._service.restarts.trainer:
            return False
        first, longest = BACKOFF_S
        self._trouble[id] = _Trouble(failures, self._clock() + min(first * 2 ** (failures - 1), longest))
        return True

    def _over(self, id: str, failure: str | None) -> None:
        log.info("job %s: %s", id, failure or "done")
        try:
            self._book.end(id, failure)
        except JobRefused as error:  # somebody was first
            log.info("%s", error)

    def _tell(self) -> None:
        """What this trainer does, for people and tables."""
        if self._clock() - self._told < STATUS_S:
            return
        self._told = self._clock()
        turns, roster = self._shop.turns, self._shop.roster
        status = {
            "since": self._since,
            "time": time.time(),
            "busy_s": turns.busy_s,
            "jobs": sorted(self._desks),
            "resident": len(roster.resident),
            "waiting": len(turns.waiting),
            "restores": roster.counts.restores,
            "evictions": roster.counts.evictions,
        }
        key = f"{self._service.prefix}trainers/{self._number}.json"
        self._shop.store.put(key, json.dumps(status).encode())
