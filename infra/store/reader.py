"""Reading the commit log: the fold of its records, from wherever it may begin, and its past.

    log/{lsn:010d}.json   one record each; the lsns have no gaps, so "is there a record n" is monotonic
    head.json             {"lsn": n}: a recent record that carries a snapshot; a hint, may be stale or missing

Invariants
- A reader folds records in order from a snapshot, by getting the next key until there is none: no listing.
- A first fold costs a few requests, whatever the length of the log, also where the hint is lost.

An instance belongs to one thread.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from infra.store import inventory
from infra.store.errors import NotFound
from infra.store.objects import ObjectStore
from rl import records
from rl.errors import DeadlineExceeded, LogCorrupt, LogTooNew
from rl.ledger import Ledger
from rl.records import Record, Rollback, Step

POLL_S = (0.05, 1.0)
"""First and longest pause between two looks for the next record."""
READERS = 16
"""Records read at once, where the past is asked for."""


class LogReader:
    """One run's log, read only. `prefix` is the run's, with a closing slash; `ledger` is the fold of what was read."""

    def __init__(self, store: ObjectStore, prefix: str):
        self.store = store
        self.ledger = Ledger()
        self._prefix = prefix

    def sync(self) -> Ledger:
        """Read what is new. Raises LogCorrupt or a StoreError."""
        if self.ledger.lsn == 0:
            self.ledger = self._hinted() or self._fold_to(self._newest())
        while (record := self.read(self.ledger.lsn + 1)) is not None:
            self.ledger.apply(record)
        return self.ledger

    def read(self, lsn: int) -> Record | None:
        """One record, None when there is none. Raises LogCorrupt for an object that is no record of this lsn,
        LogTooNew for one of a newer Rollmill."""
        key = self._key(lsn)
        try:
            record = records.decode(self.store.get(key))
        except NotFound:
            return None
        except LogTooNew as error:
            raise LogTooNew(f"{key}: {error}") from error
        except ValidationError as error:
            raise LogCorrupt(f"{key}: not a record of this format: {error.errors()[0]['msg']}") from error
        if record.lsn != lsn:
            raise LogCorrupt(f"{key}: holds record {record.lsn}")
        return record

    def records(self, from_lsn: int = 1) -> Iterator[Record]:
        """The records from `from_lsn` on, in order, up to the newest one at the time of asking."""
        while (record := self.read(from_lsn)) is not None:
            yield record
            from_lsn += 1

    def history(self) -> list[Record]:
        """Every record up to now, many read at once: for people."""
        newest = self.sync().lsn
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self._there, range(1, newest + 1)))

    def steps_after(self, version: int) -> list[Step]:
        """The step records of the live line after `version` up to the head, in order: what a trainer that
        restored `version` replays. Reads backwards from the newest record."""
        # below are the versions that no later rollback took off the line, of which the ledger keeps but the end
        live = self.ledger.next_version
        steps: list[Step] = []
        for lsn in range(self.ledger.lsn, 0, -1):
            record = self._there(lsn)
            if isinstance(record, Rollback):
                live = min(live, record.to + 1)
            elif isinstance(record, Step) and record.version == version:
                return steps[::-1]
            elif isinstance(record, Step) and version < record.version < live:
                steps.append(record)
        raise LogCorrupt(f"version {version} is in no step record")

    def step(self, version: int) -> Step | None:
        """The record of a version, also of one that was rolled back, among those that were read; None when there is
        none. Costs a few requests, whatever the length of the log: no version is below an earlier one."""
        lsns = range(1, self.ledger.lsn + 1)
        at = bisect_left(lsns, True, key=lambda lsn: (n := self._next_step(lsn)) is None or n.version >= version)
        found = self._next_step(at + 1)
        return found if found is not None and found.version == version else None

    def _next_step(self, lsn: int) -> Step | None:
        """The first step record from `lsn` on."""
        records = map(self._there, range(lsn, self.ledger.lsn + 1))
        return next((record for record in records if isinstance(record, Step)), None)

    def as_of(self, age_s: float) -> Ledger:
        """The ledger as it was `age_s` seconds ago, by the store's clock: whoever reads the log at least that often
        knows no less. Costs a few requests, whatever the length of the log."""
        lsns = range(1, self.ledger.lsn + 1)
        newest = bisect_left(lsns, True, key=lambda lsn: inventory.age_s(self.store, self._key(lsn)) < age_s)
        return self._fold_to(newest)

    def wait_for(
        self,
        predicate: Callable[[Ledger], bool],
        deadline_s: float,
        what: str = "a condition on the commit log",
    ) -> Ledger:
        """Follow the log until `predicate` holds. Raises DeadlineExceeded naming `what`."""
        end = time.monotonic() + deadline_s
        pause, longest = POLL_S
        while not predicate(self.sync()):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{what} was awaited for {deadline_s:.0f} s; the log is at record {self.ledger.lsn}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return self.ledger

    def _fold_to(self, lsn: int) -> Ledger:
        """The ledger after record `lsn`, from the newest snapshot up to there; the empty one for 0."""
        start = lsn
        while start > 0 and (record := self._there(start)).snapshot is None:
            start -= 1
        ledger = Ledger.from_snapshot(start, record.snapshot) if start > 0 and record.snapshot else Ledger()
        for between in range(start + 1, lsn + 1):
            ledger.apply(self._there(between))
        return ledger

    def _hinted(self) -> Ledger | None:
        """The fold up to the record that the hint names, if it carries a snapshot."""
        try:
            lsn = int(json.loads(self.store.get(self._prefix + "head.json"))["lsn"])
        except (NotFound, ValueError, LookupError, TypeError):
            return None
        record = self.read(lsn) if lsn > 0 else None
        if record is None or record.snapshot is None:
            return None
        return Ledger.from_snapshot(lsn, record.snapshot)

    def _newest(self) -> int:
        """The newest record, found without the hint: by doubling, then by halving."""
        high = 1
        while self.store.exists(self._key(high)):
            high *= 2
        missing = bisect_left(range(high // 2, high), True, key=lambda n: n > 0 and not self.store.exists(self._key(n)))
        return high // 2 + missing - 1

    def _there(self, lsn: int) -> Record:
        record = self.read(lsn)
        if record is None:
            raise LogCorrupt(f"{self._key(lsn)}: missing, though later records exist")
        return record

    def _key(self, lsn: int) -> str:
        return f"{self._prefix}log/{lsn:010d}.json"
