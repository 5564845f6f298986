"""A second account of a run, kept from its records alone and independently of `rl.ledger`: what an audit believes.

The ledger is what the system runs on: a bounded fold, restored from snapshots, which refuses a record that breaks a
rule. The account keeps the fate of every attempt ever closed and the parent of every version, takes every record as
it is, and says what is wrong with it; a snapshot is held against it field by field.

Invariant: it reads no snapshot to go on, so a wrong one can not hide itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rl.ledger import LINE
from rl.records import Drop, Fence, GcFloor, Mark, Outcome, Record, Retain, Rollback, Settle, Snapshot, StateRef, Step
from rl.trajectory import Uid


class Kind(StrEnum):
    """What is wrong."""

    LOST = "lost"
    """Work is gone: a record, a problem that nobody trained or gave up, a write that was acknowledged."""
    DOUBLED = "doubled"
    """Something counts twice: an attempt, a problem on the live line, a version number."""
    STALE = "staleness_violations"
    """A trained sample is older than alpha, or of a version that was rolled back."""
    UNREADABLE = "unreadable"
    """An object that a record names is missing or not what it must be."""
    BROKEN = "broken_rules"
    """A record breaks a rule of the log: a wrong base, a fenced writer, a floor that falls, a false snapshot."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and where."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class Account:
    """Feed it every record from the first one on with `note`; `findings` is what was wrong so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.lsn = 0
        self.fates: dict[Uid, str] = {}
        """`trained`, or the reason of its drop, for every attempt ever closed."""
        self.trained: dict[int, tuple[Uid, int]] = {}
        """By ordinal, on the live line: the attempt and the version that trained it."""
        self.abandoned: dict[int, str] = {}
        self.granted: dict[int, int] = {}
        self.line: list[int] = []
        self.states: dict[int, StateRef] = {}
        """Of every version ever committed."""
        self.writer: str | None = None
        """Who holds the newest fence."""
        self.fence = 0
        self.floor = 0
        self.pins: set[int] = set()
        self.deleted: set[int] = set()
        self._fenced: set[str] = set()

    @property
    def head(self) -> int | None:
        return self.line[-1] if self.line else None

    def settled(self, ordinal: int) -> bool:
        return ordinal in self.trained or ordinal in self.abandoned

    def is_open(self, uid: Uid) -> bool:
        return not self.settled(uid.ordinal) and self.granted.get(uid.ordinal, 0) == uid.attempt

    def lag(self, start: int) -> int | None:
        """Edges of the live line from `start` to the head; None when `start` is not on it."""
        return len(self.line) - 1 - self.line.index(start) if start in self.line else None

    def may_be_gone(self, version: int) -> bool:
        """Whether the state of a version may have been deleted."""
        return version in self.deleted or (version < self.floor and version not in self.pins)

    def outstanding(self) -> Iterator[Uid]:
        """Open attempts of the ordinals below the highest one that any record speaks of."""
        top = max((uid.ordinal for uid in self.fates), default=-1)
        return (Uid(o, self.granted.get(o, 0)) for o in range(top + 1) if not self.settled(o))

    def say(self, kind: Kind, what: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(kind, what))

    # -- records -------------------------------------------------------------------------------------

    def note(self, record: Record) -> None:
        """Take one record, whatever it says."""
        if record.lsn != self.lsn + 1:
            self.say(Kind.LOST, f"record {record.lsn} comes after {self.lsn}")
        self.lsn = record.lsn
        if not isinstance(record, Fence) and record.writer in self._fenced:
            self.say(Kind.BROKEN, f"record {record.lsn} is by {record.writer}, which was fenced before")
        match record:
            case Fence():
                if self.writer is not None:
                    self._fenced.add(self.writer)
                self._fenced.discard(record.writer)
                self.fence, self.writer = record.lsn, record.writer
            case Step():
                self._step(record)
            case Settle():
                self._drop(record.lsn, record.dropped)
            case Rollback():
                self._roll_back(record)
            case GcFloor():
                if record.version < self.floor:
                    self.say(Kind.BROKEN, f"record {record.lsn}: the floor falls from {self.floor} to {record.version}")
                self.floor = record.version
            case Retain():
                self._retain(record)
        if record.snapshot is not None:
            self.compare(record.lsn, record.snapshot)

    def _step(self, record: Step) -> None:
        if record.version in self.states:
            self.say(Kind.DOUBLED, f"record {record.lsn}: version {record.version} exists already")
        elif record.version != len(self.states):
            self.say(Kind.BROKEN, f"record {record.lsn}: version {record.version} follows {len(self.states) - 1}")
        if record.base != self.head:
            self.say(Kind.BROKEN, f"record {record.lsn}: built on version {record.base}, but the head is {self.head}")
        if record.writer != self.writer:
            self.say(Kind.BROKEN, f"record {record.lsn} is by {record.writer}, but {self.writer} holds the fence")
        for uid in map(Uid.parse, record.trained):
            self._close(record.lsn, uid, "trained")
            self.trained[uid.ordinal] = (uid, record.version)
        self._drop(record.lsn, record.dropped)
        self.line.append(record.version)
        self.states[record.version] = record.state

    def _drop(self, lsn: int, dropped: tuple[Drop, ...]) -> None:
        for drop in dropped:
            uid = Uid.parse(drop.uid)
            self._close(lsn, uid, drop.reason.value)
            if drop.outcome is Outcome.ABANDON:
                self.abandoned[uid.ordinal] = drop.reason.value
            else:
                self.granted[uid.ordinal] = uid.attempt + 1

    def _close(self, lsn: int, uid: Uid, fate: str) -> None:
        if uid in self.fates:
            self.say(Kind.DOUBLED, f"record {lsn}: attempt {uid} is {fate}, but it was {self.fates[uid]} before")
        elif self.settled(uid.ordinal):
            self.say(Kind.DOUBLED, f"record {lsn}: attempt {uid} is {fate}, but ordinal {uid.ordinal} is settled")
        elif not self.is_open(uid):
            self.say(Kind.BROKEN, f"record {lsn}: attempt {uid} was never granted")
        self.fates[uid] = fate

    def _roll_back(self, record: Rollback) -> None:
        if record.to not in self.line:
            self.say(Kind.BROKEN, f"record {record.lsn}: goes back to version {record.to}, which is not live")
            return
        if record.writer != self.writer:
            self.say(Kind.BROKEN, f"record {record.lsn} is by {record.writer}, but {self.writer} holds the fence")
        if record.snapshot is None:
            self.say(Kind.BROKEN, f"record {record.lsn}: goes back without a snapshot")
        self.line = self.line[: self.line.index(record.to) + 1]
        live = set(self.line)
        for ordinal, (uid, version) in list(self.trained.items()):
            if version not in live:
                del self.trained[ordinal]
                self.granted[ordinal] = uid.attempt + 1

    def _retain(self, record: Retain) -> None:
        if record.mark is Mark.PIN:
            if self.may_be_gone(record.version):
                self.say(Kind.BROKEN, f"record {record.lsn}: pins version {record.version}, which may be deleted")
            self.pins.add(record.version)
        elif record.mark is Mark.UNPIN:
            self.pins.discard(record.version)
        else:
            if record.version in self.pins or record.version == self.head:
                self.say(Kind.BROKEN, f"record {record.lsn}: deletes version {record.version}, which is in use")
            self.deleted.add(record.version)

    # -- snapshots -----------------------------------------------------------------------------------

    def compare(self, lsn: int, snapshot: Snapshot) -> None:
        """Hold a snapshot, which is to hold after record `lsn`, against the records up to it."""
        ours = {
            "head": self.head,
            "next_version": len(self.states),
            "line": tuple(self.line[-LINE:]),
            "fence": self.fence,
            "gc_floor": self.floor,
            "trained_groups": len(self.trained),
            "dropped_groups": dict(Counter(fate for fate in self.fates.values() if fate != "trained")),
        }
        for name, value in ours.items():
            if (claimed := getattr(snapshot, name)) != value:
                self.say(Kind.BROKEN, f"the snapshot of record {lsn} says {name} {claimed}, the records say {value}")
        above = set(snapshot.settled_above)
        top = max([snapshot.low_water, *above, *self.trained, *self.abandoned, *snapshot.attempts, *self.granted])
        for ordinal in range(top + 1):
            claimed = ordinal < snapshot.low_water or ordinal in above
            if claimed and not self.settled(ordinal):
                self.say(Kind.LOST, f"the snapshot of record {lsn} settles ordinal {ordinal}, which nobody did")
            elif self.settled(ordinal) and not claimed:
                self.say(Kind.DOUBLED, f"the snapshot of record {lsn} offers ordinal {ordinal}, which is settled")
            elif not claimed and snapshot.attempts.get(ordinal, 0) != self.granted.get(ordinal, 0):
                self.say(
                    Kind.DOUBLED if snapshot.attempts.get(ordinal, 0) < self.granted.get(ordinal, 0) else Kind.LOST,
                    f"the snapshot of record {lsn} has attempt {snapshot.attempts.get(ordinal, 0)} of ordinal "
                    f"{ordinal} open, the records {self.granted.get(ordinal, 0)}",
                )
