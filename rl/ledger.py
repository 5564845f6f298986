"""The fold of the commit log: which version is the head, and what became of every ordinal and attempt.

Invariants
- Ordinals are trained, abandoned with a reason, or outstanding; attempts are trained, dropped or open;
  disjoint and complete. An ordinal is settled (trained or abandoned) at most once on the live line.
- At any moment an outstanding ordinal has exactly one open attempt; dropping it grants the next one or
  abandons the ordinal.
- Versions are strictly monotonic and never reused; lag counts edges of the live line.
- What is needed to go on (the head, the newest full state, the window of alpha) is never marked deleted; a pin
  can not be made below the gc floor, where objects may be gone already.
- `from_snapshot(ledger.snapshot())` is the same ledger: a fold may start at any record with a snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from rl.errors import LogCorrupt
from rl.records import Drop, Fence, GcFloor, Mark, Outcome, Record, Retain, Rollback, Settle, Snapshot, StateRef, Step
from rl.trajectory import Uid

LINE = 64
"""How many versions of the live line are kept; alpha must stay well below. Full states may be further apart."""


class Ledger:
    """Mutable fold; feed it records in order with `apply`."""

    def __init__(self) -> None:
        self.lsn = 0
        self.fence = 0
        self.head: int | None = None
        self.next_version = 0
        self.line: list[int] = []
        self.states: dict[int, StateRef] = {}
        self.low_water = 0
        self.settled_above: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.strikes: dict[int, Counter[str]] = {}
        self.alpha: int | None = None
        self.gc_floor = 0
        self.pins: dict[int, StateRef] = {}
        self.deleted: set[int] = set()
        self.granted: dict[int, int] = {}
        self.trained_groups = 0
        self.dropped_groups: Counter[str] = Counter()

    @classmethod
    def from_snapshot(cls, lsn: int, snapshot: Snapshot) -> Ledger:
        ledger = cls()
        ledger.lsn = lsn
        ledger._restore(snapshot)
        return ledger

    def snapshot(self) -> Snapshot:
        """The state now, as a record may carry it."""
        return Snapshot(
            head=self.head,
            next_version=self.next_version,
            line=tuple(self.line),
            states=dict(sorted(self.states.items())),
            low_water=self.low_water,
            settled_above=tuple(sorted(self.settled_above)),
            attempts=dict(sorted(self.attempts.items())),
            strikes={o: dict(sorted(c.items())) for o, c in sorted(self.strikes.items())},
            alpha=self.alpha,
            fence=self.fence,
            gc_floor=self.gc_floor,
            pins=dict(sorted(self.pins.items())),
            deleted=tuple(sorted(self.deleted)),
            granted=dict(sorted(self.granted.items())),
            trained_groups=self.trained_groups,
            dropped_groups=dict(sorted(self.dropped_groups.items())),
        )

    def _restore(self, s: Snapshot) -> None:
        self.head, self.next_version, self.line = s.head, s.next_version, list(s.line)
        self.states = dict(s.states)
        self.low_water, self.settled_above = s.low_water, set(s.settled_above)
        self.attempts = dict(s.attempts)
        self.strikes = {o: Counter(c) for o, c in s.strikes.items()}
        self.alpha, self.fence, self.gc_floor = s.alpha, s.fence, s.gc_floor
        self.pins, self.deleted, self.granted = dict(s.pins), set(s.deleted), dict(s.granted)
        self.trained_groups, self.dropped_groups = s.trained_groups, Counter(s.dropped_groups)

    # -- reading -------------------------------------------------------------------------------------

    @property
    def newest_full(self) -> int | None:
        """The newest version of the live line that can be resumed from."""
        return max((v for v, state in self.states.items() if state.full), default=None)

    def lag(self, start: int, base: int | None = None) -> int | None:
        """Steps on the live line from `start` to `base` (the head by default); None when `start` was rolled
        back. A version older than the kept line counts as older than all of it."""
        base, line = self.head if base is None else base, self.line
        at = -1 if base is None else bisect_left(line, base)  # versions on the line are in order
        if at < 0 or at == len(line) or line[at] != base:
            raise LogCorrupt(f"version {base} is not on the live line")
        begun = bisect_left(line, start)
        if begun < len(line) and line[begun] == start:
            return at - begun
        return at + 1 if start < line[0] else None

    def settled(self, ordinal: int) -> bool:
        return ordinal < self.low_water or ordinal in self.settled_above

    def open_attempt(self, ordinal: int) -> int | None:
        """The one open attempt of an outstanding ordinal; None once it is settled."""
        return None if self.settled(ordinal) else self.attempts.get(ordinal, 0)

    def is_open(self, uid: Uid) -> bool:
        return self.open_attempt(uid.ordinal) == uid.attempt

    def outstanding(self) -> Iterable[Uid]:
        """Open attempts in stream order, without end."""
        ordinal = self.low_water
        while True:
            attempt = self.open_attempt(ordinal)
            if attempt is not None:
                yield Uid(ordinal, attempt)
            ordinal += 1

    # -- folding -------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Fold one record. Raises LogCorrupt, leaving the ledger unusable, if it breaks a rule."""
        if record.lsn != self.lsn + 1:
            raise LogCorrupt(f"record {record.lsn} after {self.lsn}")
        match record:
            case Fence():
                self.fence = record.lsn
            case Step():
                self._step(record)
            case Settle():
                for drop in record.dropped:
                    self._drop(record.lsn, drop, self.head)
            case Rollback():
                if record.snapshot is None or record.snapshot.head != record.to:
                    raise LogCorrupt(f"record {record.lsn}: a rollback to {record.to} without its snapshot")
                if record.snapshot.next_version < self.next_version or record.snapshot.gc_floor < self.gc_floor:
                    raise LogCorrupt(f"record {record.lsn}: a rollback may lower neither versions nor the gc floor")
                self._restore(record.snapshot)
            case GcFloor():
                if record.version < self.gc_floor:
                    raise LogCorrupt(f"record {record.lsn}: gc floor falls from {self.gc_floor} to {record.version}")
                if record.version > self.oldest_needed:
                    raise LogCorrupt(
                        f"record {record.lsn}: gc floor {record.version} is above version {self.oldest_needed}, which "
                        "the run still needs"
                    )
                self.gc_floor = record.version
            case Retain():
                self._retain(record)
        self.lsn = record.lsn

    def _step(self, record: Step) -> None:
        if record.version != self.next_version or record.base != self.head:
            raise LogCorrupt(
                f"record {record.lsn}: version {record.version} on base {record.base}, "
                f"but {self.next_version} on {self.head} is next"
            )
        for text in record.trained:
            uid = self._open(record.lsn, text)
            self.settle(uid.ordinal)
            self.trained_groups += 1
        for drop in record.dropped:
            self._drop(record.lsn, drop, record.version)
        self.head, self.next_version, self.alpha = record.version, record.version + 1, record.alpha
        self.line = [*self.line, record.version][-LINE:]
        self.states[record.version] = record.state
        kept = {*self.line, self.newest_full}
        self.states = {v: state for v, state in self.states.items() if v in kept}

    def _open(self, lsn: int, text: str) -> Uid:
        uid = Uid.parse(text)
        if not self.is_open(uid):
            raise LogCorrupt(f"record {lsn}: attempt {uid} is not open (open is {self.open_attempt(uid.ordinal)})")
        return uid

    def _retain(self, record: Retain) -> None:
        version, mark = record.version, record.mark
        if version >= self.next_version:
            raise LogCorrupt(f"record {record.lsn}: version {version} does not exist yet")
        if mark is Mark.UNPIN:
            self.pins.pop(version, None)
            return
        if mark is Mark.PIN:
            if version < self.gc_floor or version in self.deleted:
                raise LogCorrupt(
                    f"record {record.lsn}: version {version} may be deleted already (the gc floor is {self.gc_floor})"
                )
            if record.state is None:
                raise LogCorrupt(f"record {record.lsn}: version {version} is pinned without its state")
            self.pins[version] = record.state
            return
        if version in self.pins or self.needed(version):
            why = "is pinned" if version in self.pins else "is needed to go on"
            raise LogCorrupt(f"record {record.lsn}: version {version} can not be deleted: it {why}")
        self.deleted.add(version)
        self.states.pop(version, None)

    def needed(self, version: int) -> bool:
        """Whether the run can not go on without this version: it is in the window that may still be trained, or
        the newest one to resume from."""
        return version == self.newest_full or version in self._window

    @property
    def oldest_needed(self) -> int:
        """No gc floor may lie above: to go on, the run may have to train again, from the newest full state, what
        was logged since, and those samples may be alpha older than it."""
        if self.newest_full not in self.line:
            return self.gc_floor
        oldest = self.line.index(self.newest_full) - (self.alpha or 0)
        if oldest < 0 and len(self.line) == LINE:  # it is older than the kept line
            return self.gc_floor
        return self.line[max(0, oldest)]

    @property
    def _window(self) -> list[int]:
        """The versions whose samples may still be trained."""
        return self.line[-(self.alpha or 0) - 1 :]

    def _drop(self, lsn: int, drop: Drop, head: int | None) -> None:
        uid = self._open(lsn, drop.uid)
        self.dropped_groups[drop.reason.value] += 1
        if drop.outcome is Outcome.ABANDON:
            self.settle(uid.ordinal)
        else:
            self.attempts[uid.ordinal] = uid.attempt + 1
            if head is not None:
                self.granted[uid.ordinal] = head
            self.strikes.setdefault(uid.ordinal, Counter())[drop.reason.value] += 1

    def settle(self, ordinal: int) -> None:
        """Close an ordinal for good: trained or abandoned."""
        self.attempts.pop(ordinal, None)
        self.granted.pop(ordinal, None)
        self.strikes.pop(ordinal, None)
        self.settled_above.add(ordinal)
        while self.low_water in self.settled_above:
            self.settled_above.remove(self.low_water)
            self.low_water += 1
