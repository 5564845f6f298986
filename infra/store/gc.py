"""Garbage collection: what the log has let go is deleted, after a grace period.

    policy -> gc_floor record ... grace ... segments and states below it, manifest first
    retain record (delete)    ... grace ... that version's state
    a state that no record names and none will: at once

Invariants
- Nothing is deleted but what the log let go `grace_s` ago, by the store's own clock: a reader whose view of the log is
  younger than that meets no missing object. So a collection is always after a commit, never part of one.
- Never the log, the hint, the base, the configuration or an evaluation; never a pinned state, nor one that the policy
  keeps; never what a resumed trainer needs (the ledger refuses such a floor).
- A prefix `state/{lsn}-{nonce}/` is an orphan only if a step that names another one, or a fence, is at its lsn or
  later: until then the trainer that filled it may still commit it.
- A manifest goes before the files that it names, in a request of its own: what is half deleted does not exist to any
  reader. A collection that was cut short is finished by the next one; two at once, or one of a process that knows only
  an older log, delete nothing else.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile

from infra.store.errors import Overtaken
from infra.store.inventory import Entry, abort_uploads, entries
from infra.store.log import CommitLog
from infra.store.manifest import MANIFEST
from rl.errors import RollmillError
from rl.ledger import Ledger
from rl.records import Fence, Step
from rl.retention import Retention, Why

log = logging.getLogger(__name__)

ORPHAN = -1
"""In place of a version: the state of a step that was never committed."""
_STATE = re.compile(r"state/(\d{10})-[^/]+/")
_SEGMENT = re.compile(r"groups/(\d{10})/")


@dataclass(frozen=True, slots=True)
class StoredState:
    """A prefix `state/{lsn}-{nonce}/` with all that lies under it."""

    prefix: str
    version: int | None
    """The version whose record names it; ORPHAN; None while that may still come."""
    keys: tuple[str, ...]
    """In the bucket; the manifest first, if it is there."""
    size: int
    """Bytes."""
    age_s: float
    whole: bool
    """Whether the manifest is there."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What may go and what stays, at one moment."""

    ledger: Ledger
    states: list[StoredState]
    reasons: dict[int, set[Why]]
    """Why the state of a version stays, of those that are there."""
    floor: int
    """What the policy makes of the gc floor."""
    in_force: int
    """The floor that was there a grace period ago already: segments below may be deleted now."""
    doomed: list[StoredState]
    segments: list[Entry]
    """Segments of versions below `in_force`."""

    @property
    def size(self) -> int:
        """Bytes to be deleted."""
        return sum(state.size for state in self.doomed) + sum(entry.size for entry in self.segments)


class Collector:
    """Collects one run. `prefix` is the run's, with a closing slash; `commits` is the collector's own. `awaited` tells
    which versions somebody is still to load."""

    def __init__(
        self,
        commits: CommitLog,
        prefix: str,
        retention: Retention,
        grace_s: float,
        awaited: Callable[[Ledger], Collection[int]] = lambda ledger: (),
    ) -> None:
        self._commits, self._store, self._prefix = commits, commits.store, prefix
        self._retention, self._grace_s, self._awaited = retention, grace_s, awaited
        self._owners: dict[str, int] = {}

    def survey(self) -> Survey:
        """Look, and change nothing."""
        ledger = self._commits.sync()
        states = list(self._states(ledger))
        ages = {s.version: s.age_s for s in states if s.version is not None and s.version != ORPHAN and s.whole}
        awaited, past = self._awaited(ledger), self._commits.as_of(self._grace_s)
        reasons = self._retention.reasons(ledger, ages, awaited)
        return Survey(
            ledger,
            states,
            reasons,
            self._retention.floor(ledger, ages, awaited),
            past.gc_floor,
            [state for state in states if _goes(state, ledger, past, reasons)],
            list(takewhile(lambda entry: self._version(entry) < past.gc_floor, self._segments())),
        )

    def collect(self) -> Survey:
        """Raise the floor as the policy wants, then delete what may go now; returns what was done. Raises StoreError
        or LogCorrupt; what was not reached is deleted the next time."""
        found = self.survey()
        if found.floor > found.ledger.gc_floor:
            try:
                self._commits.append_gc_floor(found.floor)
            except Overtaken as error:  # a rollback came first
                log.info("the gc floor stays: %s", error)
            found = self.survey()
        self._store.delete(state.keys[0] for state in found.doomed)
        self._store.delete(key for state in found.doomed for key in state.keys[1:])
        self._store.delete(entry.key for entry in found.segments)
        abort_uploads(self._store, f"{self._prefix}state/", lambda key: self._passed(found.ledger, key))
        if found.ledger.head is not None:  # so the base is whole
            abort_uploads(self._store, f"{self._prefix}base/", lambda key: True)
        return found

    # -- inside --------------------------------------------------------------------------------------

    def _states(self, ledger: Ledger) -> Iterator[StoredState]:
        listed = ((self._below(entry.key), entry) for entry in entries(self._store, f"{self._prefix}state/"))
        named = ((match[0], entry) for key, entry in listed if (match := _STATE.match(key)))
        for prefix, group in groupby(named, key=lambda pair: pair[0]):
            found = sorted((entry for _, entry in group), key=lambda entry: not entry.key.endswith(f"/{MANIFEST}"))
            yield StoredState(
                prefix,
                self._owner(ledger, prefix),
                tuple(entry.key for entry in found),
                sum(entry.size for entry in found),
                found[0].age_s,
                found[0].key == f"{self._prefix}{prefix}{MANIFEST}",
            )

    def _segments(self) -> Iterator[Entry]:
        return (e for e in entries(self._store, f"{self._prefix}groups/") if _SEGMENT.match(self._below(e.key)))

    def _version(self, entry: Entry) -> int:
        match = _SEGMENT.match(self._below(entry.key))
        assert match is not None
        return int(match[1])

    def _owner(self, ledger: Ledger, prefix: str) -> int | None:
        """The version that names this prefix, ORPHAN, or None when that is not settled."""
        match = _STATE.fullmatch(prefix)
        assert match is not None
        for lsn in range(int(match[1]), ledger.lsn + 1) if prefix not in self._owners else ():
            record = self._commits.read(lsn)
            if isinstance(record, Step | Fence):
                ours = isinstance(record, Step) and record.state.prefix == prefix
                self._owners[prefix] = record.version if isinstance(record, Step) and ours else ORPHAN
                break
        return self._owners.get(prefix)

    def _passed(self, ledger: Ledger, key: str) -> bool:
        """Whether nothing is uploaded to the state of this key any more, unless by a fenced trainer."""
        match = _STATE.match(self._below(key))
        return match is not None and self._owner(ledger, match[0]) is not None

    def _below(self, key: str) -> str:
        return key.removeprefix(self._prefix)


def _goes(state: StoredState, now: Ledger, past: Ledger, reasons: Mapping[int, set[Why]]) -> bool:
    """Whether a state may be deleted. `past` is the ledger of a grace period ago; `reasons` knows whole states only: a
    half deleted one is of no use to anybody."""
    version = state.version
    if version is None or version == ORPHAN:
        return version == ORPHAN
    pinned = version in past.pins or version in now.pins
    return version in past.deleted or (version < past.gc_floor and not pinned and not reasons.get(version))


class Background:
    """Collects after commits, beside whatever the process does: one at a time, `every` versions (None: never). A
    failure is told and tried again the next time; it never ends a run."""

    def __init__(self, collector: Callable[[], Collector], every: int | None) -> None:
        self._collector, self._every = collector, every
        self._due = every or 0
        self._running: threading.Thread | None = None

    def after(self, version: int) -> None:
        """A version was committed. Returns at once."""
        if self._every is None or version < self._due or (self._running is not None and self._running.is_alive()):
            return
        self._due = version + self._every
        # a daemon: the end of the process need not wait for it, the next collection finishes what it left
        self._running = threading.Thread(target=self._collect, name="gc", daemon=True)
        self._running.start()

    def wait(self, deadline_s: float) -> None:
        """Until the collection that runs is done, or the deadline is past."""
        if self._running is not None:
            self._running.join(deadline_s)

    def _collect(self) -> None:
        try:
            done = self._collector().collect()
            log.info("deleted %d states and %d segments", len(done.doomed), len(done.segments))
        except RollmillError as error:
            log.warning("garbage collection failed and is tried again after version %d: %s", self._due, error)
